"""All-gathers of one host whose result is one memory of all ranks: each writes its part of it.

Used by ``gloo`` for results that are only read. A rank copies its own part alone, where messages through
``shared_memory`` are written, read and laid side by side.

Note [Regions]: a result is in a region of a file that all ranks have open and mapped. The file begins with a table: how
many regions there are, and of each the number of the collective whose result is there, its bytes, and one byte for each
rank.

1. The first rank that issues a collective chooses a region that all ranks have let go, or a new one, and enters the
   number. Whoever comes later finds it there. Each looks and enters under a lock, which ends with the process.
2. Each rank writes its part, and sends the number of the region to all ranks over the process group.
3. A rank that received it from all ranks has the result. When it is freed there, the rank sets its byte to 1.

No rank waits for another one here: if no region is free, there is a new one, or from ``MAX_REGIONS`` on none, and then
a rank sends a message as it would otherwise; ranks may differ in that. Memory of a region that was not used for long is
given back. As in Note [Slots], each step is a system call after the step before it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from weakref import finalize

import torch
from torch import Tensor

REGION = 1 << 40  # bytes from one region to the next, and for the table before them: more than any result has
MAX_REGIONS = 64  # each takes a file descriptor
LONG = 1000  # collectives
_COUNT = struct.Struct("q")
_LOCK = struct.Struct("hhqqi4x")  # struct flock


class SharedResults:
    """Regions of one axis, in a file that all of its ranks have open; -1 if this one does not."""

    def __init__(self, rank: int, size: int, file: int) -> None:
        self._rank, self._size, self._file, self._process = rank, size, file, os.getpid()
        finalize(self, close, [file]).atexit = False
        self._entry = struct.Struct(f"qq{size}s")  # number of the collective, bytes, who has let go
        self._maps: dict[int, mmap.mmap] = {}
        self._can_choose = self._has_locks_and_maps()

    def write(self, number: int, x: Tensor, dtype: torch.dtype) -> int | None:
        """Write ``x`` in ``dtype`` as this rank's part of the result of collective ``number``; its region, if any."""
        region = self._region_of(number, x.numel() * dtype.itemsize * self._size) if self._can_choose else None
        if region is not None:
            self.part(region, self._rank, x.shape, dtype).copy_(x)
        return region

    def part(self, region: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The part of ``rank``, for a moment."""
        nbytes = prod(shape) * dtype.itemsize
        return _view(self._map(region, nbytes * self._size), shape, dtype, nbytes * rank)

    def rows(self, region: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The parts of all ranks, stacked, until they are freed; they must not be written to."""
        memory = memoryview(self._map(region, prod(shape) * dtype.itemsize * self._size))
        finalize(memory, self.let_go, region).atexit = False
        return _view(memory, (self._size, *shape), dtype, 0)

    def let_go(self, region: int) -> None:
        """This rank needs the result no more. Called by the garbage collector too, and so anywhere."""
        if self._process == os.getpid():
            os.pwrite(self._file, b"\1", self._place(region) + self._entry.size - self._size + self._rank)

    def _region_of(self, number: int, nbytes: int) -> int | None:
        with self._locked():
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
        os.pwrite(self._file, b"\0", self._start(region) + length - 1)  # the file is as long
        os.pwrite(self._file, self._entry.pack(number, length, bytes(self._size)), self._place(region))
        os.pwrite(self._file, _COUNT.pack(max(region + 1, count)), 0)

    def _give_back(self, region: int, number: int, length: int, let_go: bytes) -> None:
        with suppress(OSError):
            self._map(region, length).madvise(mmap.MADV_REMOVE)
            os.pwrite(self._file, self._entry.pack(number, 0, let_go), self._place(region))

    def _entries(self) -> list[tuple[int, int, bytes]]:
        (count,) = _COUNT.unpack(os.pread(self._file, _COUNT.size, 0) or bytes(_COUNT.size))
        return [*self._entry.iter_unpack(os.pread(self._file, count * self._entry.size, self._place(0)))]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on Windows, where no memory is shared either

        def lock(command: int, kind: int) -> None:
            fcntl.fcntl(self._file, command, _LOCK.pack(kind, os.SEEK_SET, 0, 1, 0))

        try:
            lock(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK)
            yield
        finally:
            lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK)

    def _has_locks_and_maps(self) -> bool:
        """Some sandboxes have no such locks, or no files of this size."""
        try:
            with self._locked():
                os.pwrite(self._file, os.pread(self._file, _COUNT.size, 0) or bytes(_COUNT.size), 0)
                mmap.mmap(self._file, _COUNT.size).close()
        except (OSError, ValueError, AttributeError):
            return False
        return True

    def _map(self, region: int, nbytes: int) -> mmap.mmap:
        if region not in self._maps or len(self._maps[region]) < nbytes:
            self._maps[region] = mmap.mmap(self._file, nbytes, offset=self._start(region))
        return self._maps[region]

    def _place(self, region: int) -> int:
        """Where the table has its entry."""
        return _COUNT.size + region * self._entry.size

    def _start(self, region: int) -> int:
        return (region + 1) * REGION


def _chosen(free: Mapping[int, int], nbytes: int, count: int) -> int:
    """The smallest region that is large enough; else the largest one, or a new one."""
    if fitting := [region for region, length in free.items() if length >= nbytes]:
        return min(fitting, key=free.__getitem__)
    return max(free, key=free.__getitem__, default=count)


def _view(memory: mmap.mmap | memoryview, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)


def close(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)
