"""Norms of sharded trees: over all ranks, every parameter once, padding never.

A norm is a sum of ``|x|^p`` and its root, or the largest ``|x|``: each rank takes what it holds, the ranks of the shard
axis combine a number, and what every rank holds whole is added after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives.primitives import pmax, psum
from ..communication.axis import Axis
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.packing import of_rank, slot_of_each, without_padding
from ..layout.ranks import shard_axis, shard_index
from ..layout.trees import Full, Sharded, map_items
from ..layout.validation import check_sharded, check_shards
from ..sharding.gather import gather
from ..storage.memory_kind import to_memory_kind_of, to_working_device


def global_norm(tree: Sharded, p: float = 2.0) -> Tensor:
    """The p-norm of all parameters of a tree, as of one vector.

    ``torch.nn.utils.get_total_norm`` of the whole tensors: every parameter counts once, tied ones and those that all
    ranks hold whole too. Replicas hold the same, and are not asked. Differentiable, with gradient 0 at 0: an exact map
    from what all ranks hold to what all of them return, so under ``fs.grad`` a penalty on the norm of a gradient or of
    parameters has the gradient of the unsharded model. Under a bare ``torch.func.grad`` the norm of parameters, which
    every shard returns, counts ``num_shards`` times.

    Args:
        tree: gradients, parameters, moments: any ``Sharded``, inside ``spmd`` or, with its rank dims, outside. ``None``
            leaves, integers and bools count nothing; frozen parameters count like others.
        p: 1 or more; ``float("inf")`` is the largest magnitude.

    Returns:
        Shape ``()``, the same on every rank; outside ``spmd`` without rank dims. float64 when one of the leaves has
        that precision, else float32, which is what is added up in. 0 for no leaves; NaN when one is NaN.

    Raises:
        TypeError: ``tree`` is no ``Sharded``.
        ValueError: shards that do not fit their layout, or ``p`` is below 1.

    Cost:
        One all-reduce of a number over the shard axis; where parameters are DTensors, of a number for each parameter,
        and one more over each axis that some are cut over. Memory for the powers of one buffer's shard at a time, added
        up in a tree (on CPUs ``torch.linalg.vector_norm`` adds in a row, and loses digits of long vectors).

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([2.0, 3.0, 6.0])}, layout)
        >>> global_norm(grads), global_norm(grads, float("inf"))
        (tensor(7.), tensor(6.))
    """
    kind, layout = _checked("global_norm", tree, p), tree.layout
    if not layout.mesh.in_spmd:
        return kind.root(kind.join([kind.total(x) for x in _whole(tree).values()], layout))
    if layout.tensor_meshes:
        return kind.root(kind.join(list(_totals(kind, tree).values()), layout))
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for key, buffer in _counted(tree).items():
        x = without_padding(tree[key], buffer, shard_index(buffer, layout))
        parts[buffer.num_shards > 1].append(kind.total(x))
    return kind.root(kind.join([*_combined(kind, parts[True], layout), *parts[False]], layout))


def clip_by_global_norm(grads: Sharded, max_norm: float, p: float = 2.0) -> tuple[Sharded, Tensor]:
    """``grads`` scaled down to a norm of ``max_norm``, where it is above that, and the norm it was.

    ``torch.nn.utils.clip_grad_norm_`` as a pure function: multiplied by ``max_norm / (norm + 1e-6)``, at most 1. A norm
    that is not finite does there what it does with ``error_if_nonfinite=False``: NaN makes every gradient NaN, infinity
    makes them 0, and NaN where they were infinite. :func:`assert_finite` says where it comes from.

    Args:
        grads: as in :func:`global_norm`.
        max_norm: 0 or more.
        p: as in :func:`global_norm`.

    Returns:
        ``(grads, norm)``: the gradients in their dtypes, ``None`` and integers passed through; the norm before
        clipping, as :func:`global_norm` returns it.

    Raises:
        TypeError, ValueError: as :func:`global_norm`, and for a ``max_norm`` below 0.

    Cost:
        As :func:`global_norm`, and a copy of the gradients.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([2.0, 3.0, 6.0])}, layout)
        >>> clipped, norm = clip_by_global_norm(grads, 3.5)
        >>> clipped["fc"], norm
        (tensor([[1.0000, 1.5000],
                [3.0000, 0.0000]]), tensor(7.))

    Stands for ``clip_grad_norm_`` of fairscale's ``FullyShardedDataParallel``.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_by_global_norm: max_norm: got {max_norm}, expected 0 or more")
    norm = global_norm(grads, p)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    counted = _counted(grads)

    def clipped(key: str, x: Any) -> Any:
        return to_memory_kind_of((x * factor.to(x.device)).to(x.dtype), x) if key in counted else x

    return map_items(clipped, grads), norm


