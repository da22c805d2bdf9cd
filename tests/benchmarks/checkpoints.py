"""Checkpoints against torch.distributed.checkpoint: time, and bytes of tensors.

python -m tests.benchmarks.checkpoints                                # 27M parameters and AdamW's state, two ranks
python -m tests.benchmarks.checkpoints --rounds 1                     # the short form
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from functorch_shard.testing import run_ranks
from tests.benchmarks.tools import command_line, now_on_all_ranks
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.support.checkpoints import FSDP2, Ours
from tests.support.live_bytes import LiveBytes

BATCH, LR = 4, 1e-3
Times = dict[str, list[float]]
Memory = dict[str, float]  # bytes of tensors
Calls = dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]]  # a save and a load, of a path


def measure(workload: str, rounds: int, directory: str) -> tuple[Times, Memory]:
    """Seconds of the slowest rank, in turns; and bytes."""
    work, folder = WORKLOADS[workload], Path(directory)
    (ours, peer), batch = (_made(program, work) for program in (Ours, FSDP2)), work.batch(dist.get_rank(), BATCH)
    ours.step(*batch)  # AdamW has state
    calls: Calls = {
        "ours": (ours.save, ours.load),
        "dcp": (peer.save, lambda path: dcp.load(peer.tree(), checkpoint_id=path)),  # into the memory of parameters
    }
    times: Times = {f"{verb}, {name}": [] for verb in ("save", "load") for name in calls}
    for i in range(rounds + 1):
        for name in list(calls)[:: 1 if i % 2 else -1]:  # nobody always comes first
            path = folder / f"{name}-{i}"
            for verb, call in zip(("save", "load"), calls[name], strict=True):
                times[f"{verb}, {name}"].append(_seconds(lambda call=call, path=path: call(path)))
            _remove(path)
    return {what: series[1:] for what, series in times.items()}, {**_sizes(ours), **_memory(calls, folder)}


def _made(program: Any, work: Workload) -> Any:
    model: Any = work.model()
    return program(model, model.blocks, work.loss, LR)


def _seconds(call: Callable[[], Any]) -> float:
    start = now_on_all_ranks()
    call()
    return now_on_all_ranks() - start


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def _memory(calls: Calls, folder: Path) -> Memory:
    """The most beside what was there before, counted by torch's allocator."""
    found: Memory = {}
    for name in calls:
        path = folder / f"memory-{name}"
        for verb, call in zip(("save", "load"), calls[name], strict=True):
            with LiveBytes() as live:
                live.mark("before")
                call(path)
                live.mark("after")
            found[f"{verb}, {name}"] = live.growth("before", "after")
        _remove(path)
    return found


def _sizes(ours: Ours) -> Memory:
    units = ours.params.layout.units
    return {
        "a rank's tree": 3 * sum(b.shard_numel * b.dtype.itemsize for unit in units for b in unit.buffers),
        "largest unit": max(sum(b.nbytes for b in unit.buffers) for unit in units),
    }


def table(times: Times, memory: Memory, ranks: int) -> str:
    nbytes, lines = ranks * memory["a rank's tree"], ["median s (fastest to slowest), MB/s of all ranks"]
    for what, series in times.items():
        rate = f"{nbytes / 1e6 / statistics.median(series):8.0f}"
        lines.append(f"  {what:20s} {statistics.median(series):8.3f} ({min(series):.3f} to {max(series):.3f}) {rate}")
    for verb in ("save", "load"):
        ratios = [a / b for a, b in zip(times[f"{verb}, ours"], times[f"{verb}, dcp"], strict=True)]
        lines.append(f"  {verb}, ours to dcp: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    lines.append("MB of a rank's tensors; beside them, at the peak")
    lines += [f"  {what:20s} {size / 1e6:8.1f}" for what, size in memory.items()]
    return "\n".join(lines)


def check_memory(memory: Memory) -> None:
    """Neither has more than a unit at a time beside the tree."""
    for verb in ("save", "load"):
        if memory[f"{verb}, ours"] > memory["largest unit"]:
            raise AssertionError(f"{verb}: more bytes beside the tree than the largest unit has: {memory}")


def main() -> None:
    chosen = command_line(__doc__, workload="gpt", ranks=2, rounds=5, directory=None)  # where to write
    with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
        times, memory = run_ranks(measure, chosen.ranks, chosen.workload, chosen.rounds, folder, timeout=3000)[0]
    print(f"{chosen.workload}, {chosen.ranks} gloo ranks: {chosen.rounds} rounds")
    print(table(times, memory, chosen.ranks))
    check_memory(memory)


if __name__ == "__main__":
    main()
