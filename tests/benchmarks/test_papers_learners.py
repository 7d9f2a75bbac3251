"""Many trainings at once are the library's mathematics: the same steps as `loosestep.simulate`
makes with the recipes' models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import loosestep
from loosestep.recipes.acoustic.model import AcousticModel
from loosestep.recipes.vision.resnet import resnet
from loosestep.topology.graphs import permutation
from papers import speech
from papers.learners import LEARNERS, RULES, Cell, Trainings
from papers.pictures import Pictures, Shown
from papers.speech import Speech, Spoken

STEPS = 9
RATE = 0.2
CPU = torch.device("cpu")
CLUSTER = loosestep.Cluster(compute="100ms")  # equal learners: an exchange takes less than a step


def rings(seed: int, rounds: int) -> NDArray[np.int64]:
    return np.array([permutation(range(LEARNERS), seed, number) for number in range(rounds)])


def acoustic_model() -> nn.Module:
    torch.manual_seed(0)
    return AcousticModel(9, layers=2, cells=3, bottleneck=0, outputs=5).double()


def vision_model() -> nn.Module:
    torch.manual_seed(0)
    return resnet("resnet8", channels=3, classes=4, width=0.5).double()


def described(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "names": np.array(list(state)),
        "shapes": np.array(["x".join(map(str, tensor.shape)) for tensor in state.values()]),
        "starts": torch.cat([tensor.flatten() for tensor in state.values()]).numpy()[None],
    }


class Silent(Speech):
    """Without noise and dropout, whose draws could not be the same."""

    noise = 0.0
    dropout = 0.0
    clip = 0.1  # gradients are clipped here, most of them

    def factor(self, step: int, steps: int) -> float:
        return 1.0

    def batch(self, step: int, batch: int, seeds: Sequence[int]) -> Spoken:
        taken = super().batch(step, batch, seeds)
        return taken._replace(frames=taken.frames.double())


class Still(Pictures):
    def factor(self, step: int, steps: int) -> float:
        return 1.0

    def batch(self, step: int, batch: int, seeds: Sequence[int]) -> Shown:
        torch.manual_seed(step)
        taken = super().batch(step, batch, seeds)
        return taken._replace(images=taken.images.double())


def arrays_of_speech(seeds: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(24, 40, size=60)
    arrays = {
        "frames": draw.standard_normal((lengths.sum(), 3)).astype(np.float16),
        "lengths": lengths,
        "targets": np.array(
            [" ".join(map(str, draw.integers(1, 5, size=draw.integers(2, 5)))) for _ in lengths]
        ),
        "test": np.array(4),
        "symbols": np.array(["", "A", "B", "C", " "]),
        **described(speech.packed(acoustic_model().state_dict())),
    }
    return arrays | {"starts": arrays["starts"].repeat(seeds, 0)}


def a_speech() -> Silent:
    return Silent(arrays_of_speech(1), device=CPU, epochs=32 * STEPS / 56 + 0.01)


def some_pictures() -> Still:
    draw = np.random.default_rng(0)
    return Still(
        {
            "images": draw.integers(0, 256, size=(70, 3, 8, 8)).astype(np.uint8),
            "labels": draw.integers(0, 4, size=70),
            "test": np.array(6),
            "mean": np.full(3, 120, np.float32),
            "deviation": np.full(3, 60, np.float32),
            **described(vision_model().state_dict()),
        },
        device=CPU,
        epochs=32 * STEPS / 64 + 0.01,
    )


def spoken_loss(model: nn.Module, taken: Spoken, rank: int) -> Tensor:
    lengths = taken.lengths[0, rank]
    frames = taken.frames[0, rank].transpose(0, 1)[:, : int(lengths.max())]
    target_lengths = taken.target_lengths[0, rank]
    units = [
        row[:length] for row, length in zip(taken.targets[0, rank], target_lengths, strict=True)
    ]
    # the recipe's own loss rounds to float32
    logs = model(frames, lengths).log_softmax(-1).transpose(0, 1)
    return nn.functional.ctc_loss(
        logs, torch.cat(units), lengths, target_lengths, zero_infinity=True
    )


def shown_loss(model: nn.Module, taken: Shown, rank: int) -> Tensor:
    return nn.functional.cross_entropy(
        model(taken.images[0, rank].permute(0, 3, 1, 2)), taken.labels[0, rank]
    )


def by_the_library(task: Any, name: str, strategy: str) -> list[Tensor]:
    """Every learner's model after the steps, before they are averaged for the last time."""
    rule = RULES[strategy]
    make, loss = (acoustic_model, spoken_loss) if name == "speech" else (vision_model, shown_loss)
    lock = [task.batch(step, 32, [0]) for step in range(STEPS)]

    def train(rank: int) -> Tensor:
        model = make()
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": task.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=task.momentum)
        with loosestep.attach(model, optimizer, loosestep.strategy(rule.library)):
            for taken in lock:
                optimizer.zero_grad()
                loss(model, taken, rank).backward()
                if task.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), task.clip)
                optimizer.step()
            state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        found = speech.packed(state) if name == "speech" else state
        return torch.cat([tensor.flatten() for tensor in found.values()])

    ran = loosestep.simulate(
        train, ranks=LEARNERS, ranks_per_node=rule.ranks_per_node, cluster=CLUSTER
    )
    return list(ran.results)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(RULES))
@pytest.mark.parametrize("name", ["speech", "pictures"])
def test_a_training_is_what_the_library_does(name: str, strategy: str) -> None:
    task = a_speech() if name == "speech" else some_pictures()
    cells = [Cell(name, other, 32, RATE, 0) for other in ("daso", "random-ring", strategy)]
    ours = Trainings(task, cells, device=CPU, rings=rings, dtype=torch.float64)
    assert ours.steps == STEPS
    for step in range(STEPS):
        ours.step(step)
    theirs = torch.stack(by_the_library(task, name, strategy))
    last = ours.models[-1]
    # What the library has after its last step, the exchange of the step before has landed in; in
    # ours too.
    torch.testing.assert_close(last, theirs, rtol=0, atol=1e-9)
    if RULES[strategy].mixing != "none":
        assert float(ours.distance()[-1]) > 1e-4
