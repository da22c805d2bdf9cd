"""Norms of sharded trees over all ranks, and where they are not finite: padding does not count.

A norm is the p-th root of a sum of ``|x|^p``, or the largest ``|x|``. Each rank reduces its own shards to a number, the
ranks of the shard axis combine these, and buffers that every rank holds whole are added after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from ..collectives.primitives import all_gather, pmax, psum, shared
from ..communication.backend import Axis
from ..layout.buffers import Buffer, of_rank, slot_of_each, without_padding
from ..layout.layout import Layout, as_held, shard_axis, shard_index
from ..layout.trees import Full, Sharded, check_sharded, check_shards, map_items
from ..sharding.gather import gather
from ..storage.memory_kind import stacked, to_memory_kind_of
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
        p: 1 or more; ``float("inf")`` gives the largest magnitude, whose gradient at ties depends on the layout.

    Returns:
        Shape ``()``, the same on every rank; outside ``spmd`` without rank dims. float64 if one of the leaves has that
        precision, else float32, as the sums of each leaf are. 0 without leaves; NaN if a value is NaN.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``.
        ValueError: shards that do not fit their layout, or ``p`` is below 1.

    Cost:
        One all-reduce over the shard axis and each axis that DTensors are sharded over, of a number for each set of
        these axes. Memory for the powers of one buffer's shard at a time, summed pairwise (on CPUs
        ``torch.linalg.vector_norm`` sums sequentially, which is less accurate for long vectors).

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([2.0, 3.0, 6.0])}, layout)
        >>> global_norm(grads), global_norm(grads, float("inf"))
        (tensor(7.), tensor(6.))
    """
    kind, mesh = _checked("global_norm", tree, p), tree.layout.mesh
    if tree.layout.virtual_ranks and not mesh.in_spmd:
        return mesh.spmd(lambda tree: global_norm(tree, p))(tree).flatten()[0]
    return kind.root(kind.join(_sums_of_tree(kind, tree).values(), tree.layout))


@eager
def clip_by_global_norm(grads: Sharded, max_norm: float, p: float = 2.0) -> tuple[Sharded, Tensor]:
    """Scale ``grads`` down to a norm of at most ``max_norm``; also return their norm before.

    ``torch.nn.utils.clip_grad_norm_`` as a pure function: gradients are multiplied by ``max_norm / (norm + 1e-6)``, at
    most 1. A norm that is not finite has the same effect as with ``error_if_nonfinite=False``: NaN makes every gradient
    NaN, infinity makes them 0, and NaN where they were infinite. ``fs.debug.param_norms`` names the parameters.

    Args:
        grads: as in :func:`global_norm`.
        max_norm: 0 or more.
        p: as in :func:`global_norm`.

    Returns:
        ``(grads, norm)``: the gradients in their dtypes, with ``None`` and integers unchanged; the norm before
        clipping, as :func:`global_norm` returns it.

    Cost:
        That of :func:`global_norm`, and a copy of the gradients.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([2.0, 3.0, 6.0])}, layout)
        >>> clipped, norm = clip_by_global_norm(grads, 3.5)
        >>> clipped["fc"], norm
        (tensor([[1.0000, 1.5000],
                [3.0000, 0.0000]]), tensor(7.))
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_by_global_norm: max_norm: got {max_norm}, expected 0 or more")
    norm = global_norm(grads, p)
    return scaled(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0)), norm


def scaled(tree: Sharded, factor: Tensor) -> Sharded:
    """Multiply the leaves that are differentiable by a number, and round each product once, to the leaf's dtype."""
    there, buffers = cache(factor.to), tree.layout.buffers

    def product(key: str, x: Any) -> Any:
        if x is None or not buffers[key].differentiable:
            return x
        return to_memory_kind_of((wide(x) * there(x.device)).to(x.dtype), x)

    return map_items(product, tree)


def param_norms(tree: Sharded, p: float = 2.0) -> dict[str, Tensor]:
    """Compute the p-norm of each parameter, by name, without gathering: for logging, and to find what is not finite.

    ``global_norm(tree, p)`` is the norm of these norms. With ``p=torch.inf`` a norm is finite if all values are; powers
    of large values overflow.

    Args:
        tree: as in :func:`global_norm`.
        p: as in :func:`global_norm`.

    Returns:
        ``{name: norm}`` in the source's order, each as :func:`global_norm` returns it; without ``None`` leaves,
        integers and bools. Tied parameters are listed once.

    Cost:
        One all-reduce of a number per parameter over the shard axis, and over each axis that DTensors are sharded over.

    Example:
        >>> values = {"fc.w": torch.tensor([2.0, 3.0, 6.0]), "fc.b": torch.tensor([3.0, 4.0])}
        >>> param_norms(fs.shard(values, fs.plan(values, fs.simulated_mesh(2))))
        {'fc.w': tensor(7.), 'fc.b': tensor(5.)}
    """
    kind, mesh = _checked("param_norms", tree, p), tree.layout.mesh
    if tree.layout.virtual_ranks and not mesh.in_spmd:
        return {name: x.flatten()[0] for name, x in mesh.spmd(lambda tree: param_norms(tree, p))(tree).items()}
    totals = {name: total for (name, _), total in _sums_of_tree(kind, tree, by_name=True).items()}
    return {name: kind.root(totals[name]) for name in tree.layout.slots if name in totals}


