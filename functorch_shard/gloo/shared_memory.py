"""Large messages between processes of one host: a file in memory that all ranks have open.

Note [Regions]: a collective is in one region of the file. The file begins with a table: how many regions there are, and
of each the number of the collective whose messages are there, its bytes, and one byte for each rank.

1. The first rank that issues a collective chooses a region that all ranks have freed, or a new one, and enters the
   number. The others find it there. Each looks and enters under a lock of the file, which ends with the process.
2. Each rank writes its own part, and sends an envelope (Note [Envelopes] in backend.py).
3. A rank that has the envelopes of all reads the messages. Where they are the result as they are, its memory is a
   private map of the region: a page is copied when it is written to, so each rank has its own changes.
4. When that map is freed, or the result is complete in other memory, the rank sets its byte to 1.

No rank waits for another one here, and no region is written to before all ranks have freed it: each step comes after
the step before it, in the same process or after a message from it, and sees what that one wrote. Fresh memory, and a
new map of it, cost more than the copy itself. So a process keeps the maps that it writes and reads through, and a freed
region keeps its memory for twice as many collectives as there are regions: a step may use each in forward and backward.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, c_char, memmove
from functools import lru_cache
from secrets import token_hex
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor

REGION = 1 << 40  # bytes from one region to the next, and for the table before them: more than any result has
MAPS = 64  # of regions, shared by all ranks, that a process keeps
ADDRESS = 64  # bytes of an address: a process, a file of it, and a name that no other file has
_COUNT = struct.Struct("q")


class Region:
    """Where the messages of one collective are, until this rank frees it."""

    def __init__(self, memory: SharedMemory, place: int, nbytes: int) -> None:
        self._memory, self._place, self._nbytes, self._held = memory, place, nbytes, True

    def write(self, x: Tensor, offset: int) -> None:
        """Write the bytes of ``x``, which is contiguous."""
        try:
            shared = self._memory.map(self._place, self._nbytes)
        except OSError:  # no more file descriptors
            _each_byte(os.pwritev, self._memory.file, x, _start(self._place) + offset)
        else:
            memmove(addressof(c_char.from_buffer(shared)) + offset, x.data_ptr(), x.nbytes)

    def read(self, keep: bool) -> Tensor:
        """The bytes of all ranks, to be read until :meth:`free`; or with ``keep`` this rank's own, which free it."""
        memory, file, start = self._memory, self._memory.file, _start(self._place)
        try:
            if not keep:
                return torch.frombuffer(memory.map(self._place, self._nbytes), dtype=torch.uint8)
            private = memoryview(mmap.mmap(file, self._nbytes, flags=mmap.MAP_PRIVATE, offset=start))
        except OSError:
            copy = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
            _each_byte(os.preadv, file, copy, start)
            self.free()
            return copy
        finalize(private, self.free).atexit = False
        memory.mapped[self._place] = private
        return torch.frombuffer(private, dtype=torch.uint8)

    def free(self) -> None:
        """This rank reads no more of it. Called by the garbage collector too, and so anywhere."""
        if self._held:
            self._held = False
            self._memory.free(self._place)


