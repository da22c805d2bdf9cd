"""Random numbers by key, in the spirit of JAX: a key is a value, and what is drawn depends on it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class Key:
    """64 bits that random numbers are drawn by; made by :func:`key` and :meth:`fold_in`."""

    bits: int

    def fold_in(self, data: int) -> Key:
        """Return the key for ``data``, such as a step or a virtual rank: another one for each."""
        return Key(_mixed(_mixed(self.bits) ^ (data & _BITS)))

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Make a generator that begins at this key, for ``torch.randn(..., generator=...)`` and ``torch.randperm``."""
        return torch.Generator(device).manual_seed(self.bits)

    @contextmanager
    def seeded(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Let torch's global generators of the CPU and of ``device`` begin at this key, as for dropout; then go on."""
        where = torch.device(device)
        with torch.random.fork_rng([] if where.type == "cpu" else [where], device_type=where.type):
            torch.manual_seed(self.bits)
            yield


def key(seed: int, *data: int) -> Key:
    """Make the key of ``seed``, with each of ``data`` folded in: ``key(seed, step, virtual_rank)``.

    Args:
        seed, data: ints of at most 64 bits.

    Returns:
        A :class:`Key`, which holds no state: the same numbers whenever, wherever and in whatever order it is used.
        torch's generators of the CPU take 32 of its bits.

    Example:
        >>> step = fs.virtual.key(0, 7)
        >>> step.fold_in(3) == fs.virtual.key(0, 7, 3)
        True
        >>> torch.randperm(5, generator=step.generator())
        tensor([1, 0, 2, 4, 3])
    """
    made = Key(_mixed(seed & _BITS))
    for each in data:
        made = made.fold_in(each)
    return made


def _mixed(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of ``x`` changes half of the result."""
    x = (x + 0x9E3779B97F4A7C15) & _BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _BITS
    return x ^ (x >> 31)
