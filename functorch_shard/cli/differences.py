"""``verify`` and ``diff``: whether a checkpoint is whole, and what differs between two of them, in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import torch
from torch import Tensor

from ..checkpoint.dcp.reader import Entry, Reader
from ..errors import shown, size_text, table
from .checkpoints import NOT_PLAIN, plain_text
from .progress import progress


def verify(reader: Reader) -> str:
    """Read every byte; raises with all problems, one a line."""
    problems = reader.verify()
    if problems:
        raise RuntimeError("\n".join(problems))
    nbytes = sum(entry.nbytes for entry in reader.entries.values())
    return f"{shown(str(reader.folder))}: {len(reader.entries)} names, {size_text(nbytes)} of tensors, valid"


def differences(one: Reader, other: Reader) -> str:
    """A line for each name that differs, as a table; an empty text if none does.

    Tensors are compared bit by bit, two at a time in memory, and values by their pickles.
    """
    names = sorted({*one.entries, *other.entries})
    common = [name for name in names if name in one.entries and name in other.entries]
    with progress("diff", sum(one.entries[name].nbytes for name in common), size_text) as advance:
        rows = []
        for name in names:
            rows += [(shown(name), *cells) for cells in _differences(name, one, other)]
            advance(one.entries[name].nbytes if name in common else 0)
    return table(rows, ("name", "first", "second", "difference"), left=4) if rows else ""


def _differences(name: str, one: Reader, other: Reader) -> Iterator[tuple[str, str, str]]:
    first, second = _form(one.entries.get(name)), _form(other.entries.get(name))
    if first != second:
        yield first, second, ""
    elif one.entries[name].dtype is None:
        yield from _of_values(name, one, other)
    elif found := _of_tensors(one.whole(name), other.whole(name)):
        yield first, second, found


def _of_values(name: str, one: Reader, other: Reader) -> Iterator[tuple[str, str, str]]:
    first, second = (plain_text(reader, name) for reader in (one, other))
    if first.startswith(NOT_PLAIN) or second.startswith(NOT_PLAIN):
        yield first, second, "not compared"
    elif pickle.dumps(one.plain(name)) != pickle.dumps(other.plain(name)):  # its size is that of what was read
        yield first, second, ""


def _form(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    return "value" if entry.dtype is None else f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"


def _of_tensors(x: Tensor, y: Tensor) -> str:
    """How many elements differ, a NaN from a NaN only in its bits, and by how much at most."""
    bits = [each.contiguous().flatten().view(torch.uint8).view(-1, each.element_size()) for each in (x, y)]
    number = int((bits[0] != bits[1]).any(-1).sum()) if x.numel() else 0
    if not number:
        return ""
    numbers = torch.complex128 if x.is_complex() else torch.float64
    largest = (x.to(numbers) - y.to(numbers)).abs().max().item()
    return f"{number:,} of {x.numel():,} elements, by {largest:.2g} at most"
