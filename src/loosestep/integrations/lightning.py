"""Lightning: `Trainer(strategy=LoosestepStrategy("daso:period=4"), devices=..., num_nodes=...)`.

Lightning's own DDP strategy without DDP: it starts the processes and shards the data as always,
every process trains its own module, and loosestep connects them. Validation and checkpoints see the
mean of all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from loosestep.attachment import attach
from loosestep.run import Run
from loosestep.strategies import Strategy
from loosestep.topology import Topology

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.types import STEP_OUTPUT
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; loosestep.integrations.lightning needs it: pip install 'loosestep[lightning]'"
    ) from error


class LoosestepStrategy(DDPStrategy):
    """Takes a loosestep strategy, or its name, and what `DDPStrategy` takes beside the arguments
    for DDP itself.
    """

    def __init__(
        self,
        strategy: Strategy | str = "daso",
        *,
        topology: Topology | None = None,
        deadline: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self._ddp_kwargs:
            raise TypeError(
                f"there is no DistributedDataParallel here to take {', '.join(self._ddp_kwargs)}"
            )
        self.run: Run | None = None
        self._chosen = strategy
        self._topology = topology
        self._deadline = deadline
        self._swapped: AbstractContextManager[nn.Module] | None = None

    def configure_ddp(self) -> None:
        """The module stays as it is."""

    def setup(self, trainer: Trainer) -> None:
        """Attach when module and optimizers are where they belong."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.model is not None
            _leave_sigterm_to_each_rank(trainer)
            self.run = attach(
                self.model,
                self.optimizers,
                self._chosen,
                topology=self._topology,
                deadline=self._deadline,
            )

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's own, its loss observed."""
        output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.run is not None and loss is not None:
            self.run.observe(loss)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients accumulate locally."""
        with self.run.no_sync() if self.run is not None else nullcontext():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean of all replicas; every process calls it."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        if self.run is None:
            return state
        with self.run.consensus():
            return {name: value.clone() for name, value in state.items()}

    def on_validation_start(self) -> None:
        """Inside validation the module is the mean of all replicas."""
        super().on_validation_start()
        if self.run is not None:
            self._swapped = self.run.consensus()
            self._swapped.__enter__()

    def on_validation_end(self) -> None:
        """Back to what this process trains."""
        if self._swapped is not None:
            self._swapped.__exit__(None, None, None)
            self._swapped = None
        super().on_validation_end()

    def on_train_end(self) -> None:
        """All processes end with the same parameters."""
        if self.run is not None:
            self.run.finish()
            self.run = None
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """The others learn why."""
        if self.run is not None:
            self.run.__exit__(type(exception), exception, exception.__traceback__)
            self.run = None
        super().on_exception(exception)


def _leave_sigterm_to_each_rank(trainer: Trainer) -> None:
    """Who gets SIGTERM ends after its batch and its peers learn so from loosestep. Newer releases
    of Lightning instead broadcast before every batch, from rank 0 to all, whether it got one: no
    rank would be ahead of another.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    connector: Any = trainer._signal_connector
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = _ask_nobody
        connector._sigterm_notifier_fn = partial(_note_sigterm, trainer)


def _ask_nobody() -> None:
    """In the place of the broadcast."""


def _note_sigterm(trainer: Trainer, number: int, frame: object) -> None:
    """What Lightning's own handler does, without its broadcast."""
    connector = trainer._signal_connector
    launcher = trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(number)
    connector.received_sigterm = True
