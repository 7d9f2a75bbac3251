"""The acoustic recipe with many models at once: bidirectional LSTMs with weights of their own, CTC,
on AN4.

`prepare` reads the corpus with the recipe and keeps what is needed as arrays; after that nothing
but torch and numpy is. Utterances are varied as the recipe does it (phase, speed, masks, noise), by
one vectorised rule for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from papers.learners import LEARNERS, Layout

STACK = 3
OPTIONS = {"layers": 2, "cells": 128, "optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4}
EPOCHS = 40


class Spoken(NamedTuple):
    """`frames` [seeds, learners, longest, utterances, features]; lengths on the CPU; targets
    padded with blanks.
    """

    frames: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


# Many LSTMs ---------------------------------------------------------------------------------------


class Recurrence(torch.autograd.Function):
    """LSTM layers side by side: `gates` [models, frames, batch, 4 cells] of the inputs, in the
    order o, i, f, g.

    c_t = f c_{t-1} + i g        h_t = o tanh(c_t)
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Writes into `gates`: they are not needed as they were."""
        cells = weight.shape[2]
        shape = (*gates.shape[:3], cells)
        memory, squashed, hidden = (gates.new_empty(shape) for _ in range(3))
        turned = weight.transpose(1, 2)
        for t in range(gates.shape[1]):
            now = gates[:, t]
            if t:
                now.baddbmm_(hidden[:, t - 1], turned)
            now[..., : 3 * cells].sigmoid_()
            now[..., 3 * cells :].tanh_()
            o, i, f, g = now.split(cells, dim=-1)
            kept = torch.mul(i, g, out=memory[:, t])
            if t:
                kept.addcmul_(f, memory[:, t - 1])
            torch.tanh(kept, out=squashed[:, t])
            torch.mul(o, squashed[:, t], out=hidden[:, t])
        ctx.save_for_backward(gates, weight, memory, squashed, hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Local factors for all frames at once, then backwards through time."""
        gates, weight, memory, squashed, hidden = ctx.saved_tensors
        cells = weight.shape[2]
        frames = gates.shape[1]
        o, i, f, g = gates.split(cells, dim=-1)
        slopes = gates.new_empty(gates.shape)
        of_o, of_i, of_f, of_g = slopes.split(cells, dim=-1)
        of_o.copy_(squashed * o * (1 - o))
        of_i.copy_(g * i * (1 - i))
        of_f[:, 0] = 0
        of_f[:, 1:] = memory[:, :-1] * (f * (1 - f))[:, 1:]
        of_g.copy_(i * (1 - g.square()))
        through = o * (1 - squashed.square())
        down = upstream[0].clone()
        carried = torch.zeros_like(memory[:, 0])
        for t in reversed(range(frames)):
            if t + 1 < frames:
                down[:, t].baddbmm_(slopes[:, t + 1], weight)
            carried.addcmul_(down[:, t], through[:, t])
            slopes[:, t, :, :cells].mul_(down[:, t])
            rest = slopes[:, t, :, cells:].unflatten(-1, (3, cells))
            rest.mul_(carried[:, :, None])
            carried.mul_(f[:, t])
        grown = None
        if frames > 1:
            later = slopes[:, 1:].flatten(1, 2)
            before = hidden[:, :-1].flatten(1, 2)
            grown = torch.bmm(later.transpose(1, 2), before)
        return slopes, torch.zeros_like(weight) if grown is None else grown


def backwards(frames: Tensor, lengths: Tensor) -> Tensor:
    """Every utterance from its end to its beginning, padding left where it is: [models, frames,
    batch, features].
    """
    at = torch.arange(frames.shape[1], device=frames.device)[None, :, None]
    last = lengths[:, None, :]
    turned = torch.where(at < last, last - 1 - at, at)
    return frames.gather(1, turned[..., None].expand(-1, -1, -1, frames.shape[3]))


