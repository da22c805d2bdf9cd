"""Regions of a file that all ranks have open: Note [Regions] in shared_memory.py."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from functorch_shard.gloo.shared_memory import ADDRESS, SharedMemory, open_shared_memory

MB = 1 << 18  # elements of float32


def memories(num_ranks: int) -> list[SharedMemory]:
    """Those of ranks that are threads; none where one cannot open it."""
    barrier, messages = Barrier(num_ranks, timeout=60), [b""] * num_ranks

    def open_here(rank: int) -> SharedMemory | None:
        def exchange(message: bytes) -> list[bytes]:
            assert len(message) == ADDRESS
            messages[rank] = message
            barrier.wait()
            result = list(messages)
            barrier.wait()
            return result

        return open_shared_memory(rank, num_ranks, exchange)

    with ThreadPoolExecutor(num_ranks) as threads:
        opened = [*threads.map(open_here, range(num_ranks))]
    assert len({memory is None for memory in opened}) == 1
    return [memory for memory in opened if memory is not None]


def gathered(ranks: list[SharedMemory], number: int, numel: int = 5, keep: bool = True) -> list[Tensor]:
    """What each rank has of the parts of all, rank r's of numbers ``10 number + r``, all written before one reads."""
    regions = [rank.take(number, 4 * numel * len(ranks)) for rank in ranks]
    for i, region in enumerate(regions):
        region.write(torch.full((numel,), 10.0 * number + i), 4 * numel * i)
    return [region.read(keep).view(torch.float32).view(len(ranks), numel) for region in regions]


def is_right(result: Tensor, number: int) -> bool:
    return result.eq(10 * number + torch.arange(float(len(result)))[:, None]).all().item() is True


def held_by(rank: SharedMemory) -> int:
    """Bytes of memory that the file takes, but for its table."""
    return 512 * os.fstat(rank.file).st_blocks - mmap.PAGESIZE


def owners(rank: SharedMemory) -> list[int]:
    return [owner for owner, *_ in rank._entries()]


def test_what_a_rank_writes_to_a_result_no_other_rank_and_no_later_result_has() -> None:
    ranks = memories(2)
    for number in range(1, 10):
        first, second = gathered(ranks, number, mmap.PAGESIZE)
        assert is_right(first, number)
        first[number % 2, number * 10] = 1e6
        assert is_right(second, number)
        del first, second
    assert len(owners(ranks[0])) == 1


def test_a_region_is_taken_again_when_every_rank_has_freed_the_result_and_no_earlier() -> None:
    for last in range(3):
        ranks = memories(3)
        kept = gathered(ranks, 1)[last].flatten()[4:6]  # a view keeps it too
        other = gathered(ranks, 2)
        assert (owners(ranks[0]), kept.tolist()) == ([1, 2], [10, 11])
        del kept
        again = gathered(ranks, 3)
        assert owners(ranks[0]) == [3, 2]
        assert is_right(other[0], 2)
        assert is_right(again[0], 3)
        del again, other
        [gathered(ranks, 4), gathered(ranks, 5)].clear()
        gathered(ranks, 6)
        assert owners(ranks[0]) == [6, 5]  # of equal ones the first, as in the step before


def test_regions_that_are_used_in_turn_keep_their_memory_and_others_give_it_back() -> None:
    ranks, nbytes = memories(2), 2 * 4 * MB
    for first in range(1, 60, 20):  # a step each: ten units that stay from forward to backward
        whole = [gathered(ranks, number, MB) for number in range(first, first + 10)]
        for number in range(first + 10, first + 20):
            assert all(is_right(result, 2 * first + 19 - number) for result in whole.pop())
            gathered(ranks, number, MB)
            assert held_by(ranks[0]) == 10 * nbytes
    for numbers, numel, held in (range(61, 83), MB, nbytes), (range(83, 90), 5, mmap.PAGESIZE):
        for number in numbers:
            assert all(is_right(result, number) for result in gathered(ranks, number, numel))
        assert held_by(ranks[0]) == held
    many = [gathered(ranks, number, MB) for number in range(200, 220)]
    assert all(is_right(result, 200 + i) for i, results in enumerate(many) for result in results)


def test_messages_are_read_where_they_are_until_every_rank_has_freed_them() -> None:
    ranks = memories(2)
    for number in range(1, 9):
        assert all(is_right(messages, number) for messages in gathered(ranks, number, keep=False))
        for rank in ranks:
            assert owners(ranks[0]) == [number]
            rank.free(0)


def test_a_result_that_cannot_be_mapped_is_read() -> None:
    ranks = memories(2)
    with patch.object(mmap, "mmap", side_effect=OSError):  # no more file descriptors
        results = gathered(ranks, 1)
    gathered(ranks, 2)
    assert owners(ranks[0]) == [2]
    assert all(is_right(result, 1) for result in results)


@pytest.mark.parametrize(("name", "number"), [("open", 1), ("memfd_create", 0), ("readlink", 0)])
def test_no_rank_has_shared_memory_where_one_cannot_open_it(name: str, number: int) -> None:
    real, calls, before = getattr(os, name), count(), {*os.listdir("/proc/self/fd")}

    def fails_once(*args: Any) -> Any:
        if next(calls) == number:
            raise OSError("not here")
        return real(*args)

    with patch.object(os, name, fails_once):
        assert memories(3) == []
    assert {*os.listdir("/proc/self/fd")} <= before


def test_ranks_that_choose_at_the_same_time_choose_the_same_region() -> None:
    with ThreadPoolExecutor(4) as threads:
        choose: Any = lambda rank: [rank.take(number, 20)._place for number in range(1, 50)]  # noqa: E731
        first, *others = threads.map(choose, memories(4))
    assert len({*first}) == 49
    assert others == [first] * 3


def test_a_forked_process_has_what_its_parent_had_and_frees_nothing_of_it() -> None:
    ranks = memories(2)
    results = gathered(ranks, 1)
    reader, writer = os.pipe()
    if not os.fork():
        os.read(reader, 1)  # until the region has other numbers
        os._exit(is_right(results[0], 1) and is_right(results[1], 1))
    results.clear()
    second = gathered(ranks, 2)
    os.write(writer, b"1")
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    assert (owners(ranks[0]), is_right(second[0], 2)) == ([2], True)
    if not os.fork():
        second.clear()
        os._exit(0)
    os.wait()
    gathered(ranks, 3)
    assert is_right(second[0], 2)
