"""Messages in memory files: what was written is read, and nothing is overwritten that somebody may still read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from functorch_shard.communication import shared_memory
from functorch_shard.communication.shared_memory import ADDRESS, HEAD, PIECE, SLOT, SharedMemory, open_shared_memory

DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int16,
    torch.bool,
]
SIZES = [(), (1,), (3, 7), (PIECE // 2 + 1,)]


def exchanges(num_ranks: int) -> list[Callable[[bytes], list[bytes]]]:
    """What a process group does for ``open_shared_memory``, between threads."""
    barrier, messages = Barrier(num_ranks, timeout=60), [b""] * num_ranks

    def exchange(rank: int, message: bytes) -> list[bytes]:
        assert len(message) == ADDRESS
        messages[rank] = message
        barrier.wait()
        result = list(messages)
        barrier.wait()
        return result

    return [lambda message, rank=rank: exchange(rank, message) for rank in range(num_ranks)]


def open_everywhere(num_ranks: int) -> list[SharedMemory | None]:
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(open_shared_memory, range(num_ranks), exchanges(num_ranks)))


def memories(num_ranks: int) -> list[SharedMemory]:
    return [memory for memory in open_everywhere(num_ranks) if memory is not None]


def open_files() -> set[str]:
    return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


def memory_of(memory: SharedMemory, rank: int) -> int:
    return 512 * os.stat(memory._files[rank]).st_blocks


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    drawn = 10 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_reads_what_every_rank_wrote(num_ranks: int, dtype: torch.dtype) -> None:
    ranks = memories(num_ranks)
    for i, shape in enumerate(SIZES):
        sent = [values(shape, dtype, 100 * i + rank) for rank in range(num_ranks)]
        slots = [memory.write([x]) for memory, x in zip(ranks, sent, strict=True)]
        for rank, memory in enumerate(ranks):
            for own in (None, sent[rank]):
                assert same_bytes(memory.read_rows(slots, shape, dtype, own), torch.stack(sent))
            memory.done(slots)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_are_in_rank_order_on_every_rank(num_ranks: int, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAPPED", num_ranks if mapped else num_ranks - 1)
    ranks = memories(num_ranks)
    numel = PIECE // 4 * 2 + 3  # two pieces and a bit
    operands = [values((num_ranks, numel), torch.float32, rank) for rank in range(num_ranks)]
    slots = [memory.write([x[:i], x[i + 1 :]]) for i, (memory, x) in enumerate(zip(ranks, operands, strict=True))]
    for rank, memory in enumerate(ranks):
        parts = [x[rank] for x in operands]
        assert torch.equal(memory.read_sum(slots, parts[rank]), reduce(torch.add, parts))
        if num_ranks > 2:
            assert not torch.equal(reduce(torch.add, parts), reduce(torch.add, parts[::-1]))
        assert bool(memory._maps) == mapped


def test_sums_are_right_where_nothing_more_can_be_mapped() -> None:
    ranks = memories(2)
    slots = [memory.write([torch.full((5,), rank)]) for rank, memory in enumerate(ranks)]
    with patch.object(mmap, "mmap", side_effect=OSError):
        assert ranks[0].read_sum(slots, torch.ones(5, dtype=torch.int64)).tolist() == [2] * 5


def test_sums_of_any_size_are_right_in_a_slot_that_had_others() -> None:
    ranks = memories(2)
    for numel in (1000, 10, 5000, 1, 5001):
        slots = [memory.write([torch.full((numel,), rank + numel)]) for rank, memory in enumerate(ranks)]
        for memory in ranks:
            assert memory.read_sum(slots, torch.ones(numel, dtype=torch.int64)).eq(2 + numel - memory._rank).all()
            memory.done(slots)


def test_a_slot_is_taken_again_when_every_rank_is_done_with_it_and_no_earlier() -> None:
    for last in range(3):
        ranks = memories(3)
        slots = [memory.write([torch.ones(5)]) for memory in ranks]
        assert slots == [0, 0, 0]
        for memory in [*ranks[:last], *ranks[last + 1 :]]:
            memory.done(slots)
        assert ranks[0].write([torch.full((5,), 2.0)]) == 1
        assert ranks[last].read_rows([0] * 3, (5,), torch.float32, None).eq(1).all()
        ranks[last].done(slots)
        assert ranks[0].write([torch.full((5,), 3.0)]) == 0
        assert ranks[0].write([torch.full((5,), 4.0)]) == 2


def test_messages_that_are_unread_stay_as_they_are() -> None:
    writer, reader = memories(2)
    sent = [values((1000 + i,), torch.float32, i) for i in range(20)]
    slots = [writer.write([x]) for x in sent]
    assert slots == list(range(20))
    for i in torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist():
        into = torch.empty_like(sent[i])
        reader.read(0, slots[i], 0, into)
        assert torch.equal(into, sent[i])


def test_memory_is_that_of_the_largest_messages_unread_at_once() -> None:
    ranks, message = memories(2), torch.ones(1 << 18)
    for _ in range(50):
        slots = [[memory.write([message]) for _ in range(2)] for memory in ranks]
        for memory in ranks:
            for pair in zip(*slots, strict=True):
                memory.done(pair)
    assert memory_of(ranks[0], 0) <= 2 * (message.nbytes + HEAD)
    assert memory_of(ranks[0], 1) == memory_of(ranks[1], 1)


def test_a_message_goes_where_one_of_its_size_has_been() -> None:
    (memory,) = memories(1)
    small, large = torch.ones(100), torch.ones(1 << 16)
    slots = [memory.write([x]) for x in (large, small, large)]
    assert slots == [0, 1, 2]
    for slot in slots:
        memory.done([slot])
    assert [memory.write([x]) for x in (small, large, large)] == [1, 0, 2]
    memory.done([1])
    before = memory_of(memory, 0)
    assert memory.write([large]) == 1  # rather than a fourth
    assert before < memory_of(memory, 0) <= 3 * (large.nbytes + HEAD)


def test_a_slot_that_was_not_received_is_not_marked() -> None:
    ranks = memories(2)
    ranks[1].write([torch.ones(3)])
    ranks[0].done([-1, 0])
    assert os.pread(ranks[0]._files[0], 2, 0) == b""
    assert os.pread(ranks[0]._files[1], 2, 0) == b"\1\0"


def test_messages_move_whole_when_the_system_stops_early() -> None:
    def early(call: Callable[..., int]) -> Callable[..., int]:
        return lambda file, buffers, offset: call(file, [buffers[0][:13]], offset)

    writer, reader = memories(2)
    sent, into = values((101,), torch.float32, 0), torch.zeros(101)
    with patch.object(os, "pwritev", early(os.pwritev)), patch.object(os, "preadv", early(os.preadv)):
        reader.read(0, writer.write([sent[:50], sent[50:]]), 0, into)
    assert torch.equal(sent, into)


def test_a_message_that_ends_too_early_is_an_error() -> None:
    writer, reader = memories(2)
    slot = writer.write([torch.ones(4)])
    with pytest.raises(EOFError, match="ends after 16 bytes, where 20 were expected"):
        reader.read(0, slot, 0, torch.empty(5))


def test_slots_are_as_far_apart_as_the_largest_file_allows() -> None:
    (memory,) = memories(1)
    os.pwrite(memory._files[0], b"x", 1000 * SLOT)  # the file may be as long; what is between takes no memory
    assert memory_of(memory, 0) == 4096


def test_files_have_no_name_and_end_with_their_last_reader() -> None:
    before, in_folders = open_files(), set(os.listdir("/dev/shm"))
    ranks = memories(2)
    ranks[0].write([torch.ones(1000)])
    assert set(os.listdir("/dev/shm")) == in_folders
    assert len(open_files() - before) == 3  # of each rank, and of their results
    del ranks
    assert open_files() == before


def _no_file(*_: Any) -> int:
    raise OSError("no memory files here")


def _another_name(*_: Any) -> str:
    return "/memfd:another (deleted)"


@pytest.mark.parametrize(
    ("name", "fails"),
    [("memfd_create", _no_file), ("readlink", _another_name), ("open", _no_file)],
    ids=["memfd_create", "readlink", "open"],
)
def test_no_rank_has_shared_memory_where_one_cannot_open_the_files_of_others(name: str, fails: Any) -> None:
    before = open_files()
    works, calls = getattr(os, name), []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        return (fails if len(calls) == 2 else works)(*args)

    with patch.object(os, name, fails_once):
        assert open_everywhere(3) == [None] * 3
    assert len(calls) > 1
    assert open_files() == before


def test_a_file_of_another_process_with_the_same_number_is_not_opened() -> None:
    reading, writing = os.pipe()
    foreign = f"{os.getpid()} {writing} {'0' * 32}".encode().ljust(ADDRESS)
    before = open_files()
    with patch.object(os, "open", _no_file):
        assert open_shared_memory(0, lambda message: [message, foreign]) is None
    assert open_files() == before
    os.close(reading)
    os.close(writing)


def test_without_memory_files_there_is_no_shared_memory() -> None:
    with patch.object(os, "memfd_create", side_effect=AttributeError):
        assert open_everywhere(2) == [None, None]
