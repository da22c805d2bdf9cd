"""Results that all ranks of a host have in one memory: Note [Regions] in shared_results.py."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from functorch_shard.communication import shared_results
from functorch_shard.communication.shared_memory import SharedMemory
from tests.communication.test_shared_memory import DTYPES, SIZES, memories, same_bytes, values


def gathered(ranks: list[SharedMemory], number: int, parts: list[Tensor]) -> list[Tensor]:
    """What each rank has of the parts of all, all of which write before one reads."""
    slots = [rank.write_in_place(number, x, x.dtype) for rank, x in zip(ranks, parts, strict=True)]
    assert None not in slots
    rows = [rank.rows_in_place(slots, parts[0].shape, parts[0].dtype) for rank in ranks]  # pyright: ignore[reportArgumentType]
    return [x for x in rows if x is not None]


def full(number: float, numel: int = 5) -> Tensor:
    return torch.full((numel,), float(number))


def memory_of(rank: SharedMemory) -> int:
    return 512 * os.fstat(rank._results.file).st_blocks


def regions(rank: SharedMemory) -> list[tuple[int, int, bytes]]:
    return rank._results._entries()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_has_what_every_rank_wrote(num_ranks: int, dtype: torch.dtype) -> None:
    ranks = memories(num_ranks)
    for i, shape in enumerate(SIZES):
        sent = [values(shape, dtype, 100 * i + rank) for rank in range(num_ranks)]
        results = gathered(ranks, i + 1, sent)
        assert len(results) == num_ranks
        assert all(same_bytes(result, torch.stack(sent)) for result in results)


def test_a_part_is_cast_and_conjugated_on_the_way() -> None:
    (rank,) = memories(1)
    x = values((7,), torch.complex128, 0).conj()
    slot = rank.write_in_place(1, x, torch.complex64)
    assert slot is not None
    rows = rank.rows_in_place([slot], x.shape, torch.complex64)
    assert rows is not None
    assert torch.equal(rows[0], x.resolve_conj().to(torch.complex64))


def test_what_a_rank_writes_to_a_result_no_other_rank_and_no_later_result_has() -> None:
    ranks, pages = memories(2), mmap.PAGESIZE
    for number in range(1, 20):
        results = gathered(ranks, number, [full(number, pages), full(-number, pages)])
        first, second = results
        assert first.equal(second)
        assert first[:, ::7].abs().eq(number).all()
        if number % 3 == 0:
            first[number % 2, number * 10] = 1e6
            assert second.abs().eq(number).all()
        del first, second
        results.clear()
    assert len(regions(ranks[0])) == 1


def test_a_map_is_kept_unless_it_may_have_copies_of_pages() -> None:
    ranks, kept = memories(2), list[mmap.mmap]()
    for number in range(1, 9):
        results = gathered(ranks, number, [full(number, 10_000)] * 2)
        assert results[0].eq(number).all()
        kept.append(ranks[0]._results._private[0])
        if number == 4:
            results[0][1, -1] = 7
        results.clear()
    assert len({*map(id, kept[:4])}) == len({*map(id, kept[4:])}) == 1
    assert kept[3] is not kept[4]
    with patch("builtins.open", side_effect=OSError):
        results = gathered(ranks, 10, [full(10)] * 2)
    assert ranks[0]._results._private[0] is not kept[-1]


def test_a_region_is_taken_again_when_every_rank_has_freed_the_result_and_no_earlier() -> None:
    for last in range(3):
        ranks = memories(3)
        results = gathered(ranks, 1, [full(1)] * 3)
        kept = results[last]
        results.clear()
        other = gathered(ranks, 2, [full(2)] * 3)
        assert kept.eq(1).all()
        assert [owner for owner, *_ in regions(ranks[0])] == [1, 2]
        del kept
        again = gathered(ranks, 3, [full(3)] * 3)
        assert [owner for owner, *_ in regions(ranks[0])] == [3, 2]
        assert other[0].eq(2).all()
        assert again[0].eq(3).all()


def test_a_view_keeps_the_result() -> None:
    ranks = memories(2)
    view = gathered(ranks, 1, [full(1), full(2)])[0].flatten()[4:6]
    gathered(ranks, 2, [full(3)] * 2)
    assert view.tolist() == [1, 2]


def test_a_rank_that_needs_no_result_lets_it_go_without_having_it() -> None:
    ranks = memories(2)
    slots = [rank.write_in_place(1, full(1), torch.float32) for rank in ranks]
    for rank in ranks:
        rank.done(slots)  # pyright: ignore[reportArgumentType]
    gathered(ranks, 2, [full(2)] * 2)
    assert len(regions(ranks[0])) == 1


def test_what_one_rank_wrote_in_place_and_another_one_as_a_message_is_read_by_both() -> None:
    ranks, parts = memories(2), [full(1), full(2)]
    in_place = ranks[0].write_in_place(1, parts[0], torch.float32)
    assert in_place is not None
    slots = [in_place, ranks[1].write([parts[1]])]
    for rank, own in zip(ranks, parts, strict=True):
        assert rank.rows_in_place(slots, (5,), torch.float32) is None
        for known in (own, None):
            assert torch.equal(rank.read_rows(slots, (5,), torch.float32, known), torch.stack(parts))
        rank.done(slots)
    gathered(ranks, 2, parts)
    assert len(regions(ranks[0])) == 1
    assert ranks[1].write([full(3)]) == slots[1]


def test_results_of_any_size_stay_as_they_are_until_they_are_freed_in_any_order() -> None:
    ranks, draw = memories(3), random.Random(0)
    held: list[list[tuple[int, Tensor]]] = [[], [], []]
    most = 0
    for number in range(1, 400):
        numel = draw.randrange(1, 5000)
        for rank, result in enumerate(gathered(ranks, number, [full(10 * number + r, numel) for r in range(3)])):
            held[rank].append((number, result))
        most = max(most, *map(len, held))
        for results in held:
            for _ in range(draw.randrange(3) if len(results) < 6 else 4):
                if results:
                    sent, result = results.pop(draw.randrange(len(results)))
                    assert torch.equal(result[:, [0, -1]], 10 * sent + torch.arange(3.0)[:, None].expand(3, 2))
                    del result
    assert len(regions(ranks[0])) <= 3 * most


def test_memory_is_that_of_the_largest_results_held_at_once() -> None:
    ranks, numel = memories(2), 1 << 16
    pages = [gathered(ranks, i + 1, [full(i, numel), full(i, numel)]) for i in range(2)]
    for i in range(2, 50):
        pages[i % 2] = []
        pages[i % 2] = gathered(ranks, i + 1, [full(i, numel // (i % 3 + 1))] * 2)
    assert memory_of(ranks[0]) <= 2 * 2 * 4 * numel + 4 * 4096


def test_memory_of_results_that_were_freed_long_ago_is_given_back() -> None:
    ranks, numel = memories(2), 1 << 16
    many = [gathered(ranks, i + 1, [full(i, numel)] * 2) for i in range(20)]
    before = memory_of(ranks[0])
    many.clear()
    for i in range(3):
        gathered(ranks, 21 + i, [full(i, numel)] * 2)
    assert memory_of(ranks[0]) == before  # the next step may need as many
    gathered(ranks, 30 + shared_results.LONG, [full(7, numel)] * 2)
    assert memory_of(ranks[0]) <= before / 10 + 3 * 4096
    many = [gathered(ranks, 2000 + i, [full(i, numel)] * 2) for i in range(20)]
    assert all(result.eq(i).all() for i, results in enumerate(many) for result in results)
    assert memory_of(ranks[0]) == before


def test_beyond_so_many_regions_there_is_none() -> None:
    with patch.object(shared_results, "MAX_REGIONS", 3):
        ranks = memories(2)
        held = [gathered(ranks, i + 1, [full(i)] * 2) for i in range(3)]
        assert [rank.write_in_place(4, full(4), torch.float32) for rank in ranks] == [None, None]
        held.pop()
        held.append(gathered(ranks, 5, [full(5)] * 2))
        assert [results[1][0, 0].item() for results in held] == [0, 1, 5]


def test_no_rank_writes_in_place_where_one_cannot_open_the_file_of_results() -> None:
    opened, calls = os.open, []

    def fails_once(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 7:  # after two files on each of three ranks
            raise OSError("not here")
        return opened(*args)

    with patch.object(os, "open", fails_once):
        ranks = memories(3)
    assert len(calls) == 8
    assert [rank.write_in_place(1, full(1), torch.float32) for rank in ranks] == [None] * 3


@pytest.mark.parametrize("lacks", ["locks", "maps"])
def test_a_rank_whose_system_lacks_locks_or_maps_sends_messages(lacks: str) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("not here")

    ranks = memories(2)
    assert ranks[0].write_in_place(1, full(1), torch.float32) is not None
    with patch.object(fcntl, "fcntl", refuse) if lacks == "locks" else patch.object(mmap, "mmap", refuse):
        assert ranks[1].write_in_place(1, full(1), torch.float32) is None


def test_a_result_that_cannot_be_mapped_is_read() -> None:
    ranks, parts = memories(2), [full(1), full(2)]
    slots = [rank.write_in_place(1, x, x.dtype) for rank, x in zip(ranks, parts, strict=True)]
    with patch.object(mmap, "mmap", side_effect=OSError):
        assert ranks[0].rows_in_place(slots, (5,), torch.float32) is None  # pyright: ignore[reportArgumentType]
    assert torch.equal(ranks[0].read_rows(slots, (5,), torch.float32, None), torch.stack(parts))  # pyright: ignore[reportArgumentType]


def test_memory_that_cannot_be_given_back_is_kept() -> None:
    ranks = memories(2)
    gathered(ranks, 1, [full(1)] * 2)
    with patch.object(mmap, "MADV_REMOVE", 12345):  # no such advice
        gathered(ranks, 2, [full(1, 10)] * 2)
        assert gathered(ranks, 3000, [full(3)] * 2)[0].eq(3).all()


def test_ranks_that_issue_different_sizes_do_not_write_into_the_same_region() -> None:
    ranks = memories(2)
    small, large = (rank.write_in_place(1, full(1, n), torch.float32) for rank, n in zip(ranks, (5, 5000), strict=True))
    assert small != large


def test_ranks_that_choose_at_the_same_time_choose_the_same_region() -> None:
    ranks = memories(4)

    def choose(rank: SharedMemory) -> list[int | None]:
        return [rank.write_in_place(number, full(number), torch.float32) for number in range(1, 50)]

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(choose, ranks)
    assert len(set(first)) == 49
    assert others == [first] * 3


ENDS_WHILE_IT_CHOOSES = """
import os, signal, sys
from functorch_shard.communication.shared_results import SharedResults
SharedResults(1, 2, os.open(sys.argv[1], os.O_RDWR))._lock()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_ends_while_it_chooses_keeps_nobody_from_choosing() -> None:
    ranks = memories(2)
    file = f"/proc/{os.getpid()}/fd/{ranks[0]._results.file}"
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_IT_CHOOSES, file], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(gathered(ranks, 1, [full(1)] * 2)) == 2


