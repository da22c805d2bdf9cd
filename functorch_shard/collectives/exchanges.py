"""Collectives that exchange values and add nothing up: all-to-all, permutation, broadcast; loaded on first use.

The operands and results are trees as in ``primitives``, and a mesh means all of its axes as one joint axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..communication.backend import Axis
from ..communication.collective import parts_along
from ..errors import reject
from ..torch_internals.autograd import eager
from .primitives import Over, Tree, axes_of, axis_index, check, on_leaves
from .rules import LinearMap, linear_map_of, resized


@eager
def all_to_all(x: Tree, axis: Over, /, *, split_dim: int, concat_dim: int) -> Tree:
    """Part r of ``split_dim`` to rank r of ``axis``; what arrives is laid side by side along ``concat_dim``.

    ``all_to_all(all_to_all(x, split_dim=a, concat_dim=b), split_dim=b, concat_dim=a)`` equals ``x``. Linear; its
    transpose is itself with the dims exchanged. As ``jax.lax.all_to_all`` with ``tiled=True``.

    Args:
        x: this rank's parts, a tensor or a pytree of them, the same shapes on every rank; ``x.shape[split_dim]``
            divisible by ``axis.size``.
        axis: the ranks that exchange parts; a mesh means all of its axes as one, in row-major rank order.
        split_dim: the dimension that is split, a part for each rank.
        concat_dim: the dimension along which the parts of all ranks are laid, in rank order.

    Returns:
        Shape of ``x`` with ``split_dim`` divided and then ``concat_dim`` multiplied by ``axis.size``.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: a leaf has no such dims, or ``x.shape[split_dim]`` is not divisible; the message has the numbers.

    Cost:
        One all-to-all per leaf: each rank sends ``(N - 1) / N`` of ``x``.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> rows = torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: all_to_all(x, mesh["shard"], split_dim=0, concat_dim=0))(rows)
        tensor([[ 1,  2, 10, 20],
                [ 3,  4, 30, 40]])
    """
    one = _as_one(axis)
    check("all_to_all", x, concat_dim)
    check("all_to_all", x, split_dim, one.size)

    def exchanged(x: Tensor) -> Tensor:
        split, concat = split_dim % x.ndim, concat_dim % x.ndim
        parts = parts_along(split, x, one.size)
        parts = linear_map_of(parts, LinearMap(one, "all_to_all", "all_to_all", -parts.ndim))
        return parts.movedim(0, concat).flatten(concat, concat + 1)

    return on_leaves(exchanged, x)


@eager
def ragged_all_to_all(x: Tree, axis: Over, /, sizes: Any, *, dim: int = 0) -> Tree:
    """``sizes[i][j]`` rows from rank i to rank j of ``axis``: an :func:`all_to_all` whose parts differ.

    ``sizes`` is one table, the same on every rank. Where each rank knows its own row alone, as in a mixture of experts,
    gather it first: ``sizes = all_gather(counts[None], axis).tolist()``. Batched simulated ranks have no such numbers
    inside of ``spmd``: compute the table outside, use ranks of kind ``"sequential"``, or a capacity and
    :func:`all_to_all`.

    Linear; its transpose is itself with the transposed table, which brings every row back to where it was.

    Args:
        x: this rank's rows, a tensor or a pytree of them: along ``dim`` those for rank 0, then those for rank 1, and so
            on. What follows them is not sent.
        axis: the ranks that exchange rows; a mesh means all of its axes as one, in row-major rank order.
        sizes: N rows of N integers: numbers on the host, or a tensor or an array of them.
        dim: the dimension that ``sizes`` counts.

    Returns:
        Along ``dim`` the rows from rank 0, from rank 1, and so on. The same shape on every rank, that of the one that
        receives most: zeros follow where less arrives.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: ``sizes`` is not N rows of N sizes; a leaf has fewer rows than it sends; the message has
            the numbers.

    Cost:
        One all-to-all per leaf, in which each rank sends its rows for others and nothing else. The table is part of
        what ranks compare, and of a recorded step.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> rows = torch.tensor([[1, 2, 3], [10, 20, 30]])   # row r = rank r
        >>> mesh.spmd(lambda x: ragged_all_to_all(x, mesh["shard"], [[1, 2], [0, 2]]))(rows)
        tensor([[ 1,  0,  0,  0],
                [ 2,  3, 10, 20]])
    """
    one = _as_one(axis)
    table = tuple(tuple(map(int, row)) for row in getattr(sizes, "tolist", lambda: sizes)())
    if [len(row) for row in table] != [one.size] * one.size or min(map(min, table)) < 0:
        raise ValueError(f"ragged_all_to_all: sizes: got {table}, expected {one.size} rows of {one.size} sizes")
    index = one.backend.index() if one.size > 1 else 0  # a number on real ranks; batched ones have one shape for all
    check("ragged_all_to_all", x, dim, rows=max(map(sum, table)) if isinstance(index, Tensor) else sum(table[index]))

    def exchanged(x: Tensor) -> Tensor:
        rows = x.movedim(dim, 0)
        elements = tuple(tuple(n * prod(rows.shape[1:]) for n in row) for row in table)
        sent = resized(rows.flatten(), max(map(sum, elements)))
        received = linear_map_of(sent, LinearMap(one, "ragged_all_to_all", "ragged_all_to_all", splits=elements))
        return received.unflatten(0, (max(map(sum, zip(*table, strict=True))), *rows.shape[1:])).movedim(0, dim)

    return on_leaves(exchanged, x)


@eager
def ppermute(x: Tree, axis: Over, /, perm: Iterable[tuple[int, int]]) -> Tree:
    """What ``perm`` sends here: ``(i, j)`` has the value of rank i go to rank j of ``axis``; zeros if there is nothing.

    Linear; its transpose is itself with the pairs turned round. As ``jax.lax.ppermute``.

    Args:
        x: this rank's value, a tensor or a pytree of them, the same shapes on every rank.
        axis: the ranks that send; a mesh means all of its axes as one, in row-major rank order.
        perm: pairs ``(from, to)``, the same on every rank. A rank sends to one at most and gets from one at most; for
            the next in a ring, ``[(i, (i + 1) % n) for i in range(n)]``.

    Returns:
        The shapes of ``x``.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: a pair names a rank that does not exist, or two pairs send from or to one rank.

    Cost:
        One message of ``x`` per leaf from each rank that sends to another one.

    Example:
        >>> mesh = fs.simulated_mesh(3)
        >>> rows = torch.tensor([1, 20, 300])   # row r = rank r
        >>> mesh.spmd(lambda x: ppermute(x, mesh["shard"], [(0, 1), (1, 2)]))(rows)
        tensor([ 0,  1, 20])
    """
    one = _as_one(axis)
    pairs = tuple(sorted((int(sender), int(to)) for sender, to in perm))
    problems = [f"{pair}: ranks are 0 to {one.size - 1}" for pair in pairs if not {*pair} <= {*range(one.size)}]
    for side, ranks in zip(("sends", "receives"), zip(*pairs, strict=True), strict=False):
        problems += [f"rank {r} {side} {ranks.count(r)} times" for r in sorted({*ranks}) if ranks.count(r) > 1]
    reject("ppermute", problems, "Give pairs (from, to) in which each rank sends once at most, and receives once.")
    check("ppermute", x)
    linear = LinearMap(one, "ppermute", "ppermute", splits=pairs)

    def sent(x: Tensor) -> Tensor:
        if pairs:
            return linear_map_of(x, linear)
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)  # which depends on x, as others do

    return on_leaves(sent, x)


@eager
def broadcast(x: Tree, axis: Over, /, from_rank: int) -> Tree:
    """The value of rank ``from_rank`` of ``axis``, on every rank.

    Linear; its transpose is a sum over ranks that arrives at ``from_rank``, and zeros elsewhere. In JAX one writes a
    ``psum`` of a masked value.

    Args:
        x: this rank's value, a tensor or a pytree of them, the same shapes on every rank; only those of ``from_rank``
            are used.
        axis: the ranks that get it; a mesh means all of its axes as one, in row-major rank order.
        from_rank: the rank of ``axis`` that has it, the same on every rank.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: ``from_rank`` is not one of the ranks.

    Cost:
        One broadcast per leaf: ``x`` from one rank to the others. Its backward is a :func:`psum`.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> mesh.spmd(lambda x: broadcast(x, mesh, from_rank=1))(torch.tensor([3, 40]))
        tensor([40, 40])
    """
    one = _as_one(axis)
    if from_rank not in range(one.size):
        raise ValueError(f"broadcast: from_rank: got {from_rank}, expected a rank of 0 to {one.size - 1}")
    check("broadcast", x)
    if one.size == 1:
        return on_leaves(torch.clone, x)
    is_elsewhere = axis_index(one) != from_rank
    linear = LinearMap(one, "broadcast", "psum", source=from_rank)
    return on_leaves(lambda x: linear_map_of(x.masked_fill(is_elsewhere.to(x.device), 0), linear), x)


def _as_one(axis: Over) -> Axis:
    """``axis``; of a mesh the joint axis of all that have several ranks."""
    axes = [each for each in axes_of(axis) if each.size > 1] or axes_of(axis)[:1]
    return axes[0] if isinstance(axis, Axis) or len(axes) == 1 else axis[tuple(each.name for each in axes)]
