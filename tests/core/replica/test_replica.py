"""Snapshots, folds and buffers of one replica."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from loosestep.core.replica.replica import Replica, places
from loosestep.core.replica.staging import Staging


class Odd(nn.Module):
    """Everything a model may hold: tied, frozen, empty, channels-last, non-contiguous, half
    precision, buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.first = nn.Linear(2, 2)
        self.tied = self.first
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("multiple", [1, 4, 7, 64])
def test_assigning_a_snapshot_restores_every_parameter(multiple):
    model = Odd()
    replica = Replica(model, multiple=multiple)
    before = copies(model)
    snapshot = replica.snapshot(keep=False)
    with torch.no_grad():
        for param in replica.params:
            param.add_(1)
    replica.assign(snapshot)
    for ours, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, then)


def test_the_snapshot_is_padded_to_the_multiple_and_split_by_dtype():
    vector = Replica(Odd(), multiple=8).snapshot()
    assert {t.dtype for t in vector} == {torch.float32, torch.bfloat16, torch.float64}
    assert all(t.numel() % 8 == 0 for t in vector)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_snapshot_of_one_row_has_that_row_of_the_whole_and_touches_no_other(rows):
    model = Odd()
    replica = Replica(model, multiple=8)
    whole = replica.snapshot(keep=False)
    for row in range(rows):
        for flat in replica.snapshot():
            flat.fill_(9)
        for flat, all_of_it in zip(replica.stage(part=(row, rows)).vector, whole, strict=True):
            mine = flat.view(rows, -1)[row]
            others = [r for r in range(rows) if r != row]
            # what follows is padding
            used = sum(p.numel() for p in replica.params if p.dtype == flat.dtype)
            width = flat.numel() // rows
            filled = max(min(used - row * width, width), 0)
            assert torch.equal(mine[:filled], all_of_it.view(rows, -1)[row][:filled])
            assert (mine[filled:] == 9).all()
            assert (flat.view(rows, -1)[others] == 9).all()


def test_strides_are_kept():
    model = Odd()
    replica = Replica(model)
    replica.fold(replica.snapshot())
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.turned.stride() == (1, 3)


def test_a_fold_adds_and_keeps_what_was_learned_meanwhile():
    model = nn.Linear(2, 1)
    replica = Replica(model)
    delta = [torch.ones_like(t) for t in replica.snapshot()]
    before = copies(model)
    replica.fold(delta)
    for ours, then in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(ours.detach(), then + 1)


def test_the_published_merge_weighs_by_the_steps_waited():
    model = nn.Linear(3, 1)
    replica = Replica(model)
    mean = [torch.full_like(t, 5.0) for t in replica.snapshot()]
    before = copies(model)
    replica.blend(mean, waited=2, replicas=3)
    for ours, then in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(ours.detach(), (4 * then + 3 * 5.0) / 7)


def test_frozen_parameters_do_not_travel_and_are_not_touched():
    model = Odd()
    replica = Replica(model)
    before = model.frozen.clone()
    replica.fold([torch.ones_like(t) for t in replica.snapshot()])
    assert torch.equal(model.frozen, before)


def test_tied_parameters_travel_once():
    names = set(Replica(Odd()).names.values())
    assert "first.weight" in names
    assert "tied.weight" not in names


def test_floating_buffers_are_packed_and_assigned_and_others_left_alone():
    model = Odd()
    replica = Replica(model)
    packed = replica.pack_buffers()
    # running mean and variance, not the scratch buffer
    assert packed.tolist() == [0.0] * 3 + [1.0] * 3
    replica.assign_buffers(torch.arange(6.0))
    assert model.norm.running_var.tolist() == [3.0, 4.0, 5.0]
    assert model.norm.num_batches_tracked == 0
    assert model.scratch.tolist() == [1.0, 1.0]


def test_buffers_that_were_replaced_are_used():
    """As `model.cpu()` and `model.cuda()` replace them."""
    model = Odd()
    replica = Replica(model)
    replica.stage()
    model._apply(torch.clone)
    model.norm.running_mean.fill_(2.0)
    model.norm.num_batches_tracked.fill_(7)
    assert replica.pack_buffers().tolist() == [2.0] * 3 + [1.0] * 3
    assert replica.stage().buffers.tolist() == [2.0] * 3 + [1.0] * 3
    replica.assign_buffers(torch.arange(6.0))
    assert model.norm.running_var.tolist() == replica.variances[0].tolist() == [3.0, 4.0, 5.0]
    assert [int(buffer) for buffer in replica.counting] == [7]


def test_a_parameter_that_was_replaced_is_refused():
    model = Odd()
    replica = Replica(model)
    model.load_state_dict(model.state_dict())
    replica.check_unchanged()
    model.first.load_state_dict(
        {name: value.clone() for name, value in model.first.state_dict().items()}, assign=True
    )
    with pytest.raises(
        RuntimeError, match=r"parameter first.weight is another tensor .* Load without assign=True"
    ):
        replica.check_unchanged()


def test_parameters_that_are_only_registered_elsewhere_are_the_same():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    replica = Replica(model)
    prune.random_unstructured(model[0], "weight", 0.5)  # which calls it weight_orig
    model[1].requires_grad_(False)
    replica.check_unchanged()
    assert replica._places == list(places(model))


def test_parameters_that_were_moved_to_another_device_are_refused():
    replica = Replica(nn.Linear(2, 2))
    replica.staging = Staging(torch.device("meta"))
    with pytest.raises(
        RuntimeError,
        match=r"parameter weight was on meta when .* is on cpu now; move the model back",
    ):
        replica.check_unchanged()


def test_the_kept_snapshot_is_one_buffer():
    replica = Replica(nn.Linear(3, 3))
    assert replica.snapshot()[0].data_ptr() == replica.snapshot()[0].data_ptr()
    assert replica.snapshot(keep=False)[0].data_ptr() != replica.snapshot()[0].data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(3, 2),
        nn.Linear(2, 3).double(),
        nn.Linear(2, 3, bias=False),
        nn.Sequential(nn.Linear(2, 3)),
    ],
)
def test_the_digest_sees_shape_dtype_and_order(other):
    assert Replica(nn.Linear(2, 3)).digest() != Replica(other).digest()


def test_a_bad_value_is_found_by_name():
    model = nn.Linear(2, 2)
    assert Replica(model).find_bad() is None
    model.bias.data[1] = float("inf")
    assert Replica(model).find_bad() == "bias"
