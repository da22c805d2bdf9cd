"""Norms of sharded trees over all ranks: every parameter counts once, padding does not count.

A norm is the p-th root of a sum of ``|x|^p``, or the largest ``|x|``. Each rank reduces its own shards to a number, the
ranks of the shard axis combine these, and buffers that every rank holds whole are added after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives.maximum import shared_max, shared_sum
from ..collectives.primitives import pmax, psum
from ..communication.backend import Axis
from ..layout.buffers import Buffer, of_rank, slot_of_each, without_padding
from ..layout.layout import Layout, as_stored, select_buffers, shard_axis, shard_index
from ..layout.trees import Full, Sharded, check_sharded, check_shards, map_items
from ..sharding.gather import gather
from ..storage.memory_kind import on_each_device, stacked, to_memory_kind_of, to_working_device
from ..torch_internals.autograd import eager


@eager
def global_norm(tree: Sharded, p: float = 2.0) -> Tensor:
    """Compute the p-norm of all parameters of a tree, as one vector.

    Equal to ``torch.nn.utils.get_total_norm`` of the whole tensors: every parameter counts once, including tied
    parameters and those that every rank holds whole; replicas are not summed. Differentiable, with gradient 0 at 0.
    Under ``fs.grad`` a penalty on the norm of a gradient or of parameters has the gradient of the unsharded model.
    Under a bare ``torch.func.grad`` the norm of parameters, which every shard returns, counts ``num_shards`` times.

    Args:
        tree: gradients, parameters, moments: any ``Sharded``, inside ``spmd`` or, with rank dims, outside. ``None``
            leaves, integers and bools do not count; frozen parameters do.
        p: 1 or more; ``float("inf")`` gives the largest magnitude.

    Returns:
        Shape ``()``, the same on every rank; outside ``spmd`` without rank dims. float64 if one of the leaves has that
        precision, else float32; sums are computed in that dtype. 0 without leaves; NaN if a value is NaN.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``.
        ValueError: shards that do not fit their layout, or ``p`` is below 1.

    Cost:
        One all-reduce of a number over the shard axis; with DTensors, of a number per parameter, and another over each
        axis that some are sharded over. Memory for the powers of one buffer's shard at a time, summed pairwise (on CPUs
        ``torch.linalg.vector_norm`` sums sequentially, which is less accurate for long vectors).

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
    sharded = [kind.across(kind.join(parts[True], layout), shard_axis(layout))] if parts[True] else []
    return kind.root(kind.join([*sharded, *parts[False]], layout))


@eager
def clip_by_global_norm(grads: Sharded, max_norm: float, p: float = 2.0) -> tuple[Sharded, Tensor]:
    """Scale ``grads`` down to a norm of at most ``max_norm``; also return their norm before.

    ``torch.nn.utils.clip_grad_norm_`` as a pure function: gradients are multiplied by ``max_norm / (norm + 1e-6)``, at
    most 1. A norm that is not finite has the same effect as with ``error_if_nonfinite=False``: NaN makes every gradient
    NaN, infinity makes them 0, and NaN where they were infinite. :func:`assert_finite` locates such values.

    Args:
        grads: as in :func:`global_norm`.
        max_norm: 0 or more.
        p: as in :func:`global_norm`.

    Returns:
        ``(grads, norm)``: the gradients in their dtypes, with ``None`` and integers unchanged; the norm before
        clipping, as :func:`global_norm` returns it.

    Raises:
        TypeError, ValueError: as :func:`global_norm`, and for a ``max_norm`` below 0.

    Cost:
        That of :func:`global_norm`, and a copy of the gradients.

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
    factor = on_each_device((max_norm / (norm + 1e-6)).clamp(max=1.0))
    counted = _counted(grads)

    def clipped(key: str, x: Any) -> Any:
        return to_memory_kind_of((x * factor(x.device)).to(x.dtype), x) if key in counted else x

    return map_items(clipped, grads), norm


def param_norms(tree: Sharded, p: float = 2.0) -> dict[str, Tensor]:
    """Compute the p-norm of each parameter, by name, without gathering: for logging.

    ``global_norm(tree, p)`` is the norm of these norms.

    Args:
        tree: as in :func:`global_norm`.
        p: as in :func:`global_norm`.

    Returns:
        ``{name: norm}`` in the source's order, each as :func:`global_norm` returns it; without ``None`` leaves,
        integers and bools. Tied parameters are listed once.

    Raises:
        TypeError, ValueError: as :func:`global_norm`.

    Cost:
        One all-reduce of a number per parameter over the shard axis, and over each axis that DTensors are sharded over.

    Example:
        >>> values = {"fc.w": torch.tensor([2.0, 3.0, 6.0]), "fc.b": torch.tensor([3.0, 4.0])}
        >>> param_norms(fs.shard(values, fs.plan(values, fs.simulated_mesh(2))))
        {'fc.w': tensor(7.), 'fc.b': tensor(5.)}
    """
    kind, layout = _checked("param_norms", tree, p), tree.layout
    if not layout.mesh.in_spmd:
        return {name: kind.root(kind.total(x)) for name, x in _whole(tree).items()}
    return {name: kind.root(total) for name, total in _totals(kind, tree).items()}


def _totals(kind: _Norm, tree: Sharded) -> dict[str, Tensor]:
    """The sum or maximum of each parameter over all ranks, before the root, by name in the source's order."""
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


