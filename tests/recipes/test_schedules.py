from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.recipes import Training
from loosestep.recipes.schedules import (
    NAMES,
    Constant,
    OneCycle,
    Plateau,
    Product,
    WarmUp,
    apply,
    linear_scale,
    local_scale,
    schedule,
    sqrt_scale,
)


def test_warm_up_is_a_straight_line_to_the_scale() -> None:
    ramp = WarmUp(8.0, 100)
    assert ramp.factor(0) == 1.0
    assert ramp.factor(50) == pytest.approx(4.5)
    assert ramp.factor(100) == ramp.factor(10_000) == 8.0
    assert WarmUp(8.0, 0).factor(0) == 8.0


def test_one_cycle_agrees_with_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2.0, total_steps=101, final_div_factor=400.0
    )
    ours = OneCycle(100, peak=0.3 * 101 / 100 - 0.01, start=25.0, end=25.0 * 400.0)
    for gradients in range(101):
        assert 2.0 * ours.factor(gradients) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-6
        )
        optimizer.step()
        if gradients < 100:
            cycle.step()


@given(total=st.integers(1, 1000), gradients=st.integers(0, 3000))
def test_one_cycle_stays_between_its_bounds(total: int, gradients: int) -> None:
    assert 1e-4 * (1 - 1e-9) <= OneCycle(total).factor(gradients) <= 1.0


def test_plateau_cuts_after_patience_and_not_before() -> None:
    plateau = Plateau(cut=0.5, patience=2, threshold=0.05)
    for loss in (1.0, 0.99, 0.98):
        plateau.observe(loss)
    assert plateau.factor(0) == 1.0
    plateau.observe(0.97)
    assert plateau.factor(0) == 0.5
    plateau.observe(0.5)
    for loss in (0.49, 0.49):
        plateau.observe(loss)
    assert plateau.factor(0) == 0.5


def test_plateau_cuts_where_torch_does() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=5, threshold=0.05
    )
    plateau = Plateau()
    draw = torch.Generator().manual_seed(0)
    for step in range(60):
        loss = 1.0 / (1 + step // 7) + 0.1 * float(torch.rand(1, generator=draw))
        plateau.observe(loss)
        reference.step(loss)
        assert plateau.factor(0) == optimizer.param_groups[0]["lr"]


def test_plateau_survives_a_loss_that_is_not_a_number() -> None:
    plateau = Plateau(patience=1)
    for loss in (math.nan, math.inf, 1.0):
        plateau.observe(loss)
    assert plateau.state_dict()["best"] == 1.0


def test_plateau_state_comes_back() -> None:
    plateau = Product(WarmUp(2.0, 10), Plateau(patience=1))
    again = Product(WarmUp(2.0, 10), Plateau(patience=1))
    for loss in (1.0, 1.0, 1.0, 1.0):
        plateau.observe(loss)
    again.load_state_dict(plateau.state_dict())
    assert again.factor(100) == plateau.factor(100) == 1.0


def test_apply_sets_every_group() -> None:
    a = torch.nn.Parameter(torch.zeros(1))
    b = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 9.0}], lr=1.0)
    assert apply(WarmUp(3.0, 0), optimizer, lr=0.1, gradients=5) == pytest.approx(0.3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.3])


def test_rules_for_learners() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert linear_scale(8) == 8.0
    assert sqrt_scale(4) == 2.0
    assert local_scale(torch.optim.AdamW(parameters), 4) == 2.0
    assert local_scale(torch.optim.SGD(parameters, lr=0.1), 4) == 1.0
    assert local_scale("adamw", 9) == 3.0


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_a_schedule(name: str) -> None:
    made = schedule(name, total=1000, epoch=100, learners=4)
    assert made.factor(500) > 0


def test_by_name_the_daso_rule_scales_linearly_after_the_warm_up() -> None:
    made = schedule("plateau", total=100_000, epoch=100, learners=4)
    assert made.factor(0) == 1.0
    assert made.factor(500) == 4.0
    assert schedule("plateau", total=1000, epoch=100, learners=4).factor(100) == 4.0


@pytest.mark.parametrize("name", ["warm-up", "plateau"])
def test_by_name_adam_scales_with_the_square_root(name: str) -> None:
    assert (
        schedule(name, total=100_000, epoch=100, learners=4, optimizer="adamw").factor(500) == 2.0
    )
    training = Training(optimizer="adamw", schedule=name)
    assert training.make_schedule(total=100_000, epoch=100, learners=9).factor(500) == 3.0
    assert (
        Training(schedule=name).make_schedule(total=100_000, epoch=100, learners=9).factor(500)
        == 9.0
    )


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule must be one of constant"):
        schedule("cosine", total=1, epoch=1)
    with pytest.raises(ValueError, match="total must be at least 1, got 0"):
        OneCycle(0)
    with pytest.raises(ValueError, match=r"peak must be in \[0, 1\), got 1"):
        OneCycle(10, peak=1.0)
    with pytest.raises(ValueError, match="cut must be between 0 and 1"):
        Plateau(cut=2.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        WarmUp(0.0, 1)
    with pytest.raises(ValueError, match="learners must be at least 1"):
        linear_scale(0)
    assert Constant().factor(7) == 1.0
