"""All-gathers of one host whose result is one memory of all ranks: each writes its part of it.

Used by ``gloo`` for results that are freed soon. A rank copies its own part alone, where messages through
``shared_memory`` are written, read and laid side by side.

Note [Regions]: a result is in a region of a file that all ranks have open and mapped. The file begins with a table: how
many regions there are, and of each the number of the collective whose result is there, its bytes, and one byte for each
rank.

1. The first rank that issues a collective chooses a region that all ranks have let go, or a new one, and enters the
   number. Whoever comes later finds it there. Each looks and enters under a lock, which ends with the process.
2. Each rank writes its part, and sends the number of the region to all ranks over the process group.
3. A rank that received it from all ranks maps the result: privately, so that a page is copied when somebody writes to
   it, and each rank has its own changes. When the result is freed there, the rank sets its byte to 1.

No rank waits for another one here: if no region is free, there is a new one, or from ``MAX_REGIONS`` on none, and then
a rank sends a message as it would otherwise; ranks may differ in that. Memory of a region that was not used for long is
given back by a later choice. As in Note [Slots], each step is a system call after the step before it.

Maps are kept for the next result of their region, as the first reads of a new one cost half as much as a copy; not if a
page was copied, which would hide what is written then. A process that is forked has what its parent has: all pages of
results are copied before that.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_char
from math import prod
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

REGION = 1 << 40  # bytes from one region to the next, and for the table before them: more than any result has
MAX_REGIONS = 64  # each takes two file descriptors
LONG = 1000  # collectives
_PRESENT, _SWAPPED, _OF_FILE = -(1 << 63), 1 << 62, 1 << 61  # bits of pagemap
_COUNT = struct.Struct("q")
_LOCK = struct.Struct("hhqqi4x")  # struct flock


class SharedResults:
    """Regions of one axis, in a file that all of its ranks have open; or in none, which is -1."""

    def __init__(self, rank: int, size: int, file: int) -> None:
        self._rank, self._size, self._process, self.file = rank, size, os.getpid(), file
        finalize(self, close, [file]).atexit = False
        self._entry = struct.Struct(f"qq{size}s")  # number of the collective, bytes, who has let go
        self._written: dict[int, mmap.mmap] = {}
        self._private: dict[int, mmap.mmap] = {}
        self._held: set[int] = set()
        _ALL.add(self)

    def write(self, number: int, x: Tensor, dtype: torch.dtype) -> int | None:
        """Write ``x`` in ``dtype`` as this rank's part of the result of collective ``number``; its region, if any."""
        if self.file < 0:
            return None
        nbytes = x.numel() * dtype.itemsize
        with suppress(OSError):  # the system has no such locks, or no more file descriptors
            region = self._region_of(number, nbytes * self._size)
            if region is not None:
                _view(self._map(region, nbytes * self._size), x.shape, dtype, nbytes * self._rank).copy_(x)
            return region
        return None

    def rows(self, region: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The parts of all ranks, stacked, until they are freed; ``None`` if they cannot be mapped."""
        with suppress(OSError):
            memory = memoryview(self._private_map(region, prod(shape) * dtype.itemsize * self._size))
            finalize(memory, self.let_go, region).atexit = False
            self._held.add(region)
            return _view(memory, (self._size, *shape), dtype, 0)
        return None

    def let_go(self, region: int) -> None:
        """This rank needs the result no more. Called by the garbage collector too, and so anywhere."""
        self._held.discard(region)
        if self._process == os.getpid():
            os.pwrite(self.file, b"\1", self._place(region) + self._entry.size - self._size + self._rank)

    def start(self, region: int) -> int:
        """Where the first part of a result is in the file."""
        return (region + 1) * REGION

    def copy_pages(self) -> None:
        """Copy what this rank has of results, as if it had written to them."""
        for region in [*self._held]:
            torch.frombuffer(self._private[region], dtype=torch.uint8)[:: mmap.PAGESIZE].bitwise_or_(0)

    def _region_of(self, number: int, nbytes: int) -> int | None:
        try:  # a signal handler may raise at any call, also at those of a context manager
            self._lock()
            return self._choose(number, nbytes)
        finally:
            try:
                self._unlock()
            except BaseException:  # before it was unlocked: other ranks would wait for ever
                self._unlock()
                raise

    def _lock(self) -> None:
        import fcntl  # not on Windows, where no memory is shared either

        fcntl.fcntl(self.file, fcntl.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))

    def _unlock(self) -> None:
        import fcntl

        fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))

    def _choose(self, number: int, nbytes: int) -> int | None:
        entries = self._entries()
        for region, (owner, length, _) in enumerate(entries):
            if owner == number and length >= nbytes:  # else ranks differ, and will find out
                return region
        free = {region: length for region, (_, length, let_go) in enumerate(entries) if all(let_go)}
        region = _chosen(free, nbytes, len(entries))
        if region == MAX_REGIONS:
            return None
        self._enter(region, number, max(nbytes, free.pop(region, 0)), len(entries))
        for old in (old for old, length in free.items() if length and entries[old][0] < number - LONG):
            self._give_back(old, *entries[old])
        return region

    def _enter(self, region: int, number: int, length: int, count: int) -> None:
        os.pwrite(self.file, b"\0", self.start(region) + length - 1)  # the file is as long
        os.pwrite(self.file, self._entry.pack(number, length, bytes(self._size)), self._place(region))
        os.pwrite(self.file, _COUNT.pack(max(region + 1, count)), 0)

    def _give_back(self, region: int, number: int, length: int, let_go: bytes) -> None:
        with suppress(OSError):
            self._map(region, length).madvise(mmap.MADV_REMOVE)
            os.pwrite(self.file, self._entry.pack(number, 0, let_go), self._place(region))

    def _entries(self) -> list[tuple[int, int, bytes]]:
        (count,) = _COUNT.unpack(os.pread(self.file, _COUNT.size, 0) or bytes(_COUNT.size))
        return [*self._entry.iter_unpack(os.pread(self.file, count * self._entry.size, self._place(0)))]

    def _map(self, region: int, nbytes: int) -> mmap.mmap:
        """For what this rank writes."""
        return mapped(self._written, region, self.file, nbytes, self.start(region))

    def _private_map(self, region: int, nbytes: int) -> mmap.mmap:
        """For what this rank reads: writes to it are seen by nobody else."""
        kept = self._private.get(region)
        if kept is None or len(kept) < nbytes or _may_have_copies(kept):
            kept = mmap.mmap(self.file, nbytes, flags=mmap.MAP_PRIVATE, offset=self.start(region))
            self._private[region] = kept
        return kept

    def _place(self, region: int) -> int:
        """Where the table has its entry."""
        return _COUNT.size + region * self._entry.size


def _chosen(free: Mapping[int, int], nbytes: int, count: int) -> int:
    """The smallest region that is large enough; else the largest one, or a new one."""
    if fitting := [region for region, length in free.items() if length >= nbytes]:
        return min(fitting, key=free.__getitem__)
    return max(free, key=free.__getitem__, default=count)


def _view(memory: mmap.mmap | memoryview, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)


def _may_have_copies(memory: mmap.mmap) -> bool:
    """Whether pages of a private map may have been written to: see pagemap in proc(5)."""
    first = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() // mmap.PAGESIZE
    entries = torch.zeros(-(-len(memory) // mmap.PAGESIZE), dtype=torch.int64)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(8 * first)
            pagemap.readinto((c_char * entries.nbytes).from_address(entries.data_ptr()))
    except OSError:
        return True
    there = entries.bitwise_and(_PRESENT | _SWAPPED) != 0
    return not there.any() or bool((there & (entries.bitwise_and(_OF_FILE) == 0)).any())


def _before_fork() -> None:
    for results in [*_ALL]:
        results.copy_pages()


def mapped(maps: dict[Any, mmap.mmap], key: Any, file: int, nbytes: int, offset: int) -> mmap.mmap:
    """The map in ``maps``, of so many bytes of ``file`` at least."""
    if key not in maps or len(maps[key]) < nbytes:
        maps[key] = mmap.mmap(file, nbytes, offset=offset)
    return maps[key]


def close(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


_ALL: WeakSet[SharedResults] = WeakSet()  # of this process, whose fork concerns all of them
os.register_at_fork(before=_before_fork)
