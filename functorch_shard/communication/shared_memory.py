"""Shared-memory transport between processes of one host: each rank writes to its own memfd, peers read it with pread.

Used by ``gloo`` for messages above its ``SOCKET_LIMIT``.

Bytes go into a file by one copy and out of it by another, where sockets have packets and threads that wake each other.
What is added up is read from where it is, in files that are mapped. Messages take memory of the host; what of it is
mapped counts as resident in each process.

Note [Slots]: a file is a row of slots, far apart; the holes between them take no memory. A slot begins with one byte
for each rank, then comes the message. A message goes through four steps, in this order:

1. The writer takes a slot whose bytes are all 1, or a new one, sets them to 0, and writes its message.
2. It sends the number of the slot to all ranks over the process group.
3. Each rank that received it reads what it needs, or nothing, and then sets its own byte to 1; the writer too.
4. When all bytes are 1, no rank will read the message again, and the slot may be taken again.

Each step is a system call after the step before it, in the same process or after a message from it, and therefore sees
what that one wrote. No rank waits here: if a slot is not free, there is another one. The writer alone chooses the slot,
so ranks may differ in it. There are as many slots as there were messages unread at once, and each takes the memory of
the largest message it had.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_char
from secrets import token_hex

import torch
from torch import Tensor

from .shared_results import SharedResults, close, mapped

SLOT = 1 << 40  # bytes from one slot to the next: more than any message has, and 2**23 slots fit into a file
HEAD = 1 << 12  # bytes before a message: as many ranks as one host will ever have
PIECE = 1 << 18  # bytes that are read and added up while they are in the cache
MAPPED = 8  # ranks, that have each other's sums mapped; with more of them, whose maps take descriptors, sums are read
_IN_PLACE = -2  # the first of the slots that stand for regions of results, which go on below it
ADDRESS = 64  # bytes of an address: a process, a file of it, and a name that no other file has


class SharedMemory:
    """The files of all ranks of one axis, which this process has open; they end with the last process that has them."""

    def __init__(self, rank: int, files: Sequence[int], of_results: int) -> None:
        self._rank, self._files = rank, list(files)
        self._sizes: list[int] = []  # of the largest message that each slot had
        self._results = SharedResults(rank, len(files), of_results)
        self._maps: dict[tuple[int, int], mmap.mmap] = {}  # of a rank's slot

    def write(self, pieces: Sequence[Tensor]) -> int:
        """Write the bytes of contiguous ``pieces``, one after the other, as one message; returns its slot."""
        slot, file = self._take_slot(sum(piece.nbytes for piece in pieces)), self._files[self._rank]
        os.pwrite(file, bytes(len(self._files)), slot * SLOT)
        offset = slot * SLOT + HEAD
        for piece in pieces:
            offset += _each_byte(os.pwritev, file, piece, offset)
        return slot

    def write_in_place(self, number: int, x: Tensor, dtype: torch.dtype) -> int | None:
        """Write ``x`` in ``dtype`` where all ranks read the result of collective ``number``; its slot, if any."""
        region = self._results.write(number, x, dtype)
        return None if region is None else _IN_PLACE - region

    def rows_in_place(self, slots: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """What all ranks wrote in place, stacked, if they did and it can be mapped. Freeing it is ``done``."""
        in_place = slots[0] <= _IN_PLACE and len({*slots}) == 1
        return self._results.rows(_IN_PLACE - slots[0], shape, dtype) if in_place else None

    def read(self, rank: int, slot: int, start: int, into: Tensor) -> None:
        """Fill ``into``, contiguous, with what the message of ``rank`` has from byte ``start`` on."""
        _each_byte(os.preadv, self._files[rank], into, slot * SLOT + HEAD + start)

    def read_rows(self, slots: Sequence[int], shape: Sequence[int], dtype: torch.dtype, own: Tensor | None) -> Tensor:
        """The messages of all ranks, each of this shape, stacked; ``own`` is this rank's, which saves a read."""
        rows = torch.empty((len(slots), *shape), dtype=dtype, device="cpu")
        for rank, slot in enumerate(slots):
            if rank == self._rank and own is not None:
                rows[rank].copy_(own)
            elif slot <= _IN_PLACE:
                start = self._results.start(_IN_PLACE - slot) + rank * rows[rank].nbytes
                _each_byte(os.preadv, self._results.file, rows[rank], start)
            else:
                self.read(rank, slot, 0, rows[rank])
        return rows

    def read_sum(self, slots: Sequence[int], own: Tensor) -> Tensor:
        """The sum, in rank order, of ``own`` and of the part for this rank in messages of the parts for each other."""
        total, step, start = torch.empty_like(own), max(PIECE // own.element_size(), 1), 0
        for piece, mine in zip(total.view(-1).split(step), own.view(-1).split(step), strict=True):
            for rank, slot in enumerate(slots):
                addend = mine if rank == self._rank else self._part(rank, slot, own.nbytes, start, mine)
                piece.add_(addend) if rank else piece.copy_(addend)
            start += piece.nbytes
        return total

    def _part(self, rank: int, slot: int, nbytes: int, start: int, like: Tensor) -> Tensor:
        """Of the part for this rank, of ``nbytes``, in a message of ``rank``: what begins at byte ``start``."""
        start += nbytes * (self._rank - (self._rank > rank))  # it has none for itself
        if len(self._files) <= MAPPED:
            with suppress(OSError):  # no more file descriptors
                message = HEAD + nbytes * (len(self._files) - 1)
                memory = mapped(self._maps, (rank, slot), self._files[rank], message, slot * SLOT)
                return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=HEAD + start)
        part = torch.empty_like(like)
        self.read(rank, slot, start, part)
        return part

    def done(self, slots: Sequence[int]) -> None:
        """This rank reads no more of these messages, one of each rank; a slot of -1 was not received."""
        for region in {_IN_PLACE - slot for slot in slots if slot <= _IN_PLACE}:
            self._results.let_go(region)
        for file, slot in zip(self._files, slots, strict=True):
            if slot >= 0:
                os.pwrite(file, b"\1", slot * SLOT + self._rank)

    def _take_slot(self, size: int) -> int:
        """The smallest free slot that had such a message before; else the largest free one, or a new one."""
        sizes = {slot: had for slot, had in enumerate(self._sizes) if self._is_free(slot)}
        if fitting := [slot for slot, had in sizes.items() if had >= size]:
            return min(fitting, key=self._sizes.__getitem__)
        slot = max(sizes, key=self._sizes.__getitem__, default=len(self._sizes))
        self._sizes[slot : slot + 1] = [size]
        return slot

    def _is_free(self, slot: int) -> bool:
        all_done = b"\1" * len(self._files)
        return os.pread(self._files[self._rank], len(all_done), slot * SLOT) == all_done

    def __del__(self) -> None:
        close(self._files)