def param_norms(tree: Sharded, p: float = 2.0) -> dict[str, Tensor]:
    """The p-norm of each parameter by name, without gathering any: to log.

    ``global_norm(tree, p)`` is the norm of these norms.

    Args:
        tree: as in :func:`global_norm`.
        p: as in :func:`global_norm`.

    Returns:
        ``{name: norm}`` in the source's order, each as :func:`global_norm` returns it; nothing for ``None`` leaves,
        integers and bools. Tied parameters are listed once.

    Raises:
        TypeError, ValueError: as :func:`global_norm`.

    Cost:
        One all-reduce of a number a parameter over the shard axis, and over each axis that DTensors are cut over.

    Example:
        >>> values = {"fc.w": torch.tensor([2.0, 3.0, 6.0]), "fc.b": torch.tensor([3.0, 4.0])}
        >>> param_norms(fs.shard(values, fs.plan(values, fs.simulated_mesh(2))))
        {'fc.w': tensor(7.), 'fc.b': tensor(5.)}
    """
    kind, layout = _checked("param_norms", tree, p), tree.layout
    if not layout.mesh.in_spmd:
        return {name: kind.root(kind.total(x)) for name, x in _whole(tree).items()}
    return {name: kind.root(total) for name, total in _totals(kind, tree).items()}


def _totals(kind: _Kind, tree: Sharded) -> dict[str, Tensor]:
    """What each parameter has in all, before the root, by name in the source's order."""
    layout, counted = tree.layout, _counted(tree)
    sums = {
        key: to_working_device(_sums_by_slot(kind, tree[key], buffer, layout), layout.mesh.device)
        for key, buffer in counted.items()
    }
    shared = [key for key, buffer in counted.items() if buffer.num_shards > 1]
    if shared:
        widest = _widest(sums.values())
        total = kind.across(torch.cat([sums[key].to(widest) for key in shared]), shard_axis(layout))
        sizes = [len(counted[key].slots) for key in shared]
        sums |= {key: x.to(sums[key].dtype) for key, x in zip(shared, total.split(sizes), strict=True)}
    totals = {
        slot.name: x
        for key, buffer in counted.items()
        for slot, x in zip(buffer.slots, sums[key].unbind(), strict=True)
    }
    totals = _over_tensor_axes(kind, totals, layout)
    return {name: totals[name] for name in layout.slots if name in totals}


