"""Train a model whose state is several times the memory that the process may have, out of mapped files.

python -m tests.benchmarks.offload                                    # 1.6 GB of state in 330 MB, and in memory
python -m tests.benchmarks.offload --depth 400 --limit 400000000      # 6.7 GB in 400 MB

The limit is RLIMIT_DATA, which Linux applies to private memory (heap, tensors, stacks): what a process does not give
back. Pages of mapped files do not count: the system writes them out and takes them back when it needs room.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.layout.layout import select_buffers

BATCH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) / 4


def room_for(layout: fs.Layout) -> fs.Sharded:
    """Zeros for every shard, that take no memory."""
    return fs.Sharded(
        {key: torch.zeros((), dtype=b.dtype).expand(b.shard_numel) for key, b in layout.buffers.items()}, layout
    )


def fill(params: fs.Sharded) -> None:
    """Initial values, unit by unit; the same for any number of ranks and wherever the shards live."""
    layout = params.layout
    for i, unit in enumerate(layout.units):
        generator = torch.Generator().manual_seed(i)
        keys = {buffer.key for buffer in unit.buffers}
        part = select_buffers(layout, {key: key in keys for key in layout.buffers})
        values = {
            name: torch.randn(slot.shape, generator=generator) / slot.shape[-1] for name, slot in part.slots.items()
        }
        for key, shard in fs.shard(values, part).items():
            params[key].copy_(shard)


def train(directory: str | None, limit: int | None, *, depth: int, width: int, steps: int) -> dict[str, Any]:
    """AdamW for a few steps, in memory or in the files of ``directory``, with ``limit`` bytes of private memory."""
    torch.set_num_threads(1)
    return_freed_memory()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    mesh = fs.init_mesh()
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(depth)))
    layout = fs.plan(model, mesh)
    opt = fs.optimizer(torch.optim.AdamW, lr=1e-3)
    if directory:
        params = fs.offload(room_for(layout), Path(directory, "params"))
    else:
        params = fs.Sharded(
            {key: x.clone(memory_format=torch.contiguous_format) for key, x in room_for(layout).items()}, layout
        )
    fill(params)
    state = opt.init(params)
    if directory:
        state = fs.offload(state, Path(directory, "state"))

    def loss_fn(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    losses, times = [], []
    for i in range(steps):
        start = time.perf_counter()
        x = torch.randn(mesh.size, BATCH, width, generator=torch.Generator().manual_seed(i))[mesh.rank]
        grads, loss = fs.grad_and_value(loss_fn)(params, x)
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        losses.append(loss.item())
        del grads
        times.append(time.perf_counter() - start)
    shards = sum(buffer.shard_numel * buffer.dtype.itemsize for buffer in layout.buffers.values())
    return {
        "losses": losses,
        "state": 4 * shards,  # parameters, gradients, two moments
        "seconds": statistics.median(times[1:]),
        "private": resident("RssAnon"),
        "mapped": resident("RssFile"),
    }


def return_freed_memory() -> None:
    """Have malloc hand large blocks back when they are freed; by default it keeps ever larger ones, between small ones.

    What MALLOC_MMAP_THRESHOLD_=131072 in the environment does from the start.
    """
    libc, mmap_threshold = ctypes.CDLL(None), -3
    assert libc.mallopt(mmap_threshold, 1 << 17) == 1


def resident(kind: str) -> int:
    """Bytes of this process in memory now: ``RssAnon``, its own, or ``RssFile``, those of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def run(directory: str | None, limit: int | None, options: dict[str, int]) -> dict[str, Any] | str:
    """``train`` in a process of its own; the last line of its error if it fails."""
    call = json.dumps([directory, limit, options])
    command = [sys.executable, "-m", "tests.benchmarks.offload", "--call", call]
    process = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    output = process.stdout if process.returncode == 0 else process.stderr
    last = output.strip().splitlines()[-1]
    return json.loads(last) if process.returncode == 0 else last


def report(name: str, result: dict[str, Any] | str) -> None:
    if isinstance(result, str):
        print(f"{name:<28} {result[:90]}")
        return
    megabytes = {key: result[key] / 1e6 for key in ("state", "private", "mapped")}
    figures = ", ".join(f"{key} {value:,.0f} MB" for key, value in megabytes.items())
    print(f"{name:<28} {figures}, a step {result['seconds'] * 1000:,.0f} ms, last loss {result['losses'][-1]!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=96)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=int, default=330_000_000, help="bytes of private memory, all of the process")
    parser.add_argument("--directory", help="where to put files; a temporary one unless given")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        directory, limit, options = json.loads(args.call)
        print(json.dumps(train(directory, limit, **options)))
        return
    options = {"depth": args.depth, "width": args.width, "steps": args.steps}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        limited = run(directory, args.limit, options)
        report(f"in files, {args.limit / 1e6:,.0f} MB", limited)
        report(f"in memory, {args.limit / 1e6:,.0f} MB", run(None, args.limit, options))
    free = run(None, None, options)
    report("in memory, no limit", free)
    if isinstance(limited, str) or isinstance(free, str) or limited["losses"] != free["losses"]:
        raise SystemExit("in files and in memory, the losses differ")
    print(f"the same losses bitwise; state is {limited['state'] / args.limit:.1f} times the limit")


if __name__ == "__main__":
    main()
