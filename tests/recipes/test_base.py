from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loosestep.recipes import DatasetTask, Quality, RecipeError, Training, find_recipe
from loosestep.recipes.base import list_options, option, parse_options
from loosestep.runfolder import checkpoint


@dataclass(frozen=True)
class Options:
    preset: str = option("big", "size", ("big", "little"))
    layers: int = option(3, "how many")
    rate: float = option(0.5, "how fast")
    fast: bool = option(True, "whether")


PRESETS = {"big": {}, "little": {"layers": 1}}


def test_options_are_parsed_from_strings_on_top_of_the_preset() -> None:
    assert parse_options(Options, {}, PRESETS) == Options()
    assert parse_options(Options, {"preset": "little"}, PRESETS).layers == 1
    chosen = parse_options(
        Options, {"preset": "little", "layers": "7", "rate": "1e-3", "fast": "False"}, PRESETS
    )
    assert chosen == Options("little", 7, 1e-3, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": 1}, "unknown option layer, did you mean layers?"),
        ({"zzz": 1}, "unknown option zzz; there are preset, layers, rate, fast"),
        ({"layers": "two"}, "option layers must be a whole number, got 'two'"),
        ({"layers": 2.5}, "option layers must be a whole number, got 2.5"),
        ({"rate": "fast"}, "option rate must be a number"),
        ({"fast": "maybe"}, "option fast must be true or false"),
        ({"preset": "huge"}, "preset must be one of big, little, got huge"),
    ],
)
def test_wrong_options_are_explained(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("?", r"\?")):
        parse_options(Options, given, PRESETS)


def test_help_lists_defaults_and_choices() -> None:
    assert [(o.name, o.value) for o in list_options(Options())][1] == ("layers", 3)
    assert list_options(Options())[0].help == "size (big, little)"


def test_quality_knows_its_direction() -> None:
    assert Quality("wer", "lower").improves(0.1, 0.2)
    assert not Quality("accuracy", "higher").improves(0.1, 0.2)


def test_vectors_are_not_decayed() -> None:
    optimizer = Training(optimizer="adamw", lr=0.1, weight_decay=0.5).make_optimizer(
        nn.Linear(2, 2), lr=0.2
    )
    assert [(g["weight_decay"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.5, 0.2, 1),
        (0.0, 0.2, 1),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam"}, "optimizer must be one of sgd, adamw, got 'adam'"),
        (
            {"schedule": "cosine"},
            "schedule must be one of constant, warm-up, one-cycle, plateau, got 'cosine'",
        ),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"epochs": -1.0}, "epochs must be positive, got -1.0"),
    ],
)
def test_training_that_is_not_possible_is_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Training(**settings)


@pytest.mark.parametrize(
    ("examples", "batch", "message"), [(0, 1, "at least 1 example"), (1, 0, "batch must be")]
)
def test_a_dataset_without_batches_is_explained(examples: int, batch: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        DatasetTask(
            make_model=None, dataset=[1.0] * examples, loss=None, evaluate=None, batch=batch
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [{"loss": 0.5}, 0.5])
def test_an_evaluation_without_what_is_judged_by_is_explained(answer: Any) -> None:
    task = DatasetTask(
        make_model=nn.Identity, dataset=[1.0], loss=None, evaluate=lambda model: answer
    )  # type: ignore[arg-type]
    with pytest.raises(
        RecipeError, match=r"evaluate must return a dict with 'accuracy', got .*0\.5"
    ):
        task.evaluate(task.make_model())


def a_task(seed: int = 0) -> DatasetTask:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 4, generator=draw)
    data = [(x, x.sum()) for x in inputs]
    return DatasetTask(
        make_model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        dataset=data,
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean(),
        evaluate=lambda model: {
            "error": float((model(inputs)[:, 0] - inputs.sum(1)).square().mean())
        },
        quality=Quality("error", "lower"),
        training=Training(lr=0.005),
        batch=5,
        seed=seed,
    )


