"""Trainers as users run them, on two nodes of one rank: what they do by default is refused, the
examples work.
"""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch import nn

from loosestep import launch
from loosestep.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKER = Path(__file__).parent / "trainer_worker.py"
APART = Path(__file__).parent / "apart_worker.py"


def run(*command: object, ranks_per_node: int = 1) -> list[str]:
    """What each rank prints, in rank order."""
    with launch.start(
        [sys.executable, *map(str, command)], nodes=2, ranks_per_node=ranks_per_node
    ) as job:
        result = job.wait(timeout=110)
    told = ["\n".join(rank.output) for rank in job.ranks]
    assert result.exit_code == 0, "\n".join(told)
    return told


@pytest.mark.parametrize(
    ("library", "way_out"),
    [
        ("accelerate", "prepare_model(model, evaluation_mode=True)"),
        ("lightning", "strategy=loosestep.integrations.lightning.LoosestepStrategy(...)"),
        ("transformers", "integrations.transformers.attach(trainer, strategy)"),
    ],
)
def test_a_trainers_own_ddp_is_refused_and_its_example_ends_with_the_same_parameters_everywhere(
    library, way_out
):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (loosestep[{library}])")
    told = run(WORKER, library, EXAMPLES / f"{library}_daso.py")
    ends = [re.search(r"loss ([\d.]+), checksum (\S+)", text) for text in told]
    for text, end in zip(told, ends, strict=True):
        assert way_out in re.search("refused: .*", text)[0]
        assert end[2] == ends[0][2]
        assert float(end[1]) < 2.0  # 8 and more untrained, 3.4 for the language model
    if library == "transformers":
        trained, evaluated = (
            [re.findall(f"{what} (.*)", text)[-1] for text in told]
            for what in ("trained", "evaluated")
        )
        assert trained[0] != trained[1]
        assert evaluated[0] == evaluated[1]  # the mean, which nobody trains
        assert evaluated[0] not in trained


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_rank_makes_all_its_steps_while_another_stands_still(library):
    pytest.importorskip(library, reason=f"{library} is not installed (loosestep[{library}])")
    assert "all steps made" in run(APART, library)[1]


def test_under_lightning_sigterm_ends_the_rank_that_gets_it():
    pytest.importorskip("lightning", reason="lightning is not installed (loosestep[lightning])")
    going_on, ended = run(APART, "lightning", "ends")
    assert "ended by SIGTERMException" in ended
    assert "all steps made" not in ended
    assert "all steps made" in going_on


@pytest.mark.parametrize(("averaged", "counted"), [(True, "no"), (False, "all")])
def test_a_count_of_tokens_over_all_ranks_on_every_step_is_refused(averaged, counted):
    pytest.importorskip(
        "transformers", reason="transformers is not installed (loosestep[transformers])"
    )
    from transformers.training_args import ParallelMode

    from loosestep.integrations.transformers import LoosestepCallback

    asked = SimpleNamespace(
        parallel_mode=ParallelMode.DISTRIBUTED,
        average_tokens_across_devices=averaged,
        include_num_input_tokens_seen=counted,
    )
    with pytest.raises(
        ValueError,
        match="average_tokens_across_devices=False and include_num_input_tokens_seen='no'",
    ):
        LoosestepCallback("daso", trainer=SimpleNamespace()).on_train_begin(asked, None, None)


@pytest.mark.parametrize("spec", ["daso-paper", "delay-by-one:older_gradient=true"])
def test_a_best_model_that_the_end_of_the_run_would_change_is_refused(spec):
    pytest.importorskip(
        "transformers", reason="transformers is not installed (loosestep[transformers])"
    )
    from loosestep.integrations.transformers import LoosestepCallback

    asked = SimpleNamespace(load_best_model_at_end=True, parallel_mode=None)
    with pytest.raises(ValueError, match="load_best_model_at_end=False"):
        LoosestepCallback(spec).on_train_begin(asked, None, None, model=None, optimizer=None)


@pytest.fixture
def told(monkeypatch):
    """What a trainer in this process tells the run, in order."""
    said = []
    observe = Run.observe
    no_sync = Run.no_sync
    monkeypatch.setattr(
        Run, "observe", lambda run, loss: (said.append("loss"), observe(run, loss))[1]
    )
    monkeypatch.setattr(Run, "no_sync", lambda run: (said.append("no sync"), no_sync(run))[1])
    threads = torch.get_num_threads()
    with patch.dict(os.environ):
        yield said
    torch.set_num_threads(threads)  # Lightning takes all there are
    if dist.is_initialized():  # by Lightning, which leaves it so
        dist.destroy_process_group()


ACCUMULATED = ["no sync", "loss", "loss"]  # a step of two batches


def tiny_trainer(folder, **steps):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
    return Trainer(model, TrainingArguments(str(folder), **quiet, **steps), train_dataset=data)


@pytest.mark.filterwarnings("ignore")
def test_transformers_tells_losses_and_accumulates_without_averaging(told, tmp_path):
    pytest.importorskip(
        "transformers", reason="transformers is not installed (loosestep[transformers])"
    )
    from loosestep.integrations.transformers import attach

    trainer = tiny_trainer(
        tmp_path, max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=2
    )
    callback = attach(trainer, "daso")
    trainer.train()
    assert told == ACCUMULATED * 2
    assert callback.run.stats["steps"] == 2


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_transformers_that_fails_ends_the_run_and_the_next_one_begins_another(
    told, tmp_path
):
    pytest.importorskip(
        "transformers", reason="transformers is not installed (loosestep[transformers])"
    )
    from loosestep.integrations.transformers import attach

    trainer = tiny_trainer(tmp_path, max_steps=2)
    callback = attach(trainer, "daso")
    right = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: {}["loss"]
    with pytest.raises(KeyError, match="loss"):
        trainer.train()
    with pytest.raises(RuntimeError, match="this run has ended"), callback.run.consensus():
        pass
    trainer.compute_loss = right
    trainer.train()
    assert callback.run.stats["steps"] == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_tells_losses_and_accumulates_without_averaging(told, tmp_path):
    lightning = pytest.importorskip(
        "lightning", reason="lightning is not installed (loosestep[lightning])"
    )
    from torch.utils.data import DataLoader, TensorDataset

    from loosestep.integrations.lightning import LoosestepStrategy

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            return loss if index % 2 else {"loss": loss}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=LoosestepStrategy("daso"),
        max_steps=2,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1))
    assert told == ACCUMULATED * 2


def test_the_fsdp_example_learns():
    end = re.search(
        r"loss (\d+\.\d+) after 15 exchanges", run(EXAMPLES / "fsdp.py", ranks_per_node=2)[0]
    )
    assert end is not None
    assert float(end[1]) < 8.0  # 16 untrained
