"""One rank of two, as a user of a trainer: first what the trainer sets up by default, then the
example.
"""

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
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_steps=1, **quiet
    )
    trainer.fit(Plain(), DataLoader(TensorDataset(torch.zeros(8, 2))))


def accelerate_by_default() -> None:
    from accelerate import Accelerator

    from loosestep.integrations.accelerate import attach

    model = torch.nn.Linear(2, 1)
    model, optimizer = Accelerator(cpu=True).prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    attach(model, optimizer, "daso")


def transformers_by_default() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from loosestep.integrations.transformers import LoosestepCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True
        )
        data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
        Trainer(model, arguments, train_dataset=data, callbacks=[LoosestepCallback("daso")]).train()


def transformers_on_the_way() -> None:
    """Evaluates while the replicas differ; says what it was that it evaluated."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from loosestep.integrations.transformers import attach

    def checksum(model: torch.nn.Module) -> str:
        return f"{sum(p.double().sum().item() for p in model.parameters()):.9f}"

    class Look(TrainerCallback):
        def on_step_end(
            self, args: object, state: object, control: object, **kwargs: object
        ) -> None:
            print("trained", checksum(kwargs["model"]))

        def on_prediction_step(
            self, args: object, state: object, control: object, **kwargs: object
        ) -> None:
            print("evaluated", checksum(kwargs["model"]))

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        steps = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.1}
        data = [
            {"input_ids": torch.arange(4).roll(i), "labels": torch.arange(4).roll(i)}
            for i in range(64)
        ]
        trainer = Trainer(
            model,
            TrainingArguments(folder, **quiet, **steps),
            train_dataset=data,
            eval_dataset=data[:16],
            callbacks=[Look()],
        )
        attach(trainer, "localsgd:period=4")
        trainer.train()


try:
    globals()[f"{sys.argv[1]}_by_default"]()
except ValueError as error:
    print(f"refused: {error}")
if sys.argv[1] == "transformers":
    transformers_on_the_way()
runpy.run_path(sys.argv[2])
