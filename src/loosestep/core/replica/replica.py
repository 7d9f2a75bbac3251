"""One rank's copy of the model as flat vectors: snapshots, folds, buffers. All numerics of an
exchange live here.

    fold:    x <- x + delta                       delta = mean(s) - s, taken from a snapshot s of some steps ago
    assign:  x <- mean
    blend:   x <- (2 S x + P mean) / (2 S + P)    the published DASO merge, S steps after the snapshot

Of a sharded model a replica is what this rank holds. Parameters stay where they are; the flat
vector is a copy in logical order, one tensor per dtype, padded so that it divides evenly among
lanes and replicas. On an accelerator it exists twice, there and in pinned memory of the host, and
travels on side streams (`staging.py`): neither a snapshot nor a fold makes the compute thread wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from loosestep.core.contracts import Vector
from loosestep.core.pending import nothing
from loosestep.core.replica.shards import describe, is_dtensor, local, reshard, sharding_modules
from loosestep.core.replica.staging import Image, Staging


@dataclass(frozen=True)
class Segment:
    """The parameters of one dtype, side by side."""

    dtype: torch.dtype
    params: list[nn.Parameter]
    sizes: list[int]
    padded: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this rank holds of the parameters."""
        return [local(param) for param in self.params]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` cut into tensors of the parameters' shapes, where the parameters are."""
        pieces = flat[: sum(self.sizes)].to(self.params[0].device).split(self.sizes)
        return [
            piece.view(tensor.shape) for piece, tensor in zip(pieces, self.tensors, strict=True)
        ]

    def pack(self, flat: torch.Tensor) -> None:
        """Copy the parameters into `flat`; from an accelerator in one transfer."""
        if self.params[0].device.type == "cpu":
            torch._foreach_copy_(self.views(flat), self.tensors)
        else:
            flat[: sum(self.sizes)].copy_(
                torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])
            )


@dataclass(frozen=True)
class Snapshot:
    """Host memory that a replica's values are on their way to; `ready()` waits for them. A vector
    that is `near` stays where the parameters are, for a communication thread to work on inside
    `aside()`.
    """

    vector: Vector
    buffers: torch.Tensor
    losses: tuple[torch.Tensor | float, int]
    ready: Callable[[], None]
    near: bool
    aside: Callable[[], AbstractContextManager[object]]


class Replica:
    """The trainable parameters and floating buffers of a model. `multiple`: what the padded length
    must divide by. `keep`: which parameters take part, all by default. `stage`: which pipeline
    stage the model is, where it is one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        multiple: int = 1,
        keep: Callable[[nn.Parameter], bool] = lambda param: True,
        stage: str | None = None,
    ) -> None:
        self.pipeline_stage = stage
        # tied parameters appear once
        self.names = {id(param): name for name, param in model.named_parameters()}
        trainable = [param for param in model.parameters() if param.requires_grad and keep(param)]
        self.frozen = [param for param in model.parameters() if not param.requires_grad]
        self.params: list[nn.Parameter] = trainable
        self.segments = [
            self._segment(dtype, [p for p in trainable if p.dtype == dtype], multiple)
            for dtype in dict.fromkeys(p.dtype for p in trainable)
        ]
        buffers = list(persistent_buffers(model))
        fixed = {id(buffer.now) for buffer in unit_vectors(model)}
        self._floating = [b for b in buffers if id(b.now) not in fixed and _has_mean(b.now)]
        averaged = {id(buffer.now) for buffer in self._floating}
        self._counting = [buffer for buffer in buffers if id(buffer.now) not in averaged]
        self._model = model
        self._places = list(places(model))
        self.sharded = stage is not None or any(is_dtensor(param) for param in model.parameters())
        self._sharding = sharding_modules(model)
        self.staging = Staging(trainable[0].device if trainable else torch.device("cpu"))
        self._images: list[Image] | None = None
        self._statistics: Image | None = None
        self._loss: Image | None = None

    @property
    def floating(self) -> list[torch.Tensor]:
        """Buffers that are averaged."""
        return [local(buffer.now) for buffer in self._floating]

    @property
    def counting(self) -> list[torch.Tensor]:
        """Buffers that are not: rank 0's are everybody's at the start and at the end."""
        return [local(buffer.now) for buffer in self._counting]

    @property
    def variances(self) -> list[torch.Tensor]:
        """The running variances of batch norms. A mean may be negative, and which other
        statistics may not is not known here.
        """
        return [local(buffer.now) for buffer in self._floating if buffer.name == "running_var"]

    @staticmethod
    def _segment(dtype: torch.dtype, params: list[nn.Parameter], multiple: int) -> Segment:
        sizes = [local(param).numel() for param in params]
        return Segment(
            dtype, list(params), sizes, padded=max(-(-sum(sizes) // multiple), 1) * multiple
        )

    def stage(
        self,
        losses: tuple[torch.Tensor | float, int] = (0.0, 0),
        *,
        stay: bool = False,
        part: tuple[int, int] | None = None,
    ) -> Snapshot:
        """Start to copy parameters, buffers and losses into the memory that the replica keeps for
        it; never waits. `stay`: the parameters' is where they are. `part`: only this row of the
        vector, of so many, is wanted.
        """
        if self._images is None:
            self._images = [
                Image(s.tensors, s.dtype, s.padded, self.staging) for s in self.segments
            ]
            if self._floating:
                size = sum(buffer.numel() for buffer in self.floating)
                self._statistics = Image(self.floating, self._wide, size, self.staging)
        for segment, image in zip(self.segments, self._images, strict=True):
            if part is None or self.staging.remote:
                image.pack(segment.tensors)
            else:
                image.pack_row(segment.tensors, *part)
        spans = [slice(None) if part is None else image.row(*part) for image in self._images]
        leaving = (
            []
            if stay
            else [(i.host[at], i.near[at]) for i, at in zip(self._images, spans, strict=True)]
        )
        if self._statistics is not None:
            self._statistics.pack(self.floating)
            leaving.append((self._statistics.host, self._statistics.near))
        loss = losses[0]
        if (
            self.staging.remote
            and isinstance(loss, torch.Tensor)
            and loss.device == self.staging.device
        ):
            self._loss = self._loss or Image([loss], loss.dtype, 1, self.staging)
            self._loss.pack([loss])
            loss = self._loss.host
            leaving.append((self._loss.host, self._loss.near))
        return Snapshot(
            vector=[image.near if stay else image.host for image in self._images],
            buffers=self._statistics.host if self._statistics else torch.empty(0),
            losses=(loss, losses[1]),
            ready=self.staging.send(leaving) if self.staging.remote else nothing,
            near=stay,
            aside=partial(self.staging.aside, self.staging.mark()) if stay else nullcontext,
        )

    def snapshot(self, *, keep: bool = True) -> Vector:
        """A copy of the parameters, in the memory that the replica keeps for it (`keep`) or in
        new memory; waits for it.
        """
        if keep:
            snapshot = self.stage()
            snapshot.ready()
            return snapshot.vector
        vector = [torch.zeros(segment.padded, dtype=segment.dtype) for segment in self.segments]
        with torch.no_grad():
            for segment, flat in zip(self.segments, vector, strict=True):
                segment.pack(flat)
        return vector

    @torch.no_grad()
    def fold(self, delta: Vector) -> None:
        """x <- x + delta"""
        for tensors, views in self._bring(delta):
            torch._foreach_add_(tensors, views)
        self.staging.used()

    @torch.no_grad()
    def assign(self, mean: Vector) -> None:
        """x <- mean"""
        for tensors, views in self._bring(mean):
            torch._foreach_copy_(tensors, views)
        self.staging.used()

    @torch.no_grad()
    def blend(self, mean: Vector, *, waited: int, replicas: int) -> None:
        """x <- (2 S x + P mean) / (2 S + P)"""
        total = 2 * waited + replicas
        for tensors, views in self._bring(mean):
            torch._foreach_mul_(tensors, 2 * waited / total)
            torch._foreach_add_(tensors, views, alpha=replicas / total)
        self.staging.used()

    def _bring(self, vector: Vector) -> Iterator[tuple[Vector, Vector]]:
        """Parameters, and the vector where they are: what `stage` keeps without waiting, other
        memory by a copy.
        """
        reshard(self._sharding)
        images = self._images or []
        if _same(vector, [image.host for image in images]):
            if self.staging.remote:
                self.staging.fetch((image.host, image.near) for image in images)
        elif _same(vector, [image.near for image in images]):
            self.staging.receive()
        else:
            for segment, flat in zip(self.segments, vector, strict=True):
                yield segment.tensors, segment.views(flat)
            return
        for segment, image in zip(self.segments, images, strict=True):
            yield from image.groups.of(segment.tensors)

    @property
    def _wide(self) -> torch.dtype:
        return (
            torch.float64 if any(b.dtype == torch.float64 for b in self.floating) else torch.float32
        )

    def pack_buffers(self) -> torch.Tensor:
        """The floating buffers (BatchNorm statistics) as one vector."""
        if not self._floating:
            return torch.empty(0)
        return torch.cat(
            [buffer.detach().reshape(-1).to(self._wide) for buffer in self.floating]
        ).cpu()

    @torch.no_grad()
    def assign_buffers(self, packed: torch.Tensor) -> None:
        """Buffers are averaged and assigned, never folded: a delayed delta can make a variance
        negative.
        """
        if not self._floating:
            return
        if self._statistics is not None and packed is self._statistics.host:
            torch._foreach_copy_(self.floating, self._bring_statistics(self._statistics))
            self.staging.used()
            return
        for buffer, piece in zip(
            self.floating, packed.split([b.numel() for b in self.floating]), strict=False
        ):
            buffer.copy_(piece.view(buffer.shape))

    @torch.no_grad()
    def fold_buffers(self, delta: torch.Tensor) -> None:
        """b <- b + delta, which `stage` keeps; whoever folds sees to variances that must stay
        positive.
        """
        if self._statistics is not None:
            assert delta is self._statistics.host
            torch._foreach_add_(self.floating, self._bring_statistics(self._statistics))
            self.staging.used()

    def _bring_statistics(self, kept: Image) -> Vector:
        """What `stage` keeps of the buffers, where they are."""
        if self.staging.remote:
            self.staging.fetch([(kept.host, kept.near)])
        return kept.views

    def wait_for_readers(self) -> None:
        """A GPU may still be fetching offloaded parameters from the host: before they are
        overwritten out of turn.
        """
        if self.sharded and not self.staging.remote and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def let_go(self) -> None:
        """Of the memory that snapshots were kept in."""
        self._images = self._statistics = self._loss = None

    def find_bad(self) -> str | None:
        """The name of the first parameter that holds NaN or Inf."""
        return next(
            (self.names[id(p)] for p in self.params if not bool(local(p).isfinite().all())), None
        )

    def layout(self) -> list[str]:
        """What must be the same on every rank (of a lane, for shards and stages), in order: name,
        shape, dtype, how it is cut.
        """
        return (
            ([] if self.pipeline_stage is None else [self.pipeline_stage])
            + [
                f"{self.names[id(p)]}: {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}"
                + (f", {describe(p)}" if is_dtensor(p) else "")
                for p in self.params
            ]
            + [f"buffer {tuple(b.shape)} {b.dtype}" for b in (*self.floating, *self.counting)]
        )

    def digest(self) -> str:
        """A fingerprint of the layout."""
        return hashlib.blake2b("\n".join(self.layout()).encode(), digest_size=16).hexdigest()

    def check_unchanged(self) -> None:
        """Raise if other parameters train than when the run was attached: on their own, or not
        at all, silently.
        """
        for param in self.frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{self.names[id(param)]} was frozen when the run was attached and now "
                    "requires gradients, so it would not be averaged. Call run.finish() and "
                    "attach again after unfreezing"
                )
        self.check_places()

    def check_places(self) -> None:
        """Raise if the model's parameters are other tensors now, or elsewhere."""
        if any(module._parameters.get(name) is not param for module, name, param in self._places):
            self._look_again()
        for param in self.params:
            if param.device != self.staging.device:
                raise RuntimeError(
                    f"parameter {self.names[id(param)]} was on {self.staging.device} when the run "
                    f"was attached and is on {param.device} now; move the model back before the "
                    "next step, consensus() or finish(), or end the run before it is moved"
                )

    def _look_again(self) -> None:
        """Parameters are not where they were: all the same, or others?"""
        reshard(self._sharding)  # what was gathered is in the places of the shards
        ours = {id(param) for param in (*self.params, *self.frozen)}
        for name, param in self._model.named_parameters():
            if param.requires_grad and id(param) not in ours:
                raise RuntimeError(
                    f"parameter {name} is another tensor than when the run was attached "
                    "(load_state_dict(assign=True) makes new ones), which neither the optimizer "
                    "nor the run knows. Load without assign=True, or before the optimizer is "
                    "made and the run attached"
                )
        self.frozen = [param for param in self._model.parameters() if not param.requires_grad]
        self._places = list(places(self._model))


def _same(vector: Vector, kept: Vector) -> bool:
    return len(vector) == len(kept) and all(
        flat is mine for flat, mine in zip(vector, kept, strict=True)
    )


class ModelBuffer(NamedTuple):
    """Where a buffer is found. `now`: the tensor there, which `model.cpu()` and the like replace
    by another.
    """

    module: nn.Module
    name: str

    @property
    def now(self) -> torch.Tensor:
        buffer = self.module._buffers[self.name]
        assert buffer is not None
        return buffer


def check_memory(model: nn.Module) -> None:
    """Raise if two parameters that train share memory: what arrives would be folded into it twice."""
    held = [(name, local(p)) for name, p in model.named_parameters() if p.requires_grad]
    by_place = sorted(
        ((name, tensor) for name, tensor in held if tensor.numel() and not tensor.is_meta),
        key=lambda item: (item[1].untyped_storage().data_ptr(), item[1].storage_offset()),
    )
    for (name, tensor), (second, other) in pairwise(by_place):
        if _share_elements(tensor, other):
            raise ValueError(
                f"parameters {name} and {second} share memory, so what is averaged would be added "
                "to it twice; tie them by one Parameter instead, as in b.weight = a.weight "
                "(without .data)"
            )


def _share_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    if tensor.dtype != other.dtype:
        return True
    marks = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=torch.bool)
    seen, wanted = (
        marks.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (tensor, other)
    )
    seen.fill_(True)
    return bool(wanted.any())


def places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Where every parameter is found; a tied one several times."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                yield module, name, param


def _has_mean(buffer: torch.Tensor) -> bool:
    """Not whole numbers, and not what holds infinities, as masks of attention do."""
    return buffer.is_floating_point() and bool(local(buffer).isfinite().all())


def unit_vectors(model: nn.Module) -> Iterator[ModelBuffer]:
    """What spectral norms and other parametrisations keep of a weight: no statistics, and their
    mean is not of unit length.
    """
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            for part in module.modules():
                yield from (
                    ModelBuffer(part, name) for name, b in part._buffers.items() if b is not None
                )
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield from (ModelBuffer(module, f"{hook.name}_{which}") for which in "uv")


def persistent_buffers(model: nn.Module) -> Iterator[ModelBuffer]:
    """Every buffer that is part of the state dict, once. Non-persistent ones are the module's
    private business.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and name not in module._non_persistent_buffers_set
                and id(buffer) not in seen
            ):
                seen.add(id(buffer))
                yield ModelBuffer(module, name)
