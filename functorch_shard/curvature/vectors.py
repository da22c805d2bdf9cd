"""Trees as vectors: an inner product over all ranks, and random vectors that do not depend on how a tree is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ..collectives.primitives import psum
from ..collectives.rules import shared_sum
from ..communication.axis import Axis
from ..layout.buffers import Buffer, without_padding
from ..layout.layout import Layout, shard_axis, shard_index
from ..layout.trees import Sharded, check_sharded, check_shards, map_items
from ..storage.memory_kind import to_working_device
from ..torch_internals.autograd import eager
from ..training.norms import wide
from .element_bits import element_bits, normal, second, signs


@eager
def vdot(a: Sharded, b: Sharded) -> Tensor:
    """Compute the inner product of two trees as vectors: ``sum(conj(a) * b)`` over all parameters and ranks.

    ``torch.vdot`` of the whole tensors: every parameter counts once, tied ones too; padding and copies do not count.
    Together with ``tree_map`` this is what iterative solvers need: conjugate gradients, Lanczos, power iteration.
    Differentiable: under ``fs.grad`` its derivative is that of the unsharded trees.

    Args:
        a, b: ``Sharded`` trees of one layout, or stacked ones outside ``spmd``. Integers do not count; ``None`` is
        zero.

    Returns:
        A scalar of shape ``()``, the same on every rank: float32, float64 where a leaf of either is, or complex.

    Raises:
        TypeError: ``a`` or ``b`` is not a ``Sharded``.
        ValueError: trees of different layouts, or shards that do not fit them.

    Cost:
        One psum of a number over the shard axis, and one for each other axis that DTensors are sharded over.

    Example:
        >>> layout = fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> a, b = (fs.shard({"w": torch.tensor(x)}, layout) for x in ([1.0, 2.0, 3.0], [1.0, 10.0, 100.0]))
        >>> vdot(a, b)
        tensor(321.)
    """
    _check("vdot", a, b)
    if not a.layout.mesh.in_spmd:
        return a.layout.mesh.spmd(vdot)(a, b).flatten()[0]
    products = {}
    for key, buffer in a.layout.buffers.items():
        x, y = a[key], b[key]
        if buffer.differentiable and x is not None and y is not None:
            x = without_padding(x, buffer, shard_index(buffer, a.layout))
            products[key] = wide(x).conj() * wide(y)
    return _added_up(products, a.layout)


@eager
def randn_like(tree: Sharded, seed: int | Tensor) -> Sharded:
    """Draw a tree of independent standard normal numbers, which depend on seed, names and indices only.

    ``gather(randn_like(params, seed))`` is bitwise the same for any number of ranks, units, labels and replicas, and
    for any part of a model. torch's generators are not used and nothing is sent; padding stays zero.

    Args:
        tree: a ``Sharded`` whose layout, dtypes and devices the result has, or a stacked one outside ``spmd``; its
            values are not used.
        seed: an int, or an int64 tensor of shape ``()``, so that ``torch.func.vmap`` over seeds draws several trees.
            The same on every rank.

    Returns:
        A ``Sharded`` like ``tree``. Complex numbers have variance 1, as ``torch.randn``'s. Buffers of integers and
        leaves that are ``None`` are zeros and ``None``.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``, or ``seed`` neither an int nor an int64 tensor of shape ``()``.

    Cost:
        No communication. Memory: some ten float64 numbers for each element of one shard, one buffer at a time.

    Example:
        >>> two, three = (fs.plan({"w": torch.zeros(5)}, fs.simulated_mesh(n)) for n in (2, 3))
        >>> x, y = (fs.gather(randn_like(fs.shard({"w": torch.zeros(5)}, layout), seed=7)) for layout in (two, three))
        >>> bool((x["w"] == y["w"]).all())
        True
    """
    return _random("randn_like", tree, seed, _normal)


@eager
def rademacher_like(tree: Sharded, seed: int | Tensor) -> Sharded:
    """Draw a tree of independent signs, -1 or 1, which depend on seed, names and indices only.

    The probes of Hutchinson's estimator: ``vdot(z, hvp(z))`` has the trace of the Hessian as its mean, with less
    variance than with normal numbers.

    Args:
        tree: a ``Sharded`` whose layout, dtypes and devices the result has, as for :func:`randn_like`.
        seed: an int, or an int64 tensor of shape ``()``, the same on every rank.

    Returns:
        A ``Sharded`` like ``tree``, of -1 and 1; complex numbers are real.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``, or ``seed`` neither an int nor an int64 tensor of shape ``()``.

    Cost:
        No communication.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> rademacher_like(fs.shard({"fc.w": torch.zeros(3)}, layout), seed=0)["fc"].abs()   # row r = rank r
        tensor([[1., 1.],
                [1., 0.]])
    """
    return _random("rademacher_like", tree, seed, _signs)


def _check(verb: str, *trees: Sharded) -> None:
    for tree in trees:
        check_sharded(verb, tree)
        if tree.layout != trees[0].layout:
            raise ValueError(f"{verb}: the trees have different layouts. fs.reshard moves one to the other's layout.")
        check_shards(verb, tree, trees[0].layout, allow_none=True, gradients=True)


def _added_up(products: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The sum over all elements, each once: one psum for each set of axes that elements are sharded over."""
    sums: dict[tuple[Axis, ...], list[Tensor]] = {}
    for key, x in products.items():
        for axes, part in _parts(x, layout.buffers[key], layout):
            sums.setdefault(axes, []).append(to_working_device(part.sum(), layout.mesh.device))
    total = torch.zeros((), device=layout.mesh.device)
    for axes, parts in sums.items():
        part = sum(parts[1:], parts[0])
        for axis in axes:
            part = psum(part, axis) if axis == shard_axis(layout) else shared_sum(part, axis)
        total = total + part
    return total


