"""Means in codes: what replicas have changed since they last agreed travels in fewer bytes, and no
mean moves.

Replicas agree, bit for bit, on a reference r. A member of a lane sends `q = C(s - r)`; the owner of
a chunk sums what came, decoded, in rank order, and sends the mean back in codes as well; what that
rounds away it owes, and adds to its next mean.

    m = mean_j q_j,   x <- x + (m - q),   r <- r + m

A member subtracts its own value as it was sent, so that the others add what it gives: `sum x + n *
owed` is what it was, whatever the codec does. What the code lost stays in x - r and is offered
again. With an outer optimizer r is its theta, and `x <- x + theta' - (theta + q)`. Gradients have
no x for it to stay in: it is kept as feedback and added to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loosestep.core.collectives.gloo import Channel
from loosestep.core.contracts import Coded

UNIT = 1 << 22  # values that travel at a time: their codes are messages of a few MiB
Advance = Callable[[slice, torch.Tensor], torch.Tensor]


class Scratch:
    """Memory that is kept: fresh pages cost more than the sums."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def bytes(self, use: str, count: int, device: torch.device) -> torch.Tensor:
        """So many bytes."""
        return self.take(use, count, torch.empty(0, dtype=torch.uint8, device=device))

    def take(self, use: str, count: int, like: torch.Tensor) -> torch.Tensor:
        """So many values of the type of `like`."""
        key = (use, like.dtype, like.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < count:
            kept = like.new_zeros(count)
            self._kept[key] = kept
        return kept[:count]


class Sums:
    """The members of a lane, who exchange one tensor of a vector in codes."""

    def __init__(
        self,
        coded: Coded,
        number: int,
        lane: Channel,
        *,
        weights: Sequence[int] | None,
        total: int,
        scratch: Scratch,
    ) -> None:
        self._coded = coded
        self.scratch = scratch
        self._codec = coded.codec
        self._number = number
        self._lane = lane
        self.index = lane.index
        self.grain = lane.size
        self._weights = [1] * lane.size if weights is None else list(weights)
        self._total = total
        self._owed = torch.empty(0)
        self._left = torch.empty(0)

    def meet(self, values: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of this member as they were sent, and the mean `sum_j weights[j] sent_j / total`
        in codes, the same bits on every member. Scratch memory: use it before the next unit.
        """
        lane = self._lane
        codec = self._codec
        take = self.scratch.take
        members = lane.size
        count = values.numel() // lane.size
        sent = take("sent", values.numel(), values)
        mean = take("mean", values.numel(), values)
        if members == 1:
            return sent.copy_(values), mean.copy_(values).mul_(self._weights[0] / self._total)
        codes = self._memory("codes", members, count, values)
        codec.encode(
            values.view(members, count),
            codes,
            seed=self._seed(begin, lane.index),
        )
        arrived = _swap(lane, codes)
        chunk = self._sum(arrived, take("chunk", count, values), mean[:count])
        owed = _there(self._coded.kept["owed"], self._number, values.device)[begin // members :][
            :count
        ]
        chunk.div_(self._total).add_(owed)
        back = self._memory("back", 1, count, values)
        seed = self._seed(begin, members + lane.index)
        codec.encode(chunk.view(1, count), back, seed=seed)
        self._left = chunk.sub_(codec.decode(back, sent[:count].view(1, count)).view(count))
        self._owed = owed
        codec.decode(_gather(lane, back), mean.view(members, count))
        codec.decode(codes, sent.view(members, count))
        return sent, mean

    def owe(self) -> None:
        """What the last mean was rounded by is owed from now on."""
        self._owed.copy_(self._left)

    def advance(
        self, begin: int, mean: torch.Tensor, outer: Advance | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference of a unit goes on; where it is now, and by how much it has moved."""
        self.owe()
        there = _there(self._coded.reference, self._number, mean.device)[
            begin : begin + mean.numel()
        ]
        if outer is None:
            return there.add_(mean), mean
        before = self.scratch.take("before", mean.numel(), mean).copy_(there)
        now = outer(slice(begin, begin + mean.numel()), mean.add_(there))
        return now, torch.sub(now, before, out=before)

    def reference(self, begin: int, count: int, device: torch.device) -> torch.Tensor:
        """What all agree on, of a unit."""
        return _there(self._coded.reference, self._number, device)[begin : begin + count]

    def _sum(self, arrived: torch.Tensor, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """What came, decoded and summed in rank order."""
        for member, weight in enumerate(self._weights):
            into = total if member == 0 else part
            self._codec.decode(arrived[member : member + 1], into.view(1, -1))
            if member == 0:
                total.mul_(weight)
            else:
                total.add_(part, alpha=weight)
        return total

    def _seed(self, begin: int, sender: int) -> int:
        return seed_of(self._coded.kept["rounds"], self._number, begin, sender)

    def _memory(self, use: str, rows: int, count: int, like: torch.Tensor) -> torch.Tensor:
        size = self._codec.size(count)
        return self.scratch.bytes(use, rows * size, like.device).view(rows, size)


def seed_of(*numbers: int) -> int:
    """Another one for every message: round, tensor, unit, sender."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) * 6364136223846793005 + 1442695040888963407) % (1 << 63)
    return mixed


def begin_codes(reference: Sequence[torch.Tensor], members: int) -> dict[str, Any]:
    """What is kept, before the first exchange: nothing is owed."""
    return {"rounds": 0, "owed": [row.new_zeros(row.numel() // members) for row in reference]}


def widened(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in float32 or wider: what replicas agree on has more bits than a half."""
    return [row.to(torch.promote_types(row.dtype, torch.float32), copy=True) for row in rows]


def average_row(flat: torch.Tensor, sums: Sums, *, outer: Advance | None) -> float:
    """Overwrite a member's row with what is missing to the goal of all; how far it was from the
    mean, squared.
    """
    spread = 0.0
    length = max(UNIT // sums.grain, 1) * sums.grain
    wide = torch.promote_types(flat.dtype, torch.float32)
    for begin, piece in zip(range(0, flat.numel(), length), flat.split(length), strict=True):
        moved = sums.scratch.take("moved", piece.numel(), piece.new_empty(0, dtype=wide))
        moved.copy_(piece).sub_(sums.reference(begin, piece.numel(), piece.device))
        sent, mean = sums.meet(moved, begin)
        spread += float(torch.linalg.vector_norm(moved.sub_(mean))) ** 2
        _, step = sums.advance(begin, mean, outer)
        piece.copy_(torch.sub(step, sent, out=moved))
    return spread


def average_through_nodes(
    flat: torch.Tensor,
    sums: Sums | None,
    *,
    node: Channel,
    lanes: int,
    members: int,
    outer: Advance | None,
    scratch: Scratch,
) -> float:
    """The same where single ranks are the replicas, between whose `members` nodes the lanes go: a
    node sends what the sum of its replicas has moved, and what its codes lose stays with them in
    equal shares. `sums`: None beyond the last lane.
    """
    spread = 0.0
    rows = flat.view(lanes, -1)
    mine = node.row(lanes)
    wide = flat.new_empty(0, dtype=torch.promote_types(flat.dtype, torch.float32))
    width = max(UNIT // lanes // members, 1) * members
    for begin, columns in zip(range(0, rows.shape[1], width), rows.split(width, 1), strict=True):
        count = columns.shape[1]
        goal = scratch.take("goal", columns.numel(), wide).view(lanes, count).copy_(columns)
        if node.size > 1:
            goal[mine] = node.part(goal.view(-1), lanes)
        if sums is not None:
            moved = goal[mine]
            moved.sub_(sums.reference(begin, count, flat.device), alpha=node.size)
            sent, mean = sums.meet(moved, begin)
            now, _ = sums.advance(begin, mean, outer)
            moved.sub_(sent).div_(node.size).add_(now)
        if node.size > 1:
            node.share(goal)
        columns.copy_(goal.sub_(columns))
        spread += float(torch.linalg.vector_norm(columns)) ** 2
    return spread


def average_with_feedback(flat: torch.Tensor, sums: Sums, feedback: torch.Tensor) -> None:
    """Overwrite a member's gradients with the mean of all; what its codes lose, now and before, is
    its `feedback`, which it adds. A mean that is not finite, which a GradScaler skips, is not
    remembered.
    """
    length = max(UNIT // sums.grain, 1) * sums.grain
    for begin, piece in zip(range(0, flat.numel(), length), flat.split(length), strict=True):
        left = feedback[begin : begin + piece.numel()]
        values = sums.scratch.take("moved", piece.numel(), left).copy_(piece).add_(left)
        sent, mean = sums.meet(values, begin)
        piece.copy_(mean)
        if math.isfinite(float(mean.sum())):
            torch.sub(values, sent, out=left)
            sums.owe()


def _there(vector: list[torch.Tensor], number: int, device: torch.device) -> torch.Tensor:
    """A kept tensor, brought to where the means are made."""
    if vector[number].device != device:
        vector[number] = vector[number].to(device)
    return vector[number]


def _swap(lane: Channel, codes: torch.Tensor) -> torch.Tensor:
    """All-to-all, by way of the host."""
    return lane.swap(codes.cpu()).to(codes.device)


def _gather(lane: Channel, codes: torch.Tensor) -> torch.Tensor:
    """All-gather, by way of the host."""
    return lane.gather(codes[0].cpu()).to(codes.device)
