"""Random bits of each element of a parameter: a function of a seed, its name and its place in the whole parameter.

Note [Element bits]: the generator is SplitMix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2714064.2660195)
with the element's index as its counter, in int64 arithmetic that wraps around. A rank computes the bits of its own
elements only, and no state is kept. The normal quantile is Wichura's AS 241, and its logarithm a series: additions,
multiplications, divisions and square roots only, which IEEE 754 rounds correctly. ``log`` may round the last elements
of a vector differently from the first, so that values would depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import log, sqrt

import torch
from torch import Tensor

from ..torch_internals.operators import frexp
from .buffers import Buffer, Slot
from .layout import Layout
from .packing import of_rank, overlaid

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def element_bits(
    seed: int | Tensor, buffer: Buffer, layout: Layout, rank: Tensor | int, device: torch.device
) -> Tensor:
    """64 random bits for each element of a shard: int64, shape ``(shard_numel,)``; arbitrary for padding.

    Args:
        seed: an int, or an int64 tensor of shape ``()``, which a vmap may have batched.
        rank: the shard, an int, or a tensor that a vmap over simulated ranks has batched.
    """
    names, places = (of_rank(rows, rank) for rows in _addresses(buffer, layout, rank, device))
    start = torch.as_tensor(_signed(seed) if isinstance(seed, int) else seed, device=device)
    return _mixed(_mixed(_mixed(start + _signed(_GAMMA)) ^ names) + (places + 1) * _signed(_GAMMA))


def second(bits: Tensor) -> Tensor:
    """64 more bits for each element, independent of the first."""
    return _mixed(bits + _signed(_GAMMA))


def signs(bits: Tensor) -> Tensor:
    """-1.0 or 1.0, each half of the time, in float64."""
    return (bits < 0).double() * 2 - 1


def normal(bits: Tensor) -> Tensor:
    """Standard normal, in float64, of 52 of the bits: Wichura's PPND16, whose relative error is about 1e-16."""
    uniform = (_shifted(bits, 12) * 2 + 1).double() * 2.0**-53  # in the open interval (0, 1), exactly
    q = uniform - 0.5
    tail = torch.where(q < 0, uniform, 1 - uniform)
    far = torch.sqrt(-_logarithm(tail))
    centre = q * _ratio(0.180625 - q * q, _CENTRE)
    outer = torch.where(far <= 5, _ratio(far - 1.6, _MIDDLE), _ratio(far - 5, _FAR))
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0, -outer, outer))


def _addresses(buffer: Buffer, layout: Layout, rank: Tensor | int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A hash of the name and the index of each element, one row per shard; only that of ``rank`` if it is an int."""
    ranks = range(buffer.num_shards) if isinstance(rank, Tensor) else [rank]
    blank = torch.zeros(buffer.shard_numel, dtype=torch.int64, device=device)
    names, places = zip(*(_addresses_of(buffer, layout, number, device) for number in ranks), strict=True)
    return _stacked(blank, names), _stacked(blank, places)


Parts = list[tuple[int, Tensor]]


def _stacked(blank: Tensor, rows: Sequence[Parts]) -> Tensor:
    return torch.stack([overlaid(blank, parts) for parts in rows])


def _addresses_of(buffer: Buffer, layout: Layout, rank: int, device: torch.device) -> tuple[Parts, Parts]:
    """Those of the elements that are not padding, by their offsets in the shard."""
    slots, names, places = {slot.name: slot for slot in buffer.slots}, Parts(), Parts()
    for name, offset, numel, start in buffer.slices(rank):
        local = torch.arange(start, start + numel, device=device)
        names.append((offset, torch.full_like(local, _number_of(name))))
        places.append((offset, _in_whole(local, slots[name], layout)))
    return names, places


def _in_whole(local: Tensor, slot: Slot, layout: Layout) -> Tensor:
    """Indices into the whole DTensor, from indices into the local part; unchanged for other parameters."""
    if slot.dtensor is None:
        return local
    first = slot.dtensor.local_start(layout.tensor_meshes[slot.dtensor.axes].coordinate)
    index = torch.zeros_like(local)
    for i, start, size in zip(torch.unravel_index(local, slot.shape), first, slot.dtensor.shape, strict=True):
        index = index * size + i + start
    return index


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


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


def _logarithm(x: Tensor) -> Tensor:
    """The natural logarithm of positive numbers: ``2 * atanh((m - 1) / (m + 1))``, with ``m`` close to 1."""
    mantissa, exponent = frexp(x)
    low = mantissa < sqrt(0.5)
    mantissa, exponent = torch.where(low, mantissa * 2, mantissa), exponent.double() - low.double()
    t = (mantissa - 1) / (mantissa + 1)
    square, series = t * t, torch.zeros_like(t)
    for k in range(23, 0, -2):
        series = series * square + 1 / k
    return exponent * log(2) + 2 * t * series


def _ratio(x: Tensor, coefficients: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    above, below = (_polynomial(x, each) for each in coefficients)
    return above / below


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """A polynomial by Horner's rule; the constant comes first."""
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


# Numerators and denominators of PPND16: Wichura, Applied Statistics 37 (1988), 477-484.
# fmt: off
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)
_MIDDLE = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)
# fmt: on