@contextmanager
def locked_elsewhere(file: int) -> Iterator[None]:
    """The table of regions, locked at once or not at all, by who has the file open a second time."""
    other = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    try:
        fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        yield
    finally:
        os.close(other)


def raising_at(event: int) -> Callable[..., None]:
    """A profiler that raises at one call or return of Python or C, which is where a signal handler may."""
    counted = count()

    def raise_at(frame: FrameType, *_: Any) -> None:
        if frame.f_code.co_filename != __file__ and next(counted) == event:
            raise KeyboardInterrupt

    return raise_at


@pytest.fixture
def without_collections() -> Iterator[None]:
    """An exception in a finalizer that the garbage collector calls would not be raised."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
def test_an_exception_at_any_moment_of_choosing_keeps_nobody_from_choosing() -> None:
    (rank,), kept = memories(1), list[BaseException]()  # and with them all that their frames have
    for event in count():
        sys.setprofile(raising_at(event))
        try:
            rank.write_in_place(event + 1, full(1), torch.float32)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.setprofile(None)
        with locked_elsewhere(rank._results.file):
            rank._results.let_go(0)
        if len(kept) == event:  # there was no such moment
            break
    assert len(kept) > 50


def test_a_forked_process_does_not_let_go_for_its_parent() -> None:
    ranks = memories(2)
    results = gathered(ranks, 1, [full(1)] * 2)
    child = os.fork()
    if not child:
        results.clear()
        os._exit(0)
    os.waitpid(child, 0)
    gathered(ranks, 2, [full(2)] * 2)
    assert results[0].eq(1).all()


def test_the_layout_of_a_lock_is_that_of_this_system() -> None:
    (rank,) = memories(1)
    rank._results._lock()
    with pytest.raises(BlockingIOError), locked_elsewhere(rank._results.file):
        ...
    rank._results._unlock()
    with locked_elsewhere(rank._results.file):
        ...
