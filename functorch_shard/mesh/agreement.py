"""The same on every rank, or the same error on every rank: a difference found before it can hang anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..communication.backend import Axis
from ..communication.writes import bit_sum
from ..errors import first_difference
from ..torch_internals.autograd import outside_transforms, without_batches

T = TypeVar("T")
_ADVICE = "Every rank must plan the same model, from the same code and options."


def agree(
    verb: str,
    build: Callable[[], T],
    describe: Callable[[T], Sequence[str]],
    axes: Sequence[Axis],
    device: torch.device,
    advice: str = _ADVICE,
) -> T:
    """Return ``build()``, when it succeeds on every rank and ``describe`` gives the same lines everywhere.

    Otherwise all ranks raise: what ``build`` raised here, or the rank and the first difference. A 32-byte digest is
    gathered over each axis, and twice more when there is an error to report.
    """
    error, lines, value = None, [], None
    try:
        value = build()
        lines = list(describe(value))
    except Exception as caught:  # reported to the other ranks before it goes on
        error = caught
    digest = bytes(32) if error else hashlib.sha256("\n".join(lines).encode()).digest()
    if len(set(_gather_bytes(digest, axes, device))) == 1 and not error:
        return value  # pyright: ignore[reportReturnType]
    own = json.dumps([f"{type(error).__name__}: {error}" if error else None, lines]).encode()
    lengths = [int.from_bytes(size, "big") for size in _gather_bytes(len(own).to_bytes(8, "big"), axes, device)]
    reports = [json.loads(row) for row in _gather_bytes(own.ljust(max(lengths)), axes, device)]
    if error:
        raise error
    for rank, (failed, _) in enumerate(reports):
        if failed:
            raise RuntimeError(f"{verb} failed on rank {rank}, so no rank can go on. There:\n{failed}")
    for rank, (_, lines) in enumerate(reports):
        if difference := first_difference(reports[0][1], lines):
            raise RuntimeError(
                f"{verb}: the ranks disagree. First difference:\n  rank 0: {difference[0]}\n"
                f"  rank {rank}: {difference[1]}\n{advice}"
            )
    raise AssertionError("digests differ but lines do not")


def _gather_bytes(data: bytes, axes: Sequence[Axis], device: torch.device) -> list[bytes]:
    """Return ``data`` of every rank, in rank order; equally long everywhere, and not empty."""
    with outside_transforms():
        rows: Tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)[None]
        for axis in reversed(axes):
            rows = axis.issue("exchange", rows).wait()
        return [bytes(row.tolist()) for row in rows]


def value_lines(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """Return a line for each of ``names`` with the sum of the bits of all values, to compare ranks without sending.

    Two models made for the purpose may share a sum. A gigabyte is read in 0.03 s on one core, and drawn in 3 s.
    """
    sums = ((name, int(bit_sum([without_batches(tensors[name])])) % 2**64) for name in names)
    return [f"{name!r}: values of bit sum {total:016x}" for name, total in sums]