@eager
def all_finite(tree: Sharded) -> Tensor:
    """Return whether every value on every rank is finite, as a tensor: to skip a step on all ranks or on none.

    Call it on real ranks, or inside ``spmd``. Padding is ignored.

    Args:
        tree: gradients, or any ``Sharded``. Integers and ``None`` count as finite.

    Returns:
        A bool tensor of shape ``()``, the same on all ranks.

    Cost:
        One pmax of a number per axis, also over the axes of DTensors.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"w": torch.zeros(4)}, mesh)
        >>> grads = fs.shard({"w": torch.tensor([0.0, 1.0, 2.0, float("inf")])}, layout)
        >>> mesh.spmd(all_finite)(grads)    # row r = rank r
        tensor([False, False])
    """
    layout, device = tree.layout, tree.layout.mesh.device
    bad = [~wide(x).isfinite().all() for _, x in _shards(tree)]
    bad = bad or [torch.zeros((), dtype=torch.bool, device=device)]
    found = pmax(stacked(bad, device).any().to(torch.int64), layout.mesh)
    for axis in {axis.name: axis for mesh in layout.tensor_meshes.values() for axis in mesh}.values():
        found = pmax(found, axis)
    return found == 0


@dataclass(frozen=True)
class Norm:
    """Sums over all ranks of ``|x|^p`` and their root; for ``p`` of infinity the largest ``|x|``."""

    p: float

    @property
    def largest(self) -> bool:
        return self.p == float("inf")

    def powers(self, x: Tensor) -> Tensor:
        x = wide(x)
        if self.p == 2:  # not by abs, which has no second derivative at 0
            return torch.view_as_real(x.resolve_conj()).square().sum(-1) if x.is_complex() else x.square()
        return x.abs() if self.largest or self.p == 1 else x.abs().pow(self.p)

    def total(self, powers: Tensor) -> Tensor:
        return powers.amax() if self.largest and powers.numel() else powers.sum()

    def by_segment(self, powers: Tensor, ids: Tensor, num_segments: int) -> Tensor:
        if self.largest:
            return powers.new_zeros(num_segments).scatter_reduce(0, ids, powers, "amax")
        zeros = powers.new_zeros(num_segments, dtype=torch.float64)  # sequential sums in float32 would lose digits
        return zeros.scatter_add(0, ids, powers.double()).to(powers.dtype)

    def across(self, x: Tensor, axis: Axis, layout: Layout) -> Tensor:
        """Over an axis of shards, or over one that DTensors are sharded over, whose ranks share one loss."""
        if axis == shard_axis(layout):
            return pmax(x, axis) if self.largest else psum(x, axis)
        return shared("pmax" if self.largest else "psum", x, axis)

    def join(self, parts: Iterable[Tensor], layout: Layout) -> Tensor:
        parts, device = [*parts], layout.mesh.device
        dtype = reduce(torch.promote_types, (x.dtype for x in parts), torch.float32)
        return self.total(stacked([x.to(dtype) for x in parts], device) if parts else torch.zeros(1, device=device))

    def root(self, total: Tensor) -> Tensor:
        if self.largest or self.p == 1:
            return total
        # The derivative of the root at 0 is infinite, and times the zeros of the chain rule it would be NaN.
        zero = total == 0
        return total.masked_fill(zero, 1.0).pow(1 / self.p).masked_fill(zero, 0.0)


Over = tuple[str, tuple[Axis, ...]]  # a name, empty for several parameters, and the axes that they are sharded over
OwnTotal = tuple[Over, Tensor]  # the total of this rank's part of them


