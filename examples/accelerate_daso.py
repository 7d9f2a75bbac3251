"""Accelerate with DASO.

torchrun --nproc-per-node 2 examples/accelerate_daso.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loosestep.integrations.accelerate import attach

accelerator = Accelerator(cpu=True)
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

# placed, not wrapped in DDP over all ranks
model = accelerator.prepare_model(model, evaluation_mode=True)
optimizer, loader = accelerator.prepare(optimizer, loader)

with attach(model, optimizer, "daso:period=4"):
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
print(f"loss {loss.item():.3f}, checksum {sum(p.sum().item() for p in model.parameters()):.9f}")
