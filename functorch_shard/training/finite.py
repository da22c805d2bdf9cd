"""Find NaN and infinity: ``assert_finite`` raises an error that locates them, ``all_finite`` returns a flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..collectives.primitives import psum
from ..eager import eager
from ..errors import reject
from ..layout.dtensor import local_part
from ..layout.packing import without_padding
from ..layout.rank_trees import participants_of, ranks_here
from ..layout.ranks import axis_sizes, shard_index, shards_of_ranks
from ..layout.trees import Full, Sharded
from ..layout.validation import check_shards
from ..sharding.gather import materialize
from ..storage.memory_kind import to_working_device
from .norms import wide


def assert_finite(tree: Sharded | Full, what: str = "tree") -> None:
    """Raise unless every value is finite; the error locates each NaN and infinity by parameter, index and rank.

    The error is the same on every rank. Padding is ignored. Call it outside of ``spmd`` on simulated ranks: inside,
    values are not known yet.

    Args:
        tree: a ``Sharded``, which may have ``None`` leaves, or a ``Full``; with rank dims outside ``spmd``.
        what: the name of the tree in the error, for example ``"grads"``.

    Raises:
        FloatingPointError: one line for each parameter and each rank that holds a NaN or an infinity of it (20 lines at
            most): how many, and the first of them with its index in the parameter's shape (of a DTensor: in the shape
            of the local part).
        RuntimeError: inside ``spmd`` on simulated ranks.
        TypeError: ``tree`` is not a ``Sharded`` or a ``Full``.
        ValueError: shards that do not fit their layout.

    Cost:
        Reads all values and synchronizes with the device. One all-gather of 8 bytes per axis; another for an error.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3, 2)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [float("nan"), 5.0]])}, layout)
        >>> assert_finite(grads, "grads")
        Traceback (most recent call last):
        FloatingPointError: assert_finite: grads: 1 problem
          'fc.w' on rank 1: 1 of 3 values are not finite, the first is nan at [2, 0]
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
    participants = participants_of(tree)
    with torch.no_grad():
        sharded = isinstance(tree, Sharded)
        named = ranks_here(participants)
        every = _in_shards(tree, what, named) if sharded else _in_full(tree, what, named)
        lines = [_line(*values) for values in every if not _is_finite(values[3])]
    problems = [line for text in participants.gather_texts("\n".join(lines)) for line in text.splitlines()]
    advice = (
        "Gradients that overflow in float16 want fs.LossScale; torch.autograd.detect_anomaly() finds what made a NaN."
    )
    reject(f"assert_finite: {what}", problems, advice, FloatingPointError)


@eager
def all_finite(tree: Sharded) -> Tensor:
    """Return whether every value on every rank is finite, as a tensor: to skip a step on all ranks or on none.

    Call it on real ranks, or inside ``spmd``. Padding is ignored.

    Args:
        tree: gradients, or any ``Sharded``. Integers and ``None`` count as finite.

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


# a parameter's name and shape, the rank that holds the values, the values, and where they start in the parameter
Values = tuple[str, tuple[int, ...], int | None, Tensor, int]


def _in_shards(tree: Sharded, what: str, named: Sequence[int]) -> Iterator[Values]:
    layout = tree.layout
    check_shards(f"assert_finite: {what}", tree, layout, allow_none=True, gradients=True)
    shard_of, here = shards_of_ranks(layout), ranks_here(layout.mesh)
    for key, buffer in layout.buffers.items():
        if tree[key] is None or _is_finite(tree[key]):
            continue
        for row, rank, number in zip(tree[key].reshape(len(here), -1), here, named, strict=True):
            for name, offset, numel, start in buffer.slices(shard_of[rank]):
                yield name, layout.slots[name].shape, number, row[offset : offset + numel], start


def _in_full(tree: Full, what: str, named: Sequence[int]) -> Iterator[Values]:
    layout = tree.layout
    slots = {**layout.slots, **{alias: layout.slots[name] for alias, name in layout.aliases}}
    problems = [f"{name!r}: not in the layout" for name in tree if name not in slots]
    parts = {name: local_part(x) for name, x in tree.items()}
    for name, x in parts.items():
        if name in slots and tuple(x.shape) not in (slots[name].shape, (*axis_sizes(layout), *slots[name].shape)):
            problems.append(f"{name!r}: got shape {tuple(x.shape)}, expected {slots[name].shape}")
    reject(f"assert_finite: {what}", problems, "A Full has the names and shapes of the parameters of its layout.")
    for name, x in parts.items():
        values, shape = materialize(x), slots[name].shape  # on every rank: a lazy tensor is fetched by a collective
        if not _is_finite(values):
            simulated = layout.mesh.is_simulated
            ranks = [None] if simulated and tuple(values.shape) == shape else named
            for rank, row in zip(ranks, values.reshape(len(ranks), -1), strict=True):
                yield name, shape, rank, row, 0


def _is_finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(wide(x)).all())


def _line(name: str, shape: tuple[int, ...], rank: int | None, values: Tensor, start: int) -> str:
    bad = (~torch.isfinite(wide(values))).nonzero().flatten()
    index = [int(i) for i in torch.unravel_index(bad[0].cpu() + start, shape)]
    where = "" if rank is None else f" on rank {rank}"
    first = f"the first is {values[bad[0]].item()} at {index}"
    return f"{name!r}{where}: {len(bad)} of {values.numel()} values are not finite, {first}"
