"""Where NaN and infinity are: ``assert_finite`` for people, ``all_finite`` for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from math import prod

import torch
from torch import Tensor

from ..collectives.primitives import psum
from ..errors import reject
from ..layout.buffers import Slot
from ..layout.dtensor import local_part
from ..layout.layout import Layout
from ..layout.packing import without_padding
from ..layout.rank_trees import participants_of
from ..layout.trees import Full, Sharded
from ..layout.validation import check_shards
from ..mesh.init import job_mesh
from ..sharding.gather import materialize
from ..storage.memory_kind import to_working_device
from .norms import shard_index, wide


def assert_finite(tree: Sharded | Full, what: str = "tree") -> None:
    """Raise unless every value is finite; the error names the parameters that have a NaN or an infinity, and where.

    The same error on every rank. Padding is not looked at. Not for inside ``spmd`` on simulated ranks, where no value
    is known yet: return the tree, and look at it outside.

    Args:
        tree: any ``Sharded``, with ``None`` leaves if need be, or a ``Full``; with its rank dims outside ``spmd``.
        what: what to call it, as ``"grads"``.

    Raises:
        FloatingPointError: a line for each such parameter (of many, for the first 20): how many, the first in row-major
            order with its index in the parameter's own shape and its value, and the ranks that hold such values.
        RuntimeError: inside ``spmd`` on simulated ranks.
        TypeError: ``tree`` is neither.
        ValueError: shards that do not fit their layout.

    Cost:
        Looks at all values, and waits for them. One all-gather of 8 bytes per axis; one more when there is an error.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3, 2)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [float("nan"), 5.0]])}, layout)
        >>> assert_finite(grads, "grads")
        Traceback (most recent call last):
        FloatingPointError: assert_finite: grads: 1 problem
          'fc.w': 1 of 6 values not finite, the first is nan at [2, 0], on rank 1
        Gradients that overflow in float16 want fs.LossScale; torch.autograd.detect_anomaly() finds what made a NaN.
    """
    if not isinstance(tree, (Sharded, Full)):
        raise TypeError(f"assert_finite: {what}: got {type(tree).__name__}, expected a Sharded or a Full.")
    mesh = tree.layout.mesh
    if mesh.is_simulated and mesh.in_spmd:
        raise RuntimeError(
            f"assert_finite: {what}: inside spmd the values of simulated ranks are not known yet. Return the tree from "
            "the function, and call assert_finite outside."
        )
    with torch.no_grad():
        found = list(_in_shards(tree, what) if isinstance(tree, Sharded) else _in_whole(tree, what))
    texts = participants_of(tree).gather_texts(json.dumps([astuple(one) for one in found]) if found else "")
    by_name: dict[str, list[_Found]] = {name: [] for name in _slots_by_every_name(tree.layout)}
    for one in (_Found(*one) for text in texts if text for one in json.loads(text)):
        by_name[one.name].append(one)
    problems = [_line(found) for found in by_name.values() if found]
    advice = (
        "Gradients that overflow in float16 want fs.LossScale; torch.autograd.detect_anomaly() finds what made a NaN."
    )
    reject(f"assert_finite: {what}", problems, advice, FloatingPointError)


def all_finite(tree: Sharded) -> Tensor:
    """Whether every value on every rank is finite, as a tensor: for a step that is skipped on all ranks or on none.

    Runs as one rank: on real ranks, or inside ``spmd``. Padding is not looked at.

    Args:
        tree: gradients, or any ``Sharded``. Integers and ``None`` are finite.

    Returns:
        A bool tensor of shape ``()``, the same on all ranks.

    Cost:
        One psum of a number per axis, also over the axes of DTensors.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"w": torch.zeros(4)}, mesh)
        >>> grads = fs.shard({"w": torch.tensor([0.0, 1.0, 2.0, float("inf")])}, layout)
        >>> mesh.spmd(all_finite)(grads)    # row r = rank r
        tensor([False, False])
    """
    layout, device = tree.layout, tree.layout.mesh.device
    fine = [torch.ones((), dtype=torch.bool, device=device)]
    for key, buffer in layout.buffers.items():
        if buffer.differentiable and tree[key] is not None:
            x = without_padding(tree[key], buffer, shard_index(buffer, layout))
            fine.append(to_working_device(torch.isfinite(wide(x)).all(), device))
    bad = psum(~torch.stack(fine).all(), layout.mesh)
    for axis in {axis.name: axis for mesh in layout.tensor_meshes.values() for axis in mesh}.values():
        bad = psum(bad, axis)
    return bad == 0


@dataclass(frozen=True)
class _Found:
    """What is not finite of one parameter in one shard: ``first`` counts in the flattened parameter.

    Of a DTensor the local part is looked at; ``shard`` then says which, and ``rank`` is one of the job.
    """

    name: str
    shape: tuple[int, ...]
    shard: str
    rank: int | None  # None: a whole value, of no rank of a simulated mesh
    count: int
    first: int
    value: str


def _in_shards(tree: Sharded, what: str) -> Iterator[_Found]:
    layout = tree.layout
    check_shards(f"assert_finite: {what}", tree, layout, allow_none=True, gradients=True)
    for key, buffer in layout.buffers.items():
        if tree[key] is None or _fine(tree[key]):
            continue
        for rank, row in _rows(tree[key], (buffer.shard_numel,), layout):
            shard = _shard_of(rank or 0, layout) if buffer.num_shards > 1 else 0
            for name, offset, numel, start in buffer.slices(shard):
                slot = layout.slots[name]
                yield from _found(row[offset : offset + numel], slot, name, *_place(slot, shard, rank, layout), start)


def _in_whole(tree: Full, what: str) -> Iterator[_Found]:
    slots = _slots_by_every_name(tree.layout)
    problems = [f"{name!r}: not in the layout" for name in tree if name not in slots]
    ranks = tuple(size for _, size in tree.layout.axes)
    parts = {name: local_part(x) for name, x in tree.items()}
    for name, x in parts.items():
        if name in slots and tuple(x.shape) not in (slots[name].shape, (*ranks, *slots[name].shape)):
            problems.append(f"{name!r}: got shape {tuple(x.shape)}, expected {slots[name].shape}")
    reject(f"assert_finite: {what}", problems, "A Full has the names and shapes of the parameters of its layout.")
    for name, x in parts.items():
        values = materialize(x)  # once: a lazy tensor that one rank alone asks again would leave the others waiting
        if not _fine(values):
            for rank, row in _rows(values, slots[name].shape, tree.layout):
                yield from _found(row, slots[name], name, *_place(slots[name], 0, rank, tree.layout), 0)


def _slots_by_every_name(layout: Layout) -> dict[str, Slot]:
    return {**layout.slots, **{alias: layout.slots[name] for alias, name in layout.aliases}}


def _rows(x: Tensor, shape: tuple[int, ...], layout: Layout) -> Iterable[tuple[int | None, Tensor]]:
    """Each rank whose value is here, and the value, flat."""
    if tuple(x.shape) == shape:
        return [(None if layout.mesh.is_simulated else layout.mesh.rank, x.flatten())]
    return enumerate(x.reshape(layout.mesh.size, -1))


def _shard_of(rank: int, layout: Layout) -> int:
    """The position on the shard axis of a rank of the mesh."""
    for name, size in reversed(layout.axes):
        if name == layout.shard_axis:
            return rank % size
        rank //= size
    return 0


def _place(slot: Slot, shard: int, rank: int | None, layout: Layout) -> tuple[str, int | None]:
    """Which elements, for copies to count once, and the rank that holds them: of the job, where there are DTensors."""
    if slot.dtensor is None:
        return str(shard), rank
    start = slot.dtensor.local_start(layout.tensor_meshes[slot.dtensor.axes].coordinate)
    return f"{shard} of the part from {start}", job_mesh().rank


def _fine(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(wide(x)).all())


def _found(piece: Tensor, slot: Slot, name: str, shard: str, rank: int | None, start: int) -> Iterator[_Found]:
    if not _fine(piece):
        bad = (~torch.isfinite(wide(piece))).nonzero().flatten()
        yield _Found(name, slot.shape, shard, rank, len(bad), start + int(bad[0]), str(piece[bad[0]].item()))


def _line(found: list[_Found]) -> str:
    first, numel = min(found, key=lambda one: one.first), prod(found[0].shape)
    count = sum({one.shard: one.count for one in sorted(found, key=lambda one: one.count)}.values())  # copies once
    ranks = sorted({one.rank for one in found if one.rank is not None})
    where = f", on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    index = [int(i) for i in torch.unravel_index(torch.tensor(first.first, device="cpu"), tuple(first.shape))]
    return f"{first.name!r}: {count} of {numel} values not finite, the first is {first.value} at {index}{where}"
