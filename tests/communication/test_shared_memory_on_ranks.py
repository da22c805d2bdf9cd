"""Large messages between real ranks of one host: bitwise what sockets bring, whatever holds a rank up, or ends it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
import functorch_shard.communication.gloo
from functorch_shard.communication import Work
from functorch_shard.communication.gloo import SOCKET_LIMIT, GlooBackend
from functorch_shard.communication.headers import SMALL_MESSAGE, Line
from functorch_shard.communication.shared_memory import ADDRESS
from functorch_shard.communication.shared_results import SharedResults
from functorch_shard.communication.wrapper import transport
from functorch_shard.testing import RankError
from tests.support import lazy_uses
from tests.support.pool import run_ranks

LARGE = SOCKET_LIMIT // 8 + 5  # elements of a part of 8 bytes each: large enough
SUMMED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.int64, torch.int8]
GATHERED = [*SUMMED, torch.float8_e4m3fn, torch.uint8, torch.bool]
BY_SOCKETS = partial(patch.object, GlooBackend, "_memory", None)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    drawn = 10 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn + 1j * drawn.flip(0) if dtype.is_complex else drawn).to(dtype)


def numel_of(dtype: torch.dtype) -> int:
    return LARGE * max(8 // dtype.itemsize, 1)


def assert_same_bytes(a: Tensor, b: Tensor) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def backend_of(axis: Any) -> Any:
    return transport(axis.backend)


def bare(axis: Any) -> Any:
    """Without what names lost ranks, and takes its time for that."""
    return replace(axis, backend=transport(axis.backend))


def same_on_both_ways(axis: Any, call: Callable[[Any], Work]) -> None:
    by_memory = call(axis).wait()
    with BY_SOCKETS():
        assert_same_bytes(by_memory, call(axis).wait())


def compare_with_sockets_on_this_rank(axes: dict[str, int]) -> None:
    mesh = fs.init_mesh(axes)
    for axis in mesh:
        size, backend = axis.size, backend_of(axis)
        for dtype in GATHERED:
            x = values((numel_of(dtype),), dtype, mesh.rank)
            for transient in (False, True):
                same_on_both_ways(axis, lambda a, x=x, r=transient: a.issue("all_gather", x, transient=r))
            assert_same_bytes(axis.issue("all_gather", x).wait().unflatten(0, (size, -1))[backend.rank], x)
        for dtype in SUMMED:
            x = values((numel_of(dtype) * size,), dtype, mesh.rank)
            same_on_both_ways(axis, lambda a, x=x: a.issue("psum_scatter", x))
        matrix = values((7 * size, SOCKET_LIMIT // 8 * size), torch.float64, mesh.rank).mT  # not contiguous
        for dim in (0, 1):
            for transient in (False, True):
                options = {"dim": dim, "transient": transient}
                same_on_both_ways(axis, lambda a, o=options, x=matrix: a.issue("all_gather", x, **o))
            same_on_both_ways(axis, lambda a, dim=dim, x=matrix: a.issue("psum_scatter", x, dim=dim))
        conjugated = values((LARGE * size,), torch.complex128, mesh.rank).conj()
        same_on_both_ways(axis, lambda a, x=conjugated: a.issue("all_gather", x))
        same_on_both_ways(axis, lambda a, x=conjugated: a.issue("all_gather", x, transient=True))
        resolved = axis.issue("psum_scatter", conjugated + 0).wait()
        assert_same_bytes(axis.issue("psum_scatter", conjugated).wait(), resolved)
        wide = values((4 * LARGE,), torch.float32, mesh.rank)
        for transient in (False, True):
            cast = {"dtype": torch.bfloat16, "transient": transient}
            same_on_both_ways(axis, lambda a, o=cast, x=wide: a.issue("all_gather", x, **o))
        assert backend._memory is not None


FURTHER = pytest.param({"replicate": 2, "shard": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3}, FURTHER], ids=str)
def test_every_dtype_arrives_bitwise_as_by_sockets(axes: dict[str, int]) -> None:
    run_ranks(compare_with_sockets_on_this_rank, fs.simulated_mesh(axes).size, axes)


def stress_on_this_rank(num_messages: int, longest: float) -> None:
    """Messages of all sizes under way together, landed in any order or never, each rank held up at other places."""
    mesh = fs.init_mesh()
    backend, rank, size = backend_of(mesh["shard"]), mesh.rank, mesh.size
    shared, own = random.Random(0), random.Random(rank)
    under_way, held = [], []
    for i in range(num_messages):
        numel = shared.choice([1, 17, SMALL_MESSAGE // 8 + 1, LARGE, LARGE + shared.randint(1, LARGE)])
        parts = [torch.arange(numel * size, dtype=torch.float64) * (r + 1) + i for r in range(size)]
        if shared.random() < 0.5:
            transient = (shared if shared.random() < 0.8 else own).random() < 0.5  # at times not on all ranks
            work = mesh["shard"].issue("all_gather", parts[rank][:numel], transient=transient)
            expected = torch.cat([part[:numel] for part in parts])
        else:
            work = mesh["shard"].issue("psum_scatter", parts[rank])
            expected = sum(parts[1:], parts[0]).view(size, numel)[rank]
        under_way.append((work, expected))
        del work
        time.sleep(own.random() * longest)
        while len(under_way) > shared.randint(0, 3):
            work, expected = under_way.pop(shared.randrange(len(under_way)))
            if shared.random() < 0.2:
                del work  # nobody wants it
            else:
                result = work.wait()
                assert torch.equal(result, expected), i
                held.append((result, expected))
        while len(held) > own.randint(0, 3):
            assert all(torch.equal(*pair) for pair in held), i
            held.pop(own.randrange(len(held)))
    assert len(backend._memory._sizes) <= 8
    assert 1 <= len(backend._memory._results._entries()) <= 8 * size


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_hundreds_of_messages_arrive_whatever_holds_a_rank_up_and_drops_them(num_ranks: int) -> None:
    run_ranks(stress_on_this_rank, num_ranks, 200, 0.004)


def stress_where_one_rank_lacks_locks_on_this_rank() -> None:
    rank = fs.init_mesh().rank
    with patch.object(SharedResults, "_lock", side_effect=OSError) if rank == 1 else nullcontext():
        stress_on_this_rank(50, 0.001)


def test_results_are_right_where_one_rank_cannot_share_them() -> None:
    run_ranks(stress_where_one_rank_lacks_locks_on_this_rank, 3)


class _FewMessages(Line):
    """Envelopes that have no messages in them, but for those that open the memory of others."""

    def __init__(self, group: Any, size: int) -> None:
        super().__init__(group, size)
        self.capacity = ADDRESS


@contextmanager
def all_through_shared_memory() -> Iterator[None]:
    with patch.multiple(functorch_shard.communication.gloo, SOCKET_LIMIT=0, Line=_FewMessages):
        yield


def use_on_this_rank() -> None:
    with all_through_shared_memory():
        for name in lazy_uses.USES:
            for reshard in (True, False):
                lazy_uses.use_on_this_rank(name, reshard)
        lazy_uses.same_jacobians_on_this_rank()
        lazy_uses.exceptions_on_this_rank()
        lazy_uses.delayed_training_on_this_rank()


def test_every_use_of_a_lazy_gather_is_right_when_all_its_messages_go_through_shared_memory() -> None:
    run_ranks(use_on_this_rank, 2)


def slots_and_regions_of_training_on_this_rank() -> tuple[int, int]:
    mesh = fs.init_mesh()
    with all_through_shared_memory():
        lazy_uses.delayed_training(lazy_uses.delayed(mesh, 0.01), num_steps=8)
    memory = backend_of(mesh["shard"])._memory
    return len(memory._sizes), len(memory._results._entries())


def test_training_holds_no_more_than_is_under_way_or_used_and_waited_for() -> None:
    """Two gathers, and a reduction; and of each the one before, which a rank behind may still have to read."""
    for num_slots, num_regions in run_ranks(slots_and_regions_of_training_on_this_rank, 3):
        assert 1 <= num_slots <= 3
        assert 1 < num_regions <= 4


def use_on_one_rank_alone_on_this_rank() -> None:
    """Whether a result is freed soon is no matter of other ranks."""
    mesh = fs.init_mesh()
    x = values((LARGE,), torch.float64, mesh.rank)
    expected = torch.cat([values((LARGE,), torch.float64, rank) for rank in range(mesh.size)])
    for reader in range(mesh.size):
        result = mesh["shard"].issue("all_gather", x, transient=mesh.rank == reader).wait()
        assert torch.equal(result, expected)
        result.zero_()  # its own
    mesh["shard"].issue("psum", torch.ones(1)).wait()  # all ranks are there
    assert all(all(let_go) for *_, let_go in backend_of(mesh["shard"])._memory._results._entries())


def test_results_that_some_ranks_transient_are_right_and_let_go() -> None:
    run_ranks(use_on_one_rank_alone_on_this_rank, 3)


def write_to_results_on_this_rank() -> None:
    def send_and_write(op: Any, x: Tensor, send: Any) -> Work:
        return send(op, x).then(lambda result: result.add_(mesh.rank) if op.kind == "all_gather" else result)

    mesh = fs.init_mesh().with_backend(fs.communication.wrap(send_and_write))
    x = values((LARGE,), torch.float64, mesh.rank)
    expected = torch.cat([values((LARGE,), torch.float64, rank) for rank in range(mesh.size)])
    for _ in range(5):
        assert torch.equal(mesh["shard"].issue("all_gather", x, transient=True).wait(), expected + mesh.rank)


def test_what_a_wrapper_writes_to_a_result_is_seen_on_its_rank_alone() -> None:
    run_ranks(write_to_results_on_this_rank, 2)


def rewrite_on_this_rank() -> Tensor:
    mesh = fs.init_mesh()
    x = torch.full((SOCKET_LIMIT,), 1.0 + mesh.rank)
    work = mesh["shard"].issue("all_gather", x)
    x.zero_()
    with torch.inference_mode():
        made_there = torch.full((SOCKET_LIMIT,), 1.0 + mesh.rank)
        from_there = mesh["shard"].issue("all_gather", made_there)
        made_there.zero_()
    return torch.stack([work.wait(), from_there.wait()]).view(2, 2, -1)[:, :, ::1000].clone()


def test_what_is_written_to_after_it_was_sent_arrives_as_it_was_sent() -> None:
    for rows in run_ranks(rewrite_on_this_rank, 2):
        assert torch.equal(rows, torch.tensor([1.0, 2.0])[:, None].expand_as(rows))


def _fails(*_: Any) -> int:
    raise OSError("no memory files here")


def _another_host(*_: Any) -> str:
    return "/memfd:another (deleted)"


def without_memory_on_this_rank(name: str, fails: Any) -> bool:
    mesh = fs.init_mesh()
    x = values((3 * SOCKET_LIMIT,), torch.float32, mesh.rank)
    backend = backend_of(mesh["shard"])
    with patch.object(os, name, fails if mesh.rank == 1 else getattr(os, name)):
        gathered = mesh["shard"].issue("all_gather", x).wait()
    expected = [values((3 * SOCKET_LIMIT,), torch.float32, rank) for rank in range(mesh.size)]
    assert torch.equal(gathered, torch.cat(expected))
    part = mesh["shard"].issue("psum_scatter", x).wait()
    assert torch.equal(part, sum(expected[1:], expected[0]).view(3, -1)[mesh.rank])
    return backend._memory is None


@pytest.mark.parametrize(
    ("name", "fails"), [("memfd_create", _fails), ("readlink", _another_host)], ids=["no files", "another host"]
)
def test_one_rank_that_cannot_read_the_memory_of_others_keeps_all_of_them_on_sockets(name: str, fails: Any) -> None:
    assert run_ranks(without_memory_on_this_rank, 3, name, fails) == [True] * 3


def different_on_this_rank() -> str:
    mesh = fs.init_mesh()
    with pytest.raises(RuntimeError) as error:
        mesh["shard"].issue("all_gather", torch.ones(SOCKET_LIMIT + mesh.rank)).wait()
    return str(error.value)


def test_operands_of_different_sizes_are_refused_on_every_rank() -> None:
    sizes = [f"rank {rank}: all_gather of {SOCKET_LIMIT + rank:,} float32" for rank in range(2)]
    for message in run_ranks(different_on_this_rank, 2):
        assert all(size in message for size in sizes)


def killed_on_this_rank(report: str) -> None:
    mesh = fs.init_mesh()
    axis, x = bare(mesh["shard"]), torch.ones(SOCKET_LIMIT)
    for i in range(10):
        works = [axis.issue("all_gather", x), axis.issue("psum_scatter", x)]
        if mesh.rank == 1 and i == 7:
            axis.issue("all_gather", x)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            Path(report).write_text(f"{i} {type(error).__name__}")
            raise


def test_a_rank_that_is_killed_ends_the_others_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before, start = set(os.listdir("/dev/shm")), time.monotonic()
    with pytest.raises(RankError, match="rank 1 died"):
        fs.testing.run_ranks(killed_on_this_rank, 2, str(tmp_path / "report"), timeout=100)
    assert time.monotonic() - start < 90
    assert set(os.listdir("/dev/shm")) == before


def outlives_on_this_rank(report: str) -> None:
    mesh = fs.init_mesh()
    axis, x = bare(mesh["shard"]), torch.ones(SOCKET_LIMIT)
    axis.issue("all_gather", x).wait()
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        axis.issue("all_gather", x).wait()
    except RuntimeError as error:
        Path(report).write_text(str(error))
        time.sleep(1)  # until the parent has seen who died
        raise


def test_who_waits_for_a_rank_that_was_killed_gets_an_error_at_once(tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankError, match="rank 1 died"):
        fs.testing.run_ranks(outlives_on_this_rank, 2, str(report), timeout=100)
    assert report.exists()
