"""The same on every rank, or the same error on every rank: a difference found before it can hang anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..communication.axis import Axis
from ..communication.process_group import as_bytes
from ..errors import first_difference
from ..torch_internals.autograd import outside_transforms

T = TypeVar("T")
_FAILED = bytes(32)
_ADVICE = "Every rank must plan the same model, from the same code and options."


def agree(
    verb: str,
    build: Callable[[], T],
    describe: Callable[[T], Sequence[str]],
    axes: Sequence[Axis],
    device: torch.device,
    advice: str = _ADVICE,
) -> T:
    """``build()``, when it succeeds on every rank and ``describe`` gives the same lines everywhere.

    Raises:
        Exception: whatever ``build`` raised here.
        RuntimeError: ``build`` raised on another rank, or the lines differ; it names the rank and the first difference.

    Cost:
        One all-gather of a 32-byte digest per axis; two more when there is an error to report.
    """
    error, lines, value = None, [], None
    try:
        value = build()
        lines = list(describe(value))
    except Exception as caught:  # reported to the other ranks before it goes on
        error = caught
    digest = _FAILED if error else hashlib.sha256("\n".join(lines).encode()).digest()
    digests = _gather_bytes(digest, axes, device)
    if len(set(digests)) == 1 and not error:
        return value  # pyright: ignore[reportReturnType]
    reports = gather_texts(json.dumps([f"{type(error).__name__}: {error}" if error else None, lines]), axes, device)
    if error:
        raise error
    raise RuntimeError(_first_difference(verb, [json.loads(report) for report in reports], advice))


def _first_difference(verb: str, reports: Sequence[tuple[str | None, list[str]]], advice: str) -> str:
    for rank, (error, _) in enumerate(reports):
        if error:
            return f"{verb} failed on rank {rank}, so no rank can go on. There:\n{error}"
    (_, first), *others = reports
    for rank, (_, lines) in enumerate(others, 1):
        if difference := first_difference(first, lines):
            return (
                f"{verb}: the ranks disagree. First difference:\n  rank 0: {difference[0]}\n"
                f"  rank {rank}: {difference[1]}\n{advice}"
            )
    raise AssertionError("digests differ but lines do not")


def gather_texts(text: str, axes: Sequence[Axis], device: torch.device) -> list[str]:
    """``text`` of every rank, in rank order: one all-gather of 8 bytes per axis, and one more unless all are empty."""
    data = text.encode()
    lengths = [int.from_bytes(size, "big") for size in _gather_bytes(len(data).to_bytes(8, "big"), axes, device)]
    if not any(lengths):
        return [""] * len(lengths)
    padded = _gather_bytes(data.ljust(max(lengths)), axes, device)
    return [row[:length].decode() for row, length in zip(padded, lengths, strict=True)]


def _gather_bytes(data: bytes, axes: Sequence[Axis], device: torch.device) -> list[bytes]:
    """``data`` of every rank, in rank order; equally long everywhere, and not empty."""
    with outside_transforms():
        rows: Tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)[None]
        for axis in reversed(axes):
            rows = axis.issue("exchange", rows).wait()
        return [as_bytes(row) for row in rows.cpu()]
