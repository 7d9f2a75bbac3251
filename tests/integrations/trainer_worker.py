"""One rank of two, as a user of a trainer: first what the trainer sets up by default, then the example."""

import runpy
import sys
import tempfile

import torch

import loosestep


def lightning_by_default() -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.net(batch[0]).sum()

        def on_train_start(self) -> None:
            loosestep.attach(self.trainer.strategy.model, self.trainer.strategy.optimizers, "daso")

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_steps=1, **quiet)
    trainer.fit(Plain(), DataLoader(TensorDataset(torch.zeros(8, 2))))


def accelerate_by_default() -> None:
    from accelerate import Accelerator

    from loosestep.integrations.accelerate import attach

    model = torch.nn.Linear(2, 1)
    model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach(model, optimizer, "daso")


def transformers_by_default() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from loosestep.integrations.transformers import LoosestepCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True)
        data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
        Trainer(model, arguments, train_dataset=data, callbacks=[LoosestepCallback("daso")]).train()


try:
    globals()[f"{sys.argv[1]}_by_default"]()
except ValueError as error:
    print(f"refused: {error}")
runpy.run_path(sys.argv[2])