class SharedMemory:
    """The file of the ranks of one axis, which this process has open; it ends with the last process that has it."""

    def __init__(self, rank: int, size: int, file: int) -> None:
        self._rank, self._size, self._process, self.file = rank, size, os.getpid(), file
        self._entry = struct.Struct(f"qq{size}s")  # number of the collective, bytes, who has freed it
        self.mapped: WeakValueDictionary[int, memoryview] = WeakValueDictionary()  # results, by place
        self.map = lru_cache(MAPS)(lambda place, nbytes: mmap.mmap(file, nbytes, offset=_start(place)))
        finalize(self, os.close, file).atexit = False
        this = ref(self)  # a forked process has what its parent has: all pages are copied before that
        os.register_at_fork(before=lambda: None if (memory := this()) is None else memory._copy_pages())

    def take(self, number: int, nbytes: int) -> Region:
        """The region of collective ``number``, the same on all ranks."""
        import fcntl  # not on Windows, where no memory is shared either

        try:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            return Region(self, self._choose(number, nbytes), nbytes)
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def free(self, place: int) -> None:
        if self._process == os.getpid():
            os.pwrite(self.file, b"\1", self._entry_of(place + 1) - self._size + self._rank)

    def _choose(self, number: int, nbytes: int) -> int:
        entries = self._entries()
        for place, (owner, *_) in enumerate(entries):
            if owner == number:  # if ranks differ in the size, they will find out
                return place
        free = {place: length for place, (_, length, freed) in enumerate(entries) if all(freed)}
        near = {place: length for place, length in free.items() if length <= 4 * nbytes}  # larger ones are left idle
        # Of equal ones the first: each step takes them in one order, and none waits so long that it gives memory back.
        place = min(near, key=lambda place: (near[place] < nbytes, abs(near[place] - nbytes)), default=len(entries))
        length = max(free.pop(place, 0), nbytes)
        os.pwrite(self.file, self._entry.pack(number, length, bytes(self._size)), self._entry_of(place))
        os.pwrite(self.file, _COUNT.pack(max(place + 1, len(entries))), 0)
        longest = 2 * sum(length > 0 for _, length, _ in entries)
        for idle, held in free.items():
            owner, _, freed = entries[idle]
            if held and number - owner > longest:
                with suppress(OSError), mmap.mmap(self.file, held, offset=_start(idle)) as memory:
                    memory.madvise(mmap.MADV_REMOVE)
                os.pwrite(self.file, self._entry.pack(owner, 0, freed), self._entry_of(idle))
        return place

    def _entries(self) -> list[tuple[int, int, bytes]]:
        (count,) = _COUNT.unpack(os.pread(self.file, _COUNT.size, 0))
        return [*self._entry.iter_unpack(os.pread(self.file, count * self._entry.size, _COUNT.size))]

    def _entry_of(self, place: int) -> int:
        return _COUNT.size + place * self._entry.size

    def _copy_pages(self) -> None:
        for memory in [*self.mapped.values()]:
            torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].bitwise_or_(0)


def open_shared_memory(rank: int, size: int, exchange: Callable[[bytes], list[bytes]]) -> SharedMemory | None:
    """Shared memory of all ranks, or ``None`` on all of them: where one cannot open the file of the first one.

    Ranks of several hosts, or of containers that do not see each other's processes, have none.

    Args:
        rank: this process's place among ``size``.
        exchange: gives what each rank passed to it, ``ADDRESS`` bytes each; called on all ranks alike.
    """
    memory, address = None, b""
    with suppress(AttributeError, OSError, ValueError):  # not on this system
        if rank == 0:
            name = token_hex(16)
            file = os.memfd_create(name)  # in no folder: it ends when the last process closes it, however that ends
            memory = SharedMemory(rank, size, file)
            os.ftruncate(file, 1 << 62)  # takes no memory
            address = f"{os.getpid()} {file} {name}".encode()
    first, *_ = exchange(address.ljust(ADDRESS))
    if rank:
        with suppress(AttributeError, OSError, ValueError):
            process, file, name = first.decode().split()
            path = f"/proc/{process}/fd/{file}"
            if os.readlink(path) == f"/memfd:{name} (deleted)":  # or else a process of another host has that number
                memory = SharedMemory(rank, size, os.open(path, os.O_RDWR))
    is_everywhere = all(each.strip() for each in exchange((b"here" if memory else b"").ljust(ADDRESS)))
    return memory if is_everywhere else None


def _start(place: int) -> int:
    return (place + 1) * REGION


def _each_byte(call: Callable[..., int], file: int, x: Tensor, offset: int) -> None:
    """Move all bytes of ``x`` by calls that may stop early, as Linux does after 2 GB."""
    assert x.is_contiguous()
    memory, moved = memoryview((c_char * x.nbytes).from_address(x.data_ptr())).cast("B"), 0
    while moved < x.nbytes:
        count = call(file, [memory[moved:]], offset + moved)
        if count == 0:
            raise EOFError(f"a message ends after {moved} bytes, where {x.nbytes} were expected")
        moved += count
