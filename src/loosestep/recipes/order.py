"""The order in which examples are visited, as a pure function of the seed and the global batch
number.

One gradient of one learner uses one batch. The batches of all learners are numbered through, epoch
after epoch: learner r of n takes the numbers r, r + n, r + 2n, ... So no two learners ever share a
batch, an epoch visits every example once whatever the number of learners, and a position in the
data is one integer: it is easily saved, and a run can be continued by another number of learners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import require

BatchT = TypeVar("BatchT")
Indices = NDArray[np.int64]


def mix(*parts: int | str) -> int:
    """A 63-bit seed from several numbers and names: `mix(seed, "noise", 17)`. A negative number
    counts from 2^64 on.
    """
    words = [
        part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in parts
    ]
    state = np.random.SeedSequence(
        [word if word >= 0 else 2**64 - word for word in words]
    ).generate_state(2, np.uint32)
    return int(state[0]) << 31 ^ int(state[1])


class Order:
    """Batches of example numbers. With `lengths`, examples of similar length share a batch (less
    padding).
    """

    def __init__(
        self,
        examples: int,
        *,
        batch: int,
        seed: int,
        lengths: Sequence[int] | None = None,
        pool: int = 16,
    ) -> None:
        require(examples >= 1, f"there must be at least 1 example to learn from, got {examples}")
        require(batch >= 1, f"batch must be at least 1, got {batch}")
        if lengths is not None and len(lengths) != examples:
            raise ValueError(f"{len(lengths)} lengths were given for {examples} examples")
        self.examples = examples
        self.batch = batch
        self.seed = seed
        self.pool = pool
        self.batches_per_epoch = -(-examples // batch)
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._epoch = -1
        self._plan: list[Indices] = []

    def __getitem__(self, number: int) -> Indices:
        """The examples of the batch with this global number."""
        epoch, position = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._plan = self._plan_epoch(epoch)
        return self._plan[position]

    def _plan_epoch(self, epoch: int) -> list[Indices]:
        """Shuffle; sort by length inside pools of `pool` batches; cut into batches of almost equal
        size; shuffle those.

        The sizes differ by at most 1, so no learner makes a step on a stray remainder.
        """
        draw = np.random.default_rng(mix(self.seed, "order", epoch))
        indices = draw.permutation(self.examples)
        if self._lengths is not None:
            pools = [
                indices[i : i + self.pool * self.batch]
                for i in range(0, self.examples, self.pool * self.batch)
            ]
            indices = np.concatenate(
                [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
            )
        plan = np.array_split(indices, self.batches_per_epoch)
        return [plan[i] for i in draw.permutation(len(plan))]


class BatchStream(Generic[BatchT]):
    """One learner's endless sequence of batches. `number` is the next one to be taken: save it,
    and go on from it.
    """

    def __init__(
        self, load: Callable[[int], BatchT], *, learner: int = 0, learners: int = 1, taken: int = 0
    ) -> None:
        """`taken`: how many batches all learners together have already used (a run that is
        continued).
        """
        if not 0 <= learner < learners:
            raise ValueError(
                f"learner must be in 0..{learners - 1} for {learners} learners, got {learner}"
            )
        if taken < 0:
            raise ValueError(f"taken must be at least 0, got {taken}")
        self._load = load
        self.learners = learners
        self.number = taken + learner

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        batch = self._load(self.number)
        self.number += self.learners
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "learners": self.learners}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a stream of the same number of learners was; for another number use
        `taken`.
        """
        if state["learners"] != self.learners:
            raise ValueError(
                f"the saved position is one of {state['learners']} learners, this stream has "
                f"{self.learners}: start it with taken=<batches used by all learners>"
            )
        self.number = int(state["number"])