def _over_tensor_axes(kind: _Norm, totals: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """``totals`` reduced over the axes of DTensors, all parameters that are sharded over an axis at once."""
    for axes, mesh in layout.tensor_meshes.items():
        for axis in mesh:
            cut = [name for name in totals if (form := layout.slots[name].dtensor) and form.axes == axes]
            cut = [name for name in cut if axis.name in getattr(layout.slots[name].dtensor, "cut_over", ())]
            if cut and axis.size > 1:
                whole = kind.across_parts(_stack([totals[name] for name in cut], layout), axis)
                totals |= {name: x.to(totals[name].dtype) for name, x in zip(cut, whole.unbind(), strict=True)}
    return totals


@dataclass(frozen=True)
class _Norm:
    """Sums of ``|x|^p`` and their root; for ``p`` of infinity the largest ``|x|``."""

    p: float

    @property
    def largest(self) -> bool:
        return self.p == float("inf")

    def total(self, x: Tensor) -> Tensor:
        powers = self._powers(wide(x))
        return powers.amax() if self.largest and x.numel() else powers.sum()

    def by_segment(self, x: Tensor, ids: Tensor, num_segments: int) -> Tensor:
        powers = self._powers(wide(x))
        if self.largest:
            return powers.new_zeros(num_segments).scatter_reduce(0, ids, powers, "amax")
        zeros = powers.new_zeros(num_segments, dtype=torch.float64)  # sequential sums in float32 would lose digits
        return zeros.scatter_add(0, ids, powers.double()).to(powers.dtype)

    def across(self, x: Tensor, axis: Axis) -> Tensor:
        return pmax(x, axis) if self.largest else psum(x, axis)

    def across_parts(self, x: Tensor, axis: Axis) -> Tensor:
        return shared_max(x, axis) if self.largest else shared_sum(x, axis)

    def join(self, parts: Sequence[Tensor], layout: Layout) -> Tensor:
        joined = _stack(parts, layout)
        return joined.amax() if self.largest else joined.sum()

    def root(self, total: Tensor) -> Tensor:
        if self.largest or self.p == 1:
            return total
        # The derivative of the root at 0 is infinite, and times the zeros of the chain rule it would be NaN.
        zero = total == 0
        return total.masked_fill(zero, 1.0).pow(1 / self.p).masked_fill(zero, 0.0)

    def _powers(self, x: Tensor) -> Tensor:
        if self.p == 2:  # not by abs, which has no second derivative at 0
            return torch.view_as_real(x.resolve_conj()).square().sum(-1) if x.is_complex() else x.square()
        return x.abs() if self.largest or self.p == 1 else x.abs().pow(self.p)


def _checked(verb: str, tree: Sharded, p: float) -> _Norm:
    check_sharded(verb, tree, "; torch.nn.utils.get_total_norm takes whole tensors" if isinstance(tree, Full) else "")
    if not p >= 1:
        raise ValueError(f"{verb}: p: got {p}, expected 1 or more, or float('inf')")
    check_shards(verb, tree, tree.layout, allow_none=True, gradients=True)
    return _Norm(p)


def _counted(tree: Sharded) -> dict[str, Buffer]:
    return {key: b for key, b in tree.layout.buffers.items() if b.differentiable and tree[key] is not None}


def _whole(tree: Sharded) -> Full:
    """The whole parameters that count of a stacked tree, each once, without rank dims and padding."""
    counted = _counted(tree)
    layout = select_buffers(tree.layout, {key: key in counted for key in tree.layout.buffers})
    shards = {
        key: tree[key].to(buffer.dtype) for key, buffer in layout.buffers.items()
    }  # gradients may be low precision
    return gather(Sharded(shards, as_stored(layout)))


def _sums_by_slot(kind: _Norm, x: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    """The sum or maximum of this rank's part of each slot of ``buffer``."""
    rank = shard_index(buffer, layout)
    if isinstance(rank, Tensor):
        ids = of_rank(slot_of_each(buffer, x.device), rank)
        return kind.by_segment(x, ids, len(buffer.slots) + 1)[:-1]
    slices = buffer.slices(rank)
    pieces = {piece.name: x[piece.offset : piece.offset + piece.numel] for piece in slices}
    return torch.stack([kind.total(pieces.get(slot.name, x[:0])) for slot in buffer.slots])


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype of sums: float32, or wider if it is."""
    if x.dtype in (torch.float64, torch.complex64, torch.complex128):
        return x
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


def _widest(parts: Any) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in parts) else torch.float32


def _stack(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    dtype, device = _widest(parts), layout.mesh.device
    return stacked([x.to(dtype) for x in parts], device) if parts else torch.zeros(1, device=device)