def _own_totals(
    kind: Norm, shards: Iterable[tuple[Buffer, Tensor]], layout: Layout, by_name: bool, in_blocks: bool
) -> Iterator[OwnTotal]:
    """Yield the totals of shards on this rank, or of their blocks, by name or for all slots of the same axes."""
    for buffer, x in shards:
        axes, rank = (shard_axis(layout),) if buffer.num_shards > 1 else (), shard_index(buffer, layout)
        parts = [(buffer, x, rank)]
        if in_blocks:
            number, cut = layout.virtual_ranks // buffer.num_shards, replace(buffer, num_shards=layout.virtual_ranks)
            parts = [(cut, block, i) for i, block in enumerate(x.tensor_split(number), int(rank) * number)]
        for whole, part, i in parts:
            if not by_name and not any(slot.dtensor for slot in buffer.slots):
                yield (buffer.key if in_blocks else "", axes), kind.total(part)
                continue
            for slot, total in zip(buffer.slots, _by_slot(kind, part, whole, i), strict=True):
                form = slot.dtensor
                cut_over = [layout.tensor_meshes[form.axes][name] for name in form.cut_over] if form else []
                yield (slot.name if by_name else "", (*axes, *cut_over)), total


def _by_slot(kind: Norm, x: Tensor, buffer: Buffer, rank: Tensor | int) -> Iterable[Tensor]:
    if isinstance(rank, Tensor):
        ids = of_rank(slot_of_each(buffer, x.device), rank)
        return kind.by_segment(x, ids, len(buffer.slots) + 1)[:-1].unbind()
    parts = {part.name: x[part.offset : part.offset + part.numel] for part in buffer.slices(rank)}
    return [kind.total(parts.get(slot.name, x[:0])) for slot in buffer.slots]


def sums_of(
    kind: Norm, shards: Iterable[tuple[Buffer, Tensor]], layout: Layout, by_name: bool = False
) -> dict[Over, Tensor]:
    """Return the totals of shards over all ranks; with virtual ranks their bits do not depend on the number of ranks.

    Note [Blocks]: in a layout of V virtual ranks a buffer has V blocks, and the shard of a rank is some of them. Each
    block is reduced to a number where it is; all ranks get these numbers, and each adds up the same vector of V.
    """
    in_blocks = layout.virtual_ranks > 0 and not layout.mesh.is_simulated
    return _sums(kind, _own_totals(kind, shards, layout, by_name, in_blocks), layout, in_blocks)


def _sums(kind: Norm, own: Iterable[OwnTotal], layout: Layout, in_blocks: bool = False) -> dict[Over, Tensor]:
    """Return the totals over all ranks: one reduction for each axis and dtype, of blocks one gather."""
    found: dict[Over, list[Tensor]] = {}
    for key, total in own:
        found.setdefault(key, []).append(total)
    totals = {key: torch.stack(each) if in_blocks else kind.join(each, layout) for key, each in found.items()}
    for axis, dtype in dict.fromkeys((axis, x.dtype) for (_, axes), x in totals.items() for axis in axes):
        keys = [key for key, x in totals.items() if axis in key[1] and x.dtype == dtype]
        mine = torch.stack([totals[key] for key in keys])
        whole = all_gather(mine, axis, dim=1).contiguous() if in_blocks else kind.across(mine, axis, layout)
        totals |= zip(keys, whole.unbind(), strict=True)
    return {key: kind.total(x) for key, x in totals.items()} if in_blocks else totals


def _sums_of_tree(kind: Norm, tree: Sharded, by_name: bool = False) -> dict[Over, Tensor]:
    """Return the totals over all ranks of a tree, or outside of ``spmd`` of the whole parameters."""
    layout = tree.layout
    if layout.mesh.in_spmd:
        shards = ((buffer, kind.powers(x)) for buffer, x in _shards(tree))
        return sums_of(kind, shards, layout, by_name)
    whole = (((name if by_name else "", ()), kind.total(kind.powers(x))) for name, x in _whole(tree).items())
    return _sums(kind, whole, layout)


def _checked(verb: str, tree: Sharded, p: float) -> Norm:
    check_sharded(verb, tree, "; torch.nn.utils.get_total_norm takes whole tensors" if isinstance(tree, Full) else "")
    if not p >= 1:
        raise ValueError(f"{verb}: p: got {p}, expected 1 or more, or float('inf')")
    check_shards(verb, tree, tree.layout, gradients=True)
    return Norm(p)


def _counted(tree: Sharded) -> dict[str, Buffer]:
    return {key: b for key, b in tree.layout.buffers.items() if b.differentiable and tree[key] is not None}


def _shards(tree: Sharded) -> Iterator[tuple[Buffer, Tensor]]:
    """The shards that count, without padding."""
    for key, buffer in _counted(tree).items():
        yield buffer, without_padding(tree[key], buffer, shard_index(buffer, tree.layout))


def _whole(tree: Sharded) -> Full:
    """The whole parameters that count of a stacked tree, each once, without rank dims and padding."""
    shards = {key: tree[key] for key in _counted(tree)}
    return gather(Sharded(shards, as_held(tree.layout, shards)))


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype of sums: float32, or wider if it is."""
    if x.dtype in (torch.float64, torch.complex64, torch.complex128):
        return x
    return x.to(torch.complex64 if x.is_complex() else torch.float32)