def open_shared_memory(rank: int, exchange: Callable[[bytes], list[bytes]]) -> SharedMemory | None:
    """Shared memory of all ranks, or ``None`` on all of them: where one cannot open the file of another one.

    Ranks of several hosts, or of containers that do not see each other's processes, have none.

    Args:
        rank: this process's place among them.
        exchange: gives what each rank passed to it, ``ADDRESS`` bytes each; called on all ranks alike.
    """
    own, address = _new_file()
    files = _open_files(rank, own, exchange(address.ljust(ADDRESS)))
    if _on_all_ranks(files is not None, exchange) and files:  # now all are open
        return SharedMemory(rank, files, _file_of_results(rank, exchange))
    close(files or [own])
    return None


def _new_file() -> tuple[int, bytes]:
    """A file in memory, in no folder: it ends when the last process closes it, however that process ends."""
    try:
        name = token_hex(16)
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not on this system
        return -1, b""
    return file, f"{os.getpid()} {file} {name}".encode()


def _open_files(rank: int, own: int, addresses: Sequence[bytes]) -> list[int] | None:
    """The files at these addresses, of which this rank has its own; or none of them."""
    files: list[int] = []
    try:
        for other, address in enumerate(addresses):
            files.append(own if other == rank else _open_file(address))
    except (OSError, ValueError):
        files.append(-1)
    if -1 not in files:
        return files
    close([file for file in files if file != own])
    return None


def _file_of_results(rank: int, exchange: Callable[[bytes], list[bytes]]) -> int:
    """A file that all ranks have open; or -1 on all of them."""
    own, address = _new_file() if rank == 0 else (-1, b"")
    first, *_ = exchange(address.ljust(ADDRESS))
    file = own
    with suppress(OSError, ValueError):
        file = own if rank == 0 else _open_file(first)
    if _on_all_ranks(file >= 0, exchange):
        return file
    close([file])
    return -1


def _on_all_ranks(here: bool, exchange: Callable[[bytes], list[bytes]]) -> bool:
    return all(answer.strip() for answer in exchange((b"here" if here else b"").ljust(ADDRESS)))


def _open_file(address: bytes) -> int:
    process, file, name = address.decode().split()
    path = f"/proc/{process}/fd/{file}"
    if os.readlink(path) != f"/memfd:{name} (deleted)":  # a process of another host has that number here
        raise OSError(f"{path} is not the file {name}")
    return os.open(path, os.O_RDWR)


def _each_byte(call: Callable[..., int], file: int, x: Tensor, offset: int) -> int:
    """Move all bytes of ``x`` by calls that may stop early, as Linux does after 2 GB."""
    assert x.is_contiguous()
    memory, moved = memoryview((c_char * x.nbytes).from_address(x.data_ptr())).cast("B"), 0
    while moved < x.nbytes:
        count = call(file, [memory[moved:]], offset + moved)
        if count == 0:
            raise EOFError(f"a message ends after {moved} bytes, where {x.nbytes} were expected")
        moved += count
    return moved
