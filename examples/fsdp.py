"""FSDP2 inside the node, DASO between nodes.

loosestep launch --nodes 2 --ranks-per-node 2 examples/fsdp.py        (on several machines:
torchrun, as usual)
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import loosestep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
# "cuda", after torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
mesh = loosestep.node_mesh()
for layer in model:
    if any(True for _ in layer.parameters()):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with loosestep.attach(model, optimizer, "daso:period=4") as run:
    torch.manual_seed(run.rank)  # each rank its own data
    for _ in range(60):
        x = torch.randn(32, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.observe(loss)
    if run.rank == 0:
        print(f"loss {loss.item():.3f} after {run.stats['exchanges']} exchanges")