def train(
    task: Any, model: nn.Module, optimizer: torch.optim.Optimizer, stream: Any, steps: int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, next(stream)).backward()
        optimizer.step()


def test_a_script_becomes_a_task_that_learns() -> None:
    task = a_task()
    model = task.make_model()
    before = task.evaluate(model)["error"]
    train(task, model, task.training.make_optimizer(model), task.stream(), 100)
    assert task.evaluate(model)["error"] < 0.3 * before
    assert model.training


def test_models_are_equal_for_the_same_seed_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    a, b, other = (
        nn.utils.parameters_to_vector(a_task(s).make_model().parameters()) for s in (1, 1, 2)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert torch.equal(state, torch.get_rng_state())


def test_a_run_resumed_from_a_checkpoint_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    task = a_task()
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    stream = task.stream(learner=1, learners=2)
    train(task, model, optimizer, stream, 7)
    path = checkpoint.Checkpoints(tmp_path).save(
        7,
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "data": stream.state_dict(),
        },
    )
    train(task, model, optimizer, stream, 9)

    torch.rand(3)  # another process: its generator is somewhere else
    again = a_task()
    resumed = again.make_model()
    state = checkpoint.read(path)
    checkpoint.restore_model(resumed, state["model"], source=path)
    resumed_optimizer = again.training.make_optimizer(resumed)
    resumed_optimizer.load_state_dict(state["optimizer"])
    resumed_stream = again.stream(learner=1, learners=2)
    resumed_stream.load_state_dict(state["data"])
    train(again, resumed, resumed_optimizer, resumed_stream, 9)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


OWN = """
from loosestep.recipes import DatasetTask
from torch import nn

def recipe(options, *, data, seed, device, progress):
    width = int(options.get("width", 2))
    return DatasetTask(make_model=lambda: nn.Linear(width, 1), dataset=[(1.0, 2.0)], loss=None, evaluate=None, seed=seed)

def wrong(options, **rest):
    return "a text"

number = 3
"""


def test_a_recipe_in_the_users_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine_recipe.py"
    file.write_text(OWN)
    task = find_recipe(f"{file}:recipe").build({"width": "5"}, seed=3)
    assert task.make_model().weight.shape == (1, 5)
    assert task.seed == 3
    with pytest.raises(
        RecipeError, match=r"mine_recipe:wrong must return a loosestep\.recipes\.Task, got str"
    ):
        find_recipe(f"{file}:wrong").build({})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speech", "recipe must be acoustic, vision or FILE.py:function, got 'speech'"),
        ("absent.py:f", "recipe file absent.py does not exist"),
    ],
)
def test_a_recipe_that_is_not_there_is_explained(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_recipe(name)


def test_a_function_that_is_not_there_is_explained(tmp_path: Path) -> None:
    (tmp_path / "other_recipe.py").write_text(OWN)
    with pytest.raises(RecipeError, match=r"other_recipe\.py has no function number"):
        find_recipe(f"{tmp_path / 'other_recipe.py'}:number")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import os\ndef recipe(:\n", r"broken_recipe\.py:2: invalid syntax"),
        (
            "import no_such_module\n",
            r"broken_recipe\.py cannot be loaded: No module named 'no_such_module'",
        ),
        (
            "def recipe(options): ...\n",
            r"recipe in .*broken_recipe\.py must take \(options, \*, data, seed, device, progress\): got an unexpected",
        ),
        ("def recipe(options, other, **rest): ...\n", "missing a required argument: 'other'"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "broken_recipe.py"
    file.write_text(content)
    with pytest.raises(RecipeError, match=message):
        find_recipe(f"{file}:recipe")


def test_the_embedded_recipes_list_their_options() -> None:
    assert {"preset", "layers", "cells"} <= {o.name for o in find_recipe("acoustic").options()}
    assert {"preset", "model", "norm"} <= {o.name for o in find_recipe("vision").options()}