def _parts(x: Tensor, buffer: Buffer, layout: Layout) -> Iterator[tuple[tuple[Axis, ...], Tensor]]:
    """A shard with the axes that it is sharded over; slot by slot for buffers with DTensors."""
    sharded_over = (shard_axis(layout),) if buffer.num_shards > 1 else ()
    if not any(slot.dtensor for slot in buffer.slots):
        yield sharded_over, x
        return
    parts = {part.name: part for part in buffer.slices(int(shard_index(buffer, layout)))}
    for slot in buffer.slots:
        part = parts.get(slot.name)
        cut = [layout.tensor_meshes[slot.dtensor.axes][name] for name in slot.dtensor.cut_over] if slot.dtensor else []
        yield (*sharded_over, *cut), x[part.offset : part.offset + part.numel] if part else x[:0]


def _normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    if not dtype.is_complex:
        return normal(bits).to(dtype)
    return (torch.complex(normal(bits), normal(second(bits))) * sqrt(0.5)).to(dtype)


def _signs(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return signs(bits).to(dtype)


def _random(verb: str, tree: Sharded, seed: int | Tensor, draw: Callable[[Tensor, torch.dtype], Tensor]) -> Sharded:
    _check(verb, tree)
    _check_seed(verb, seed)
    layout = tree.layout
    if not layout.mesh.in_spmd:
        return layout.mesh.spmd(lambda tree: _random(verb, tree, seed, draw))(tree)

    def drawn(key: str, x: Tensor | None) -> Tensor | None:
        buffer = layout.buffers[key]
        if x is None or not buffer.differentiable:
            return None if x is None else torch.zeros_like(x)
        rank = shard_index(buffer, layout)
        bits = element_bits(seed, buffer, layout, rank, layout.mesh.device)
        return without_padding(draw(bits, x.dtype), buffer, rank).to(x.device)

    return map_items(drawn, tree)


def _check_seed(verb: str, seed: Any) -> None:
    is_scalar = isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.ndim == 0
    if not is_scalar and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"{verb}: seed: got {seed!r}, expected an int or an int64 tensor of shape ()")
