"""Trees as vectors: an inner product over all ranks, and random vectors that do not depend on how a tree is sharded.

Note [Element bits]: the generator is SplitMix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2714064.2660195)
with the element's index as its counter, in int64 arithmetic that wraps around. A rank computes the bits of its own
elements only, and no state is kept. The normal quantile is ``torch.special.ndtri``, which has no vector form: ``log``
may round the last elements of a vector differently from the first, and values would depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor

from ..layout.buffers import Buffer, Slice, Slot, of_rank, overlaid, without_padding
from ..layout.layout import Layout, shard_index
from ..layout.trees import Sharded, check_sharded, check_shards, map_items
from ..torch_internals.autograd import eager
from ..training.norms import Norm, sums_of, wide

_GAMMA = 0x9E3779B97F4A7C15


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

    Cost:
        One psum over the shard axis and each axis that DTensors are sharded over, of a number for each set of these
        axes.

    Example:
        >>> layout = fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> a, b = (fs.shard({"w": torch.tensor(x)}, layout) for x in ([1.0, 2.0, 3.0], [1.0, 10.0, 100.0]))
        >>> vdot(a, b)
        tensor(321.)
    """
    _check("vdot", a, b)
    if not a.layout.mesh.in_spmd:
        return a.layout.mesh.spmd(vdot)(a, b).flatten()[0]
    layout = a.layout

    def products() -> Iterator[tuple[Buffer, Tensor]]:
        for key, buffer in layout.buffers.items():
            x, y = a[key], b[key]
            if buffer.differentiable and x is not None and y is not None:
                x, y = (without_padding(each, buffer, shard_index(buffer, layout)) for each in (x, y))
                yield buffer, wide(x).conj() * wide(y)

    kind = Norm(1)
    return kind.join(sums_of(kind, products(), layout).values(), layout)


@eager
def randn_like(tree: Sharded, seed: int | Tensor) -> Sharded:
    """Draw a tree of independent standard normal numbers, which depend on seed, names and indices only.

    ``gather(randn_like(params, seed))`` is bitwise the same for any number of ranks, units, labels and replicas, and
    for any part of a model. torch's generators are not used and nothing is sent; padding stays zero. Independent signs
    are ``optree.tree_map(torch.sgn, randn_like(params, seed))``.

    Args:
        tree: a ``Sharded`` whose layout, dtypes and devices the result has, or a stacked one outside ``spmd``; its
            values are not used.
        seed: an int, or an int64 tensor of shape ``()``, so that ``torch.func.vmap`` over seeds draws several trees.
            The same on every rank.

    Returns:
        A ``Sharded`` like ``tree``. Complex numbers have variance 1, as ``torch.randn``'s. Buffers of integers and
        leaves that are ``None`` are zeros and ``None``.

    Cost:
        No communication. Memory: some ten float64 numbers for each element that a shard has of one parameter.

    Example:
        >>> two, three = (fs.plan({"w": torch.zeros(5)}, fs.simulated_mesh(n)) for n in (2, 3))
        >>> x, y = (fs.gather(randn_like(fs.shard({"w": torch.zeros(5)}, layout), seed=7)) for layout in (two, three))
        >>> bool((x["w"] == y["w"]).all())
        True
    """
    _check("randn_like", tree)
    layout = tree.layout
    if not layout.mesh.in_spmd:
        return layout.mesh.spmd(lambda tree: randn_like(tree, seed))(tree)
    start = torch.as_tensor(_signed(seed) if isinstance(seed, int) else seed, device=layout.mesh.device)
    stream = _mixed(start + _signed(_GAMMA))

    def of_buffer(key: str, x: Tensor | None) -> Tensor | None:
        buffer = layout.buffers[key]
        if x is None or not buffer.differentiable:
            return None if x is None else torch.zeros_like(x)
        rank, slots = shard_index(buffer, layout), {slot.name: slot for slot in buffer.slots}
        blank = torch.zeros(buffer.shard_numel, dtype=x.dtype, device=layout.mesh.device)
        rows = [
            overlaid(blank, [(each.offset, _drawn(stream, slots[each.name], each, layout, x.dtype)) for each in slices])
            for slices in map(buffer.slices, range(buffer.num_shards) if isinstance(rank, Tensor) else [rank])
        ]
        return of_rank(torch.stack(rows), rank).to(x.device)

    return map_items(of_buffer, tree)


def _check(verb: str, *trees: Sharded) -> None:
    for tree in trees:
        check_sharded(verb, tree)
        if tree.layout != trees[0].layout:
            raise ValueError(f"{verb}: the trees have different layouts. fs.reshard moves one to the other's layout.")
        check_shards(verb, tree, trees[0].layout, gradients=True)


def _drawn(stream: Tensor, slot: Slot, part: Slice, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Draw the numbers of a part of a parameter, by the hash of its name and the indices of its elements."""
    index = torch.arange(part.start, part.start + part.numel, device=layout.mesh.device)
    if slot.dtensor:  # into the whole DTensor, from that into the local part
        places = torch.unravel_index(index, slot.shape)
        first = slot.dtensor.part_at(layout.tensor_meshes[slot.dtensor.axes].coordinate)[1]
        index = torch.zeros_like(index)
        for i, start, size in zip(places, first, slot.dtensor.shape, strict=True):
            index = index * size + i + start
    name = int.from_bytes(hashlib.blake2b(slot.name.encode(), digest_size=8).digest(), "little", signed=True)
    bits = _mixed(_mixed(stream ^ name) + (index + 1) * _signed(_GAMMA))
    if not dtype.is_complex:
        return normal(bits).to(dtype)
    second = _mixed(bits + _signed(_GAMMA))  # independent of the first
    return (torch.complex(normal(bits), normal(second)) * sqrt(0.5)).to(dtype)


def normal(bits: Tensor) -> Tensor:
    """Standard normal, in float64, of 52 of the bits."""
    return torch.special.ndtri((_shifted(bits, 12) * 2 + 1).double() * 2.0**-53)  # of (0, 1), without its ends


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, n: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> n) & (2 ** (64 - n) - 1)


def _mixed(x: Tensor) -> Tensor:
    for n, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, n)) * _signed(factor)
    return x ^ _shifted(x, 31)
