"""Writes into what simulated ranks gathered: they would be forgotten, so they are found and refused.

On real ranks a lazy parameter refuses to be written to. On simulated ranks parameters are plain tensors in one memory,
and a write, through ``.data`` or without grad, acts until the end of the function and never reaches the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..errors import reject
from ..torch_internals.autograd import being_traced, outside_transforms, without_batches

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE = (
    "What gather returns is a copy: a write into it, through .data or under no_grad, is forgotten; real ranks refuse "
    "it too. Change the shards, p.clamp(...) in a tree_map over the Sharded after the step, or gather with lazy=False "
    "for tensors of your own."
)


class Gathered:
    """Whole buffers of one run of ``spmd`` or ``fs.grad`` by key, the last of each, with a sum of their bits."""

    def __init__(self, verb: str = "spmd") -> None:
        self._verb = verb
        self._seen: dict[str, tuple[Tensor, Tensor, Sequence[str]]] = {}

    def add(self, key: str, x: Tensor, names: Sequence[str]) -> None:
        """Remember ``x``, and look at the buffer of this key that was gathered before."""
        self._check([key] if key in self._seen else [])
        plain = without_batches(x)
        if type(plain) is Tensor and not plain.is_meta and not being_traced() and not torch.compiler.is_compiling():
            self._seen[key] = plain, _sum_of_bits(plain), names

    def check(self) -> None:
        """Raise if something was written to."""
        self._check(list(self._seen))

    def _check(self, keys: list[str]) -> None:
        found = [self._seen.pop(key) for key in keys]
        if found:
            changed = torch.stack([_sum_of_bits(x).cpu() != before.cpu() for x, before, _ in found]).tolist()
            problems = [
                f"buffer {key!r} ({', '.join(names)}): written to inside of the function"
                for key, (_, _, names), wrong in zip(keys, found, changed, strict=True)
                if wrong
            ]
            reject(self._verb, problems, _ADVICE, RuntimeError)


_GATHERED: ContextVar[Gathered | None] = ContextVar("what this run of spmd gathered", default=None)


@contextmanager
def writes_refused() -> Iterator[None]:
    """A run of ``spmd`` on simulated ranks: raise at its end if something that it gathered was written to."""
    gathered = Gathered()
    token = _GATHERED.set(gathered)
    try:
        yield
    finally:
        _GATHERED.reset(token)
    gathered.check()


def watch(key: str, whole: Tensor, names: Sequence[str]) -> None:
    """Have writes into a whole buffer refused at the end of ``spmd``; real ranks refuse them at once."""
    if gathered := _GATHERED.get():
        gathered.add(key, whole, names)


def content_of(x: Tensor) -> int:
    """A number that another content of ``x`` would give another one for, for tensors that count no writes."""
    plain = without_batches(x)
    return int(_sum_of_bits(plain.resolve_conj().resolve_neg()))


def _sum_of_bits(x: Tensor) -> Tensor:
    with outside_transforms(), torch.no_grad():
        bits = torch.view_as_real(x) if x.is_complex() else x
        return bits.detach().view(_INTEGERS[bits.element_size()]).sum(dtype=torch.int64)
