"""Processes that have the simulated accelerator: ranks of a process group with NCCL's semantics, or one process alone.

The processes are a pool of their own: loading the device changes what torch does everywhere in a process.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

import functorch_shard as fs
from tests.device import nccl
from tests.device.accelerator import load
from tests.support.pool import run_ranks

DEVICE = "sim:0"
_SYNCS: list[str] = []  # of the call that runs in this process


@dataclass(frozen=True)
class Report:
    """What a function returned in a process of the device, and what the device noticed meanwhile."""

    result: Any
    findings: tuple[str, ...]
    """Races between streams, and memory that was freed in use."""
    syncs: tuple[str, ...]
    """Where the library made the host wait for the device inside :func:`steps`: the reason, and the last frames."""


def reports(body: Callable[..., Any], *args: Any, axes: Mapping[str, int] | None = None) -> list[Report]:
    """The report of ``body(*args)``, or of ``body(mesh, *args)`` on each rank of ``axes``, by rank."""
    return run_ranks(_report, prod((axes or {}).values()), body, axes, args, pool="device", timeout=240)


def on_device(body: Callable[..., Any], *args: Any) -> Any:
    """What ``body(*args)`` returns in a process of the device, where the device finds nothing wrong."""
    [report] = reports(body, *args)
    assert not report.findings
    return report.result


def streams(count: int) -> list[torch.Stream]:
    """Streams of the device."""
    return [torch.Stream(DEVICE) for _ in range(count)]


def on_stream(stream: torch.Stream) -> AbstractContextManager[None]:
    """Make ``stream`` the current one while it is entered."""
    return torch.get_device_module(DEVICE).stream(stream)


def _report(body: Callable[..., Any], axes: Mapping[str, int] | None, args: tuple[Any, ...]) -> Report:
    extension = load()
    given: tuple[Any, ...] = ()
    if axes is not None:
        _join_group()
        given = (fs.init_mesh(axes, device=DEVICE),)
    gc.collect()
    extension.findings()
    _SYNCS.clear()
    result = body(*given, *args)
    gc.collect()
    return Report(result, tuple(extension.findings()), tuple(_SYNCS))


def _join_group() -> None:
    """Exchange the group of gloo that the pool has made for one of the device."""
    nccl.register()
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.barrier()  # others may still be connecting to this rank
    dist.destroy_process_group()
    store = dist.PrefixStore("device", store)
    dist.init_process_group("simulated_nccl", store=store, rank=rank, world_size=size)


@contextmanager
def steps() -> Iterator[None]:
    """While it is entered, list the host synchronisations that the library causes."""

    def note(why: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/functorch_shard/" in f.filename]
        frames = [f for f in frames if "/testing/" not in f.filename]  # the process of the rank
        places = [f"{f.filename.rpartition('/functorch_shard/')[2]}:{f.lineno} {f.name}" for f in frames[-3:]]
        if places:
            _SYNCS.append(f"{why} in {' > '.join(places)}")

    load().on_sync(note)
    try:
        yield
    finally:
        load().on_sync(None)
