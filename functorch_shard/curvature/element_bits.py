"""Random bits of each element of a parameter: a function of a seed, its name and its place in the whole parameter.

Note [Element bits]: the generator is SplitMix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2714064.2660195)
with the element's index as its counter, in int64 arithmetic that wraps around. A rank computes the bits of its own
elements only, and no state is kept. The normal quantile is ``torch.special.ndtri``, which has no vector form: ``log``
may round the last elements of a vector differently from the first, and values would depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout.buffers import Buffer, Slot, of_rank, overlaid
from ..layout.layout import Layout

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
Parts = list[tuple[int, Tensor]]


def element_bits(
    seed: int | Tensor, buffer: Buffer, layout: Layout, rank: Tensor | int, device: torch.device
) -> Tensor:
    """64 random bits for each element of a shard: int64, shape ``(shard_numel,)``; arbitrary for padding.

    Args:
        seed: an int, or an int64 tensor of shape ``()``, which a vmap may have batched.
        rank: the shard, an int, or a tensor that a vmap over simulated ranks has batched.
    """
    ranks = range(buffer.num_shards) if isinstance(rank, Tensor) else [rank]
    blank = torch.zeros(buffer.shard_numel, dtype=torch.int64, device=device)
    rows = zip(*(_addresses(buffer, layout, number, device) for number in ranks), strict=True)
    names, places = (of_rank(torch.stack([overlaid(blank, parts) for parts in each]), rank) for each in rows)
    start = torch.as_tensor(_signed(seed) if isinstance(seed, int) else seed, device=device)
    return _mixed(_mixed(_mixed(start + _signed(_GAMMA)) ^ names) + (places + 1) * _signed(_GAMMA))


def second(bits: Tensor) -> Tensor:
    """64 more bits for each element, independent of the first."""
    return _mixed(bits + _signed(_GAMMA))


def signs(bits: Tensor) -> Tensor:
    """-1.0 or 1.0, each half of the time, in float64."""
    return (bits < 0).double() * 2 - 1


def normal(bits: Tensor) -> Tensor:
    """Standard normal, in float64, of 52 of the bits."""
    return torch.special.ndtri((_shifted(bits, 12) * 2 + 1).double() * 2.0**-53)  # of (0, 1), without its ends


def _addresses(buffer: Buffer, layout: Layout, rank: int, device: torch.device) -> tuple[Parts, Parts]:
    """A hash of the name and the index of each element that is not padding, by their offsets in the shard."""
    slots, names, places = {slot.name: slot for slot in buffer.slots}, Parts(), Parts()
    for name, offset, numel, start in buffer.slices(rank):
        local = torch.arange(start, start + numel, device=device)
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
        names.append((offset, torch.full_like(local, number)))
        places.append((offset, _in_whole(local, slots[name], layout)))
    return names, places


def _in_whole(local: Tensor, slot: Slot, layout: Layout) -> Tensor:
    """Indices into the whole DTensor, from indices into the local part; unchanged for other parameters."""
    if slot.dtensor is None:
        return local
    first: Sequence[int] = slot.dtensor.part_at(layout.tensor_meshes[slot.dtensor.axes].coordinate)[1]
    index = torch.zeros_like(local)
    for i, start, size in zip(torch.unravel_index(local, slot.shape), first, slot.dtensor.shape, strict=True):
        index = index * size + i + start
    return index


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, n: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> n) & (2 ** (64 - n) - 1)


def _mixed(x: Tensor) -> Tensor:
    for n, factor in _MIX:
        x = (x ^ _shifted(x, n)) * _signed(factor)
    return x ^ _shifted(x, 31)
