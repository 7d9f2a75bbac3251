"""Hugging Face's Trainer with DASO, on a small model that needs no download.

torchrun --nproc-per-node 2 examples/transformers_daso.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from loosestep.integrations.transformers import attach


class Counting(Dataset):
    """Sequences that count upwards from anywhere."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=40,
        learning_rate=1e-2,
        per_device_train_batch_size=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting())
    attach(trainer, "daso:period=4")
    result = trainer.train()
print(
    f"loss {result.training_loss:.3f}, checksum "
    f"{sum(p.sum().item() for p in model.parameters()):.9f}"
)
