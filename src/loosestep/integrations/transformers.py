"""Hugging Face's Trainer: `attach(trainer, "daso:period=4")` before `trainer.train()`.

While it trains, `trainer.evaluate` judges the mean of all replicas; else every process would judge
a model of its own. Losses feed the schedule, and gradients that accumulate are averaged once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from loosestep.integrations.accelerate import attach as attach_prepared
from loosestep.run import Run
from loosestep.strategies import Strategy
from loosestep.strategies import strategy as read_strategy

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.training_args import ParallelMode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; loosestep.integrations.transformers needs it: pip install "
        "'loosestep[transformers]'"
    ) from error


class LoosestepCallback(TrainerCallback):
    """Attaches when training begins, finishes when it ends: then all processes hold the same
    parameters.
    """

    def __init__(
        self, strategy: Strategy | str = "daso", *, trainer: Trainer | None = None, **options: Any
    ) -> None:
        self.run: Run | None = None
        self._training = False
        self._strategy = strategy
        self._trainer = trainer
        self._options = options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Module and optimizer are prepared now."""
        distributed = args.parallel_mode == ParallelMode.DISTRIBUTED
        if self._trainer is None and distributed:
            raise ValueError(
                "the Trainer wraps the model in DistributedDataParallel over all ranks, which "
                "averages gradients among all of them on every step; turn that off with "
                "loosestep.integrations.transformers.attach(trainer, strategy) in the place of "
                "callbacks=[LoosestepCallback(strategy)]"
            )
        if distributed and (
            args.average_tokens_across_devices
            or args.include_num_input_tokens_seen not in ("no", False)
        ):
            raise ValueError(
                "the Trainer would gather counts of tokens from all ranks on every step, where "
                "each waits for the slowest; set average_tokens_across_devices=False and "
                "include_num_input_tokens_seen='no'"
            )
        chosen = read_strategy(self._strategy)
        if args.load_best_model_at_end and not chosen.folds_deltas:
            raise ValueError(
                "load_best_model_at_end puts the best model in place before the run ends, and "
                f"what {chosen} then still has in flight would change it; set "
                "load_best_model_at_end=False, or choose a strategy that folds deltas, such as "
                "daso"
            )
        model = kwargs["model"] if self._trainer is None else self._trainer.model_wrapped
        self.run = attach_prepared(model, kwargs["optimizer"], self._strategy, **self._options)
        self._training = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Nothing is in flight any more."""
        if self.run is not None:
            self.run.finish()
            self._training = False

    def train(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own training; if it fails, the others learn why."""
        try:
            return own(*args, **kwargs)
        except BaseException as error:
            if self.run is not None:
                self.run.__exit__(type(error), error, error.__traceback__)
                self._training = False
            raise

    def evaluate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own evaluation, of the mean of all replicas; every process calls it."""
        with self.run.consensus() if self.run is not None and self._training else nullcontext():
            return own(*args, **kwargs)

    def training_step(
        self, own: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The trainer's own forward and backward, its loss observed."""
        loss = own(*args, **kwargs)
        if self.run is not None:
            self.run.observe(loss)
        return loss

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around every batch of a step but the last."""
        return self.run.no_sync() if self.run is not None else nullcontext()


def attach(
    trainer: Trainer, strategy: Strategy | str = "daso", **options: Any
) -> LoosestepCallback:
    """Keep the trainer from wrapping its model in DDP and from averaging among all ranks, and
    connect it by loosestep while it trains.
    """
    trainer.args.average_tokens_across_devices = False  # a sum over all ranks on every step
    accelerator = trainer.accelerator
    accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
    callback = LoosestepCallback(strategy, trainer=trainer, **options)
    vars(trainer)["train"] = functools.partial(callback.train, trainer.train)
    vars(trainer)["evaluate"] = functools.partial(callback.evaluate, trainer.evaluate)
    vars(trainer)["training_step"] = functools.partial(
        callback.training_step, trainer.training_step
    )
    accelerator.no_sync = callback.no_sync
    trainer.add_callback(callback)
    return callback