def _over_tensor_axes(kind: _Kind, totals: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """With the other parts of DTensors: of all that are cut over an axis at once. Copies count as they are."""
    for axes, mesh in layout.tensor_meshes.items():
        for axis in mesh:
            cut = [name for name in totals if (form := layout.slots[name].dtensor) and form.axes == axes]
            cut = [name for name in cut if axis.name in getattr(layout.slots[name].dtensor, "cut_over", ())]
            if cut and axis.size > 1:
                whole = kind.across(_stack([totals[name] for name in cut], layout), axis)
                totals |= {name: x.to(totals[name].dtype) for name, x in zip(cut, whole.unbind(), strict=True)}
    return totals


@dataclass(frozen=True)
class _Sum:
    """Sums of ``|x|^p``, and their root."""

    p: float

    def total(self, x: Tensor) -> Tensor:
        return self._powers(wide(x)).sum()

    def by_segment(self, x: Tensor, ids: Tensor, num_segments: int) -> Tensor:
        powers = self._powers(wide(x))
        zeros = powers.new_zeros(num_segments, dtype=torch.float64)  # one after the other, float32 would lose digits
        return zeros.scatter_add(0, ids, powers.double()).to(powers.dtype)

    def across(self, x: Tensor, axis: Axis) -> Tensor:
        return psum(x, axis)

    def join(self, parts: Sequence[Tensor], layout: Layout) -> Tensor:
        return _stack(parts, layout).sum()

    def root(self, total: Tensor) -> Tensor:
        if self.p == 1:
            return total
        # The slope of the root at 0 is infinite, and infinity times the zeros behind it would be NaN.
        zero = total == 0
        return total.masked_fill(zero, 1.0).pow(1 / self.p).masked_fill(zero, 0.0)

    def _powers(self, x: Tensor) -> Tensor:
        if self.p == 2:  # without a magnitude, which has no second derivative at 0
            return torch.view_as_real(x.resolve_conj()).square().sum(-1) if x.is_complex() else x.square()
        return x.abs() if self.p == 1 else x.abs().pow(self.p)


@dataclass(frozen=True)
class _Largest:
    """Largest magnitudes: what the sums are for ``p`` of infinity."""

    def total(self, x: Tensor) -> Tensor:
        magnitudes = wide(x).abs()
        return magnitudes.amax() if x.numel() else magnitudes.sum()

    def by_segment(self, x: Tensor, ids: Tensor, num_segments: int) -> Tensor:
        magnitudes = wide(x).abs()
        return magnitudes.new_zeros(num_segments).scatter_reduce(0, ids, magnitudes, "amax")

    def across(self, x: Tensor, axis: Axis) -> Tensor:
        return pmax(x, axis)

    def join(self, parts: Sequence[Tensor], layout: Layout) -> Tensor:
        return _stack(parts, layout).amax() if parts else _stack(parts, layout).sum()

    def root(self, total: Tensor) -> Tensor:
        return total


_Kind = _Sum | _Largest


def _checked(verb: str, tree: Sharded, p: float) -> _Kind:
    check_sharded(verb, tree, "; torch.nn.utils.get_total_norm takes whole tensors" if isinstance(tree, Full) else "")
    if not p >= 1:
        raise ValueError(f"{verb}: p: got {p}, expected 1 or more, or float('inf')")
    check_shards(verb, tree, tree.layout, allow_none=True, gradients=True)
    return _Largest() if p == float("inf") else _Sum(p)


def _counted(tree: Sharded) -> dict[str, Buffer]:
    return {key: b for key, b in tree.layout.buffers.items() if b.differentiable and tree[key] is not None}


def _whole(tree: Sharded) -> Full:
    """What counts of a tree with rank dims: each parameter once, without them and without padding."""
    counted = _counted(tree)
    layout = tree.layout.select({key: key in counted for key in tree.layout.buffers})
    shards = {key: tree[key].to(buffer.dtype) for key, buffer in layout.buffers.items()}  # low precision gradients, too
    return gather(Sharded(shards, layout.as_stored()))


def _combined(kind: _Kind, parts: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """What all shards have, as one number, if there are any."""
    return [kind.across(kind.join(parts, layout), shard_axis(layout))] if parts else []


def _sums_by_slot(kind: _Kind, x: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    """This rank's part for each slot of ``buffer``."""
    rank = shard_index(buffer, layout)
    if isinstance(rank, Tensor):
        ids = of_rank(slot_of_each(buffer, x.device), rank)
        return kind.by_segment(x, ids, len(buffer.slots) + 1)[:-1]
    slices = buffer.slices(rank)
    pieces = {piece.name: x[piece.offset : piece.offset + piece.numel] for piece in slices}
    return torch.stack([kind.total(pieces.get(slot.name, x[:0])) for slot in buffer.slots])


def wide(x: Tensor) -> Tensor:
    """In the precision to add up in: float32, unless it is more already."""
    if x.dtype in (torch.float64, torch.complex64, torch.complex128):
        return x
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


def _widest(parts: Any) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in parts) else torch.float32


def _stack(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    dtype = _widest(parts)
    device = layout.mesh.device
    return (
        torch.stack([to_working_device(x, device).to(dtype) for x in parts]) if parts else torch.zeros(1, device=device)
    )