def bidirectional(
    frames: Tensor, lengths: Tensor, weights: Mapping[str, Tensor], layer: int
) -> Tensor:
    """One layer of every model: [models, frames, batch, 2 cells]."""
    models, longest, batch, _ = frames.shape
    gates = []
    back = []
    for suffix, inputs in (("", frames), ("_reverse", backwards(frames, lengths))):
        kinds = ("into", "back", "first_bias", "second_bias")
        into, own, first, second = (weights[f"lstms.{layer}.{kind}{suffix}"] for kind in kinds)
        gates.append(
            torch.baddbmm((first + second)[:, None], inputs.flatten(1, 2), into.transpose(1, 2))
        )
        back.append(own)
    hidden = Recurrence.apply(
        torch.cat(gates).view(2 * models, longest, batch, -1), torch.cat(back)
    )
    ahead, behind = hidden.chunk(2)
    return torch.cat([ahead, backwards(behind, lengths)], dim=-1)


def scores(
    weights: Mapping[str, Tensor], frames: Tensor, lengths: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Of every unit, [models, frames, batch, units]; anything past an utterance's end."""
    layers = sum(name.endswith("into") for name in weights)
    for layer in range(layers):
        frames = bidirectional(frames, lengths, weights, layer)
        frames = F.dropout(frames, dropout) if dropout else frames
    flat = torch.baddbmm(
        weights["output.bias"][:, None],
        frames.flatten(1, 2),
        weights["output.weight"].transpose(1, 2),
    )
    return flat.view(*frames.shape[:3], -1)


def ctc(values: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """The recipe's loss of every model: per unit of the transcript, averaged over its
    utterances.
    """
    models, longest, batch, units = values.shape
    logs = F.log_softmax(values.float() if values.dtype == torch.bfloat16 else values, dim=-1)
    logs = logs.transpose(0, 1).reshape(longest, models * batch, units)
    each = F.ctc_loss(
        logs,
        targets.flatten(0, 1),
        lengths.flatten(),
        target_lengths.flatten(),
        reduction="none",
        zero_infinity=True,
    )
    return (each.view(models, batch) / target_lengths.to(each.device)).mean(1)


# The recipe's parameters in this shape ------------------------------------------------------------


def reordered(rows: Tensor) -> Tensor:
    """Gates i, f, g, o as o, i, f, g."""
    i, f, g, o = rows.chunk(4)
    return torch.cat([o, i, f, g])


def packed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the recipe's model under the names used here."""
    found = {}
    kinds = {
        "into": "weight_ih",
        "back": "weight_hh",
        "first_bias": "bias_ih",
        "second_bias": "bias_hh",
    }
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("lstms"))
    for layer in range(layers):
        for suffix in ("", "_reverse"):
            for kind, torch_kind in kinds.items():
                found[f"lstms.{layer}.{kind}{suffix}"] = reordered(
                    state[f"lstms.{layer}.{torch_kind}_l0{suffix}"]
                )
    found["output.weight"] = state["output.weight"]
    found["output.bias"] = state["output.bias"]
    return found


# The task -----------------------------------------------------------------------------------------


class Speech:
    """AN4 out of `prepare`'s arrays."""

    momentum = 0.9
    weight_decay = 1e-4
    clip = 5.0
    dropout = 0.2
    noise = 0.3

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], *, device: torch.device, epochs: float = EPOCHS
    ) -> None:
        self.device = device
        self.epochs = epochs
        names = [str(name) for name in arrays["names"]]
        shapes = [tuple(int(side) for side in str(shape).split("x")) for shape in arrays["shapes"]]
        self.layout = Layout(dict(zip(names, shapes, strict=True)))
        self._starts = torch.from_numpy(arrays["starts"])
        self._lengths = arrays["lengths"].astype(np.int64)
        self._begins = np.concatenate([[0], np.cumsum(self._lengths)])[:-1]
        self._frames = torch.from_numpy(arrays["frames"].astype(np.float32)).to(device)
        self._targets = [[int(unit) for unit in row.split()] for row in map(str, arrays["targets"])]
        self._test = int(arrays["test"])
        self._train = len(self._lengths) - self._test
        self._symbols = [str(symbol) for symbol in arrays["symbols"]]
        self._plans: dict[tuple[int, int], list[NDArray[np.int64]]] = {}

    def start(self, seed: int) -> Tensor:
        return self._starts[seed]

    def steps(self, batch: int) -> int:
        return int(self.epochs * self._train / batch)

    def factor(self, step: int, steps: int) -> float:
        """Ten sixteenths of the training from a sixteenth of the rate up to it, then 1/sqrt(2)
        every further sixteenth.
        """
        at = step / steps
        if at < 10 / 16:
            return 1 / LEARNERS + (1 - 1 / LEARNERS) * at / (10 / 16)
        return float(2 ** (-(at - 10 / 16) * 16 / 2))

    def batch(self, step: int, batch: int, seeds: Sequence[int]) -> Spoken:
        """The utterances of all seeds; the lengths of what they take in a step are alike."""
        # [seeds, batch], by length
        ids = np.stack([self._plan(batch, seed)[step] for seed in seeds])
        ids = ids.reshape(len(seeds), -1, LEARNERS).transpose(0, 2, 1)
        draws = [np.random.default_rng([seed, batch, step]) for seed in seeds]
        return self.varied(ids, draws)

    def _plan(self, batch: int, seed: int) -> list[NDArray[np.int64]]:
        """Pools of eight batches are sorted by length and cut; the cuts are shuffled alike for
        all seeds.
        """
        if (batch, seed) not in self._plans:
            steps = self.steps(batch)
            pool = 8
            draw = np.random.default_rng([seed, 1])
            common = np.random.default_rng(2)
            pools = -(-steps // pool)
            stream = np.concatenate(
                [
                    draw.permutation(self._train)
                    for _ in range(1 + pools * pool * batch // self._train)
                ]
            )
            plan: list[NDArray[np.int64]] = []
            for number in range(pools):
                chosen = stream[number * pool * batch : (number + 1) * pool * batch]
                chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
                cuts = np.split(chosen, pool)
                plan += [cuts[i] for i in common.permutation(pool)]
            self._plans[batch, seed] = plan
        return self._plans[batch, seed]

    def varied(self, ids: NDArray[np.int64], draws: Sequence[np.random.Generator]) -> Spoken:
        """Utterances [seeds, learners, batch], each in another phase, at another speed, with two
        stretches of time blank.
        """
        each = ids.shape[1:]
        phase = np.stack([draw.integers(STACK, size=each) for draw in draws])
        speed = np.stack([draw.uniform(0.9, 1.1, size=each) for draw in draws])
        left = self._lengths[ids] - phase
        count = np.maximum(1, np.rint(left / speed)).astype(np.int64)
        widest = np.minimum(20, count // 5)
        masks = []
        for _ in range(2):
            width = np.floor(np.stack([draw.uniform(size=each) for draw in draws]) * (widest + 1))
            first = np.floor(
                np.stack([draw.uniform(size=each) for draw in draws]) * (count - width + 1)
            )
            masks.append((first, first + width))
        return self.gathered(ids, phase, speed, count, masks)

    def gathered(
        self,
        ids: NDArray[np.int64],
        phase: NDArray[np.int64],
        speed: NDArray[np.float64],
        count: NDArray[np.int64],
        masks: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
    ) -> Spoken:
        """Frames by linear interpolation at  t_i = phase + i * speed,  three stacked, on the
        device.
        """
        device = self.device
        stacked = -(-count // STACK)
        longest = int(stacked.max())
        # the last frame is repeated
        at = np.minimum(np.arange(longest * STACK), count[..., None] - 1)
        time = np.minimum(at * speed[..., None], (self._lengths[ids] - phase - 1)[..., None])
        low = np.floor(time)
        begin = (self._begins[ids] + phase)[..., None]
        index = torch.from_numpy((begin + low).astype(np.int64)).to(device)
        last = (self._begins[ids] + self._lengths[ids] - 1)[..., None]
        above = torch.from_numpy(np.minimum(begin + low + 1, last).astype(np.int64)).to(device)
        weight = torch.from_numpy((time - low).astype(np.float32)).to(device)[..., None]
        frames = self._frames[index]
        frames += weight * (self._frames[above] - frames)
        for first, end in masks:
            blank = (at >= first[..., None]) & (at < end[..., None])
            frames.masked_fill_(torch.from_numpy(blank).to(device)[..., None], 0.0)
        # [.., batch, longest, 3 features] turned
        frames = frames.view(*ids.shape, longest, -1).transpose(2, 3).contiguous()
        units = [self._targets[i] for i in ids.ravel()]
        lengths = [len(row) for row in units]
        padded = np.zeros((len(units), max(lengths)), np.int64)
        for row, own in zip(padded, units, strict=True):
            row[: len(own)] = own
        targets = torch.from_numpy(padded).view(*ids.shape, -1).to(device)
        return Spoken(
            frames, torch.from_numpy(stacked), targets, torch.tensor(lengths).view(ids.shape)
        )

    def losses(self, weights: Mapping[str, Tensor], batch: Spoken, which: Tensor) -> Tensor:
        frames = (
            batch.frames + self.noise * torch.randn_like(batch.frames)
            if self.noise
            else batch.frames
        )

        def spread(values: Tensor) -> Tensor:
            return values[which].flatten(0, 1)

        lengths = spread(batch.lengths)
        found = scores(weights, spread(frames), lengths.to(self.device), dropout=self.dropout)
        return ctc(found, lengths, spread(batch.targets), spread(batch.target_lengths))

    def judge(self, weights: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Word and character error rate on the test set, and the loss, of every model."""
        models = len(weights["output.bias"])
        wrong = np.zeros((models, 4))
        loss = torch.zeros(models, device=self.device, dtype=weights["output.bias"].dtype)
        tests = np.arange(self._train, self._train + self._test)
        tests = tests[np.argsort(self._lengths[tests], kind="stable")]
        for ids in np.array_split(tests, min(5, len(tests))):
            shape = (1, 1, len(ids))
            still = ids.reshape(shape)
            batch = self.gathered(
                still, np.zeros(shape, np.int64), np.ones(shape), self._lengths[still], []
            )
            lengths = batch.lengths[0].expand(models, -1)
            frames = batch.frames[0].to(weights["output.bias"].dtype).expand(models, -1, -1, -1)
            found = scores(weights, frames, lengths.to(self.device))
            loss += len(ids) * ctc(
                found,
                lengths,
                batch.targets[0].expand(models, -1, -1),
                batch.target_lengths[0].expand(models, -1),
            )
            paths = found.argmax(-1).transpose(1, 2).cpu().numpy()
            for model in range(models):
                for i, utterance in enumerate(ids):
                    said = self._text(collapsed(paths[model, i, : lengths[model, i]]))
                    meant = self._text(self._targets[utterance])
                    wrong[model] += (
                        edits(meant.split(), said.split()),
                        len(meant.split()),
                        edits(meant, said),
                        len(meant),
                    )
        return [
            {"wer": row[0] / row[1], "cer": row[2] / row[3], "loss": value}
            for row, value in zip(wrong, (loss / self._test).tolist(), strict=True)
        ]

    def _text(self, units: Sequence[int]) -> str:
        return " ".join("".join(self._symbols[unit] for unit in units).split())


def collapsed(path: NDArray[np.int64]) -> list[int]:
    """Repetitions merged, blanks dropped."""
    changes = np.flatnonzero(np.diff(path, prepend=-1))
    return [int(unit) for unit in path[changes] if unit]


def edits(expected: Sequence[str], found: Sequence[str]) -> int:
    """Substitutions, deletions and insertions."""
    costs = list(range(len(found) + 1))
    for i, wanted in enumerate(expected, 1):
        diagonal = costs[0]
        costs[0] = i
        for j, got in enumerate(found, 1):
            best = min(costs[j] + 1, costs[j - 1] + 1, diagonal + (wanted != got))
            diagonal = costs[j]
            costs[j] = best
    return costs[-1]


def prepare(data: Path, seeds: int) -> dict[str, NDArray[Any]]:
    """The corpus and untrained models as arrays."""
    from loosestep.recipes.acoustic import AcousticRecipe

    tasks = [AcousticRecipe().build(OPTIONS, data=data, seed=seed) for seed in range(seeds)]
    task = tasks[0]
    utterances = (*task.corpus.train, *task.corpus.test)
    states = [packed(other.make_model().state_dict()) for other in tasks]
    return {
        "frames": np.concatenate([u.frames for u in utterances]).astype(np.float16),
        "lengths": np.array([len(u.frames) for u in utterances]),
        "targets": np.array([" ".join(map(str, task.units.encode(u.text))) for u in utterances]),
        "test": np.array(len(task.corpus.test)),
        "symbols": np.array(task.units.symbols),
        "names": np.array(list(states[0])),
        "shapes": np.array(["x".join(map(str, tensor.shape)) for tensor in states[0].values()]),
        "starts": np.stack(
            [torch.cat([t.flatten() for t in state.values()]).numpy() for state in states]
        ),
    }
