"""The simulated accelerator finds what a GPU would punish: each planted bug, and nothing in the program without it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.testing.processes import RankError
from tests.device import nccl
from tests.device.accelerator import load
from tests.device.programs import train
from tests.device.ranks import DEVICE, on_device, on_stream, reports, streams

TWO = {"shard": 2}


def findings(body: Any, *args: Any, axes: Any = None) -> list[str]:
    """The first word of each finding of ``body``, on every rank."""
    return [text.split()[0] for report in reports(body, *args, axes=axes) for text in report.findings]


# streams


def use_on_another_stream(waits: bool) -> None:
    first, second = streams(2)
    with on_stream(first):
        x = torch.ones(5, device=DEVICE) * 3
    if waits:
        second.wait_stream(first)
    with on_stream(second):
        x.add(1)
    first.wait_stream(second)


def free_on_another_stream(reported: bool) -> None:
    first, second = streams(2)
    with on_stream(first):
        x = torch.ones(5, device=DEVICE)
    second.wait_stream(first)
    with on_stream(second):
        x.add(1)
    if reported:
        x.record_stream(second)


@pytest.mark.parametrize(
    ("body", "found"), [(use_on_another_stream, "RACE"), (free_on_another_stream, "FREED")], ids=["race", "freed"]
)
def test_a_race_is_found_and_what_is_ordered_is_not(body: Any, found: str) -> None:
    assert findings(body, False) == [found]
    assert findings(body, True) == []


# collectives


def operand_written_before_the_wait(mesh: fs.Mesh) -> None:
    x = torch.ones(4, device=DEVICE)
    work: Any = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()


def library_that_never_waits(mesh: fs.Mesh) -> None:
    wait = nccl.Work.wait
    nccl.Work.wait = lambda self, timeout=None: True
    try:
        train(mesh)
    finally:
        nccl.Work.wait = wait


@pytest.mark.parametrize("body", [operand_written_before_the_wait, library_that_never_waits])
def test_a_missing_wait_is_found(body: Any) -> None:
    assert {*findings(body, axes=TWO)} & {"RACE", "FREED"}


# memory and the host


def read_by_the_host() -> None:
    ctypes.string_at(torch.ones(3, device=DEVICE).data_ptr(), 4)


def test_device_memory_is_closed_to_the_host() -> None:
    with pytest.raises(RankError, match="died"):
        on_device(read_by_the_host)


def copies(pinned: bool) -> tuple[list[str], int, int]:
    x, extension = torch.ones(3), load()
    x = x.pin_memory() if pinned else x
    extension.syncs()
    there = x.to(DEVICE, non_blocking=True)
    pending = extension.pending_reads(x)
    torch.accelerator.synchronize()
    assert there.sum().item() == 3
    return extension.syncs(), pending, extension.pending_reads(x)


def test_host_synchronisations_are_listed_and_copies_of_pinned_memory_are_pending() -> None:
    read = ["device", "aten::_local_scalar_dense"]
    assert on_device(copies, True) == (read, 1, 0)
    assert on_device(copies, False) == (["copy to the device", *read], 0, 0)


def uninitialised() -> float:
    return torch.empty(3, device=DEVICE).sum().item()


def test_memory_that_was_not_written_is_not_a_number() -> None:
    assert on_device(uninitialised) != on_device(uninitialised)
