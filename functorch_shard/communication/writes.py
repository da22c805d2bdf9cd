"""Writes into what ranks gathered are refused: one through ``.data`` or without grad would never reach the shards.

Lazy parameters refuse them at once. Plain ones are compared with a sum of their bits at the end of the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import reject
from ..running import RUN, running
from ..torch_internals.autograd import being_traced, outside_transforms, without_batches

_ADVICE = (
    "What gather returns is a copy: a write into it, through .data or under no_grad, is forgotten; real ranks refuse "
    "it too. Change the shards, p.clamp(...) in a tree_map over the Sharded after the step, or gather with lazy=False "
    "for tensors of your own."
)


class Gathered:
    """What one run of ``spmd`` or ``fs.grad`` gathered, the last of each buffer, with a sum of its bits."""

    def __init__(self, verb: str = "spmd") -> None:
        self._verb = verb
        self._seen: dict[str, tuple[Sequence[Tensor], Tensor, Sequence[str]]] = {}

    def add(self, key: str, parts: Mapping[str, Tensor]) -> None:
        """Remember the parameters of a buffer, and look at those of this key that were gathered before."""
        self.check([key] if key in self._seen else [])
        plain = [*map(without_batches, parts.values())]
        x = plain[0]
        if type(x) is Tensor and not x.is_meta and not being_traced() and not torch.compiler.is_compiling():
            self._seen[key] = plain, bit_sum(plain), [*parts]

    def check(self, keys: Sequence[str] | None = None) -> None:
        """Raise if parameters of one of these buffers, or of all, were written to."""
        keys = [*self._seen] if keys is None else keys
        found = [self._seen.pop(key) for key in keys]
        if found:
            changed = torch.stack([bit_sum(parts).cpu() != before.cpu() for parts, before, _ in found]).tolist()
            rows = zip(keys, found, changed, strict=True)
            named = [f"buffer {key!r} ({', '.join(names)})" for key, (_, _, names), wrong in rows if wrong]
            if problems := [f"{name}: written to inside of the function" for name in named]:
                reject(self._verb, problems, _ADVICE, RuntimeError)


@contextmanager
def writes_refused() -> Iterator[None]:
    """A run of ``spmd`` on simulated ranks: raise at its end if something that it gathered was written to."""
    gathered = Gathered()
    with running(gathered=gathered):
        yield
    gathered.check()


def watch(key: str, parts: Mapping[str, Tensor]) -> None:
    """Have writes into the parameters of a buffer refused at the end of ``spmd``; real ranks refuse them at once."""
    if gathered := RUN.get().gathered:
        gathered.add(key, parts)


def bit_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the words of 8 bytes of plain tensors, the last one filled up with zeros, modulo 2 ** 64."""
    with outside_transforms(), torch.no_grad():
        first, *others = [*map(Tensor.flatten, parts)]
        plain = (torch.cat([first, *others]) if others else first).resolve_conj().resolve_neg()
        data = plain.contiguous().view(torch.uint8)  # (bytes,)
        if data.storage_offset() % 8:  # int64 is aligned to 8 bytes
            data = data.clone()
        rest = data.numel() % 8
        total = data[: data.numel() - rest].view(torch.int64).sum()
        return total + pad(data[-rest:], (0, 8 - rest)).view(torch.int64).sum() if rest else total
