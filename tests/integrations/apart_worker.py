"""One rank of two in a trainer: rank 0 stands still until rank 1 has made all its steps, or has
been told to end.
"""

import os
import signal
import sys
import tempfile
from datetime import timedelta

import torch
from torch import distributed as dist

STEPS = 4
RANK = int(os.environ["RANK"])


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def before_a_step(step: int) -> None:
    if RANK == 0 and step == 0:
        store().wait(["go"], timedelta(seconds=20))


def after_a_step(step: int) -> None:
    told_to_end = RANK == 1 and step == 2 and sys.argv[2:] == ["ends"]
    if step == STEPS:
        print("all steps made", flush=True)
    if told_to_end:
        os.kill(os.getpid(), signal.SIGTERM)
    if RANK == 1 and (step == STEPS or told_to_end):
        store().set("go", "")


def with_lightning() -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from loosestep.integrations.lightning import LoosestepStrategy

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            before_a_step(self.global_step)
            return self.net(batch[0]).square().mean()

        def on_train_batch_end(self, *args: object) -> None:
            after_a_step(self.global_step)

    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=LoosestepStrategy("adpsgd"),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Regression(), DataLoader(TensorDataset(torch.ones(8 * STEPS, 2)), batch_size=4))


def with_transformers() -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainerState,
        TrainingArguments,
    )

    from loosestep.integrations.transformers import attach

    class Apart(TrainerCallback):
        def on_step_begin(
            self, args: object, state: TrainerState, control: object, **kwargs: object
        ) -> None:
            before_a_step(state.global_step)

        def on_step_end(
            self, args: object, state: TrainerState, control: object, **kwargs: object
        ) -> None:
            after_a_step(state.global_step)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, **quiet
        )
        data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 32
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Apart()])
        attach(trainer, "adpsgd")
        trainer.train()


try:
    globals()[f"with_{sys.argv[1]}"]()
except SystemExit as end:
    print(f"ended by {type(end).__name__}", flush=True)
