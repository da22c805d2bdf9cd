"""Find NaN and infinity: ``assert_finite`` raises an error that locates them, ``all_finite`` returns a flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..collectives.primitives import pmax
from ..errors import reject
from ..layout.buffers import without_padding
from ..layout.layout import shard_index, shards_of_ranks
from ..layout.trees import Sharded, check_sharded, check_shards, participants_of, ranks_here
from ..storage.memory_kind import stacked
from ..torch_internals.autograd import eager
from .norms import wide


def assert_finite(tree: Sharded, what: str = "tree") -> None:
    """Raise unless every value is finite; the error locates each NaN and infinity by parameter, index and rank.

    The error is the same on every rank. Padding is ignored. Call it outside of ``spmd`` on simulated ranks: inside,
    values are not known yet.

    Args:
        tree: parameters, gradients or any ``Sharded``, which may have ``None`` leaves; with rank dims outside ``spmd``.
        what: the name of the tree in the error, for example ``"grads"``.

    Raises:
        FloatingPointError: one line for each parameter and each rank that holds a NaN or an infinity of it (20 lines at
            most): how many, and the first of them with its index in the parameter's shape (of a DTensor: in the shape
            of the local part).
        RuntimeError: inside ``spmd`` on simulated ranks.
        TypeError: ``tree`` is not a ``Sharded``.
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
    check_sharded(f"assert_finite: {what}", tree)
    mesh = tree.layout.mesh
    if mesh.is_simulated and mesh.in_spmd:
        raise RuntimeError(
            f"assert_finite: {what}: inside spmd the values of simulated ranks are not known yet. Return the tree from "
            "the function, and call assert_finite outside."
        )
    check_shards(f"assert_finite: {what}", tree, tree.layout, allow_none=True, gradients=True)
    participants = participants_of(tree)
    with torch.no_grad():
        text = "\n".join(_problems(tree, ranks_here(participants)))
    problems = [line for each in participants.gather_texts(text) for line in each.splitlines()]
    reject(f"assert_finite: {what}", problems, _ADVICE, FloatingPointError)


_ADVICE = "Gradients that overflow in float16 want fs.LossScale; torch.autograd.detect_anomaly() finds what made a NaN."


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
    fine = []
    for key, buffer in layout.buffers.items():
        if buffer.differentiable and tree[key] is not None:
            x = without_padding(tree[key], buffer, shard_index(buffer, layout))
            fine.append(torch.isfinite(wide(x)).all())
    fine = stacked(fine or [torch.ones((), dtype=torch.bool, device=device)], device).all()
    bad = pmax((~fine).to(torch.int64), layout.mesh)
    for axis in {axis.name: axis for mesh in layout.tensor_meshes.values() for axis in mesh}.values():
        bad = pmax(bad, axis)
    return bad == 0


def _problems(tree: Sharded, named: Sequence[int]) -> Iterator[str]:
    """Yield a line for each parameter and each rank here that holds bad values of it; ``named``: the ranks' numbers."""
    layout = tree.layout
    shard_of, here = shards_of_ranks(layout), ranks_here(layout.mesh)
    for key, buffer in layout.buffers.items():
        if tree[key] is None or _is_finite(tree[key]):
            continue
        for row, rank, number in zip(tree[key].reshape(len(here), -1), here, named, strict=True):
            for name, offset, numel, start in buffer.slices(shard_of[rank]):
                values = row[offset : offset + numel]
                if not _is_finite(values):
                    yield f"{name!r} on rank {number}: {_first(values, start, layout.slots[name].shape)}"


def _is_finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(wide(x)).all())


def _first(values: Tensor, start: int, shape: Sequence[int]) -> str:
    bad = (~torch.isfinite(wide(values))).nonzero().flatten()
    index = [int(i) for i in torch.unravel_index(bad[0].cpu() + start, tuple(shape))]
    return f"{len(bad)} of {values.numel()} values are not finite, the first is {values[bad[0]].item()} at {index}"
