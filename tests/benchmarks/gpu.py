"""On one GPU: steps of a GPT-2 and a Llama, plain, by this library and by FSDP2; gradients of offloaded parameters.

python -W default -m tests.benchmarks.gpu --json gpu.json    # ten minutes on one GPU; prints tables for the docs
python -m tests.benchmarks.gpu --device cpu --tiny           # the same at toy size, in seconds: what would run

It needs torch and optree. Everything is stored in bfloat16, in every contender, so that all compute the same losses.
Contenders run one after the other, each alone in the memory of the device, and "plain" once more at the end: how far
its second ratio is from 1, and its losses from the first ones, is what the others' mean. Parameters are lazy, as they
are on several ranks; "plain" ones are what a rank that holds them whole gets by default. A contender that raises, or
takes more memory than there is, is a row that says so. Each table is printed when it is complete.
"""

from __future__ import annotations

import functools
import gc
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.func import functional_call

import functorch_shard as fs
from tests.benchmarks.contenders import Step, alone, fsdp2, ours
from tests.benchmarks.tools import command_line, quartiles
from tests.benchmarks.workloads import SHAPES, Shape, Workload, decoder, toy

WARM_UP = 3


TOKENS = [1024, 4096, 16384]
Build = Callable[[Workload, bool, torch.device], Step]
PLAIN, AGAIN = "plain torch", "plain torch, again"
CONTENDERS: dict[str, Build] = {
    PLAIN: alone,
    "ours": functools.partial(ours, reshard=True, lazy=True, donate=False),
    "ours, plain parameters": functools.partial(ours, reshard=True, donate=False),
    "ours, donated": functools.partial(ours, reshard=True, lazy=True),
    "ours, donated, replay": functools.partial(ours, reshard=True, lazy=True, compiled="replay"),
    "ours, CUDA graphs": functools.partial(ours, reshard=True, lazy=True, donate=False, compiled="cudagraphs"),
    "ours, donated, CUDA graphs": functools.partial(ours, reshard=True, lazy=True, compiled="cudagraphs"),
    "FSDP2": functools.partial(fsdp2, reshard=True),
    AGAIN: alone,
}


@dataclass(frozen=True)
class Device:
    """Where steps run, and what is asked of it; a CPU answers what it knows."""

    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Give back what a contender left, that the next one begins alone."""
        torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> list[float] | None:
        """GB that were allocated at most, and that the allocator reserved."""
        return [torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9] if self.cuda else None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.cuda else platform.processor() or platform.machine()


@contextmanager
def captures() -> Iterator[list[Any]]:
    """What of CUDA graphs is captured inside: one entry a capture."""
    begin, seen = torch.cuda.CUDAGraph.capture_begin, []

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(graph).__name__)
        return begin(graph, *args, **kwargs)

    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", capture_begin):
        yield seen


def measured(build: Callable[[], Callable[[], Tensor]], device: Device, rounds: int) -> dict[str, Any]:
    """Milliseconds of each step, and until it returns; losses, captures, peak, warnings. Or the error it ends in."""
    device.forget()
    with warnings.catch_warnings(record=True) as said, captures() as seen:
        warnings.simplefilter("default")
        try:
            ms, host, losses = times(build(), device, rounds)
            result = {"ms": ms, "host": host, "losses": losses, "captures": len(seen), "peak": device.peak()}
        except Exception as error:  # out of memory, or what does not run here: the others still do
            result = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"}
    return {**result, "warnings": sorted({str(one.message).strip().splitlines()[0] for one in said})}


def times(step: Callable[[], Tensor], device: Device, rounds: int) -> tuple[list[float], list[float], list[float]]:
    ms, host, losses = [], [], []
    for _ in range(WARM_UP + rounds):
        device.wait()
        start = time.perf_counter()
        loss = step()
        returned = time.perf_counter()
        device.wait()
        ms.append(1e3 * (time.perf_counter() - start))
        host.append(1e3 * (returned - start))
        losses.append(loss.item())
    return ms[WARM_UP:], host[WARM_UP:], losses


def steps(shape: Shape, tokens: int, device: Device, rounds: int) -> dict[str, dict[str, Any]]:
    """All contenders on one model and batch."""
    work = decoder(shape, device.device, torch.bfloat16)
    x, y = work.batch(0, tokens // shape.context)

    def build(name: str) -> Callable[[], Tensor]:
        step = CONTENDERS[name](work, False, device.device)  # the model is in bfloat16 already
        return lambda: step(x, y)

    rows = {}
    for name in CONTENDERS:
        if "CUDA graphs" in name and not device.cuda:
            rows[name] = {"error": f"not on a {device.device.type}: a capture is of a stream of CUDA", "warnings": []}
        else:
            rows[name] = measured(lambda name=name: build(name), device, rounds)
    return rows


def offloads(shape: Shape, tokens: int, device: Device, rounds: int) -> dict[str, dict[str, Any]]:
    """Gradients of parameters on the device, of parameters on the CPU, and of FSDP2's there; with what was copied."""
    work = decoder(shape, device.device, torch.bfloat16)
    x, y = work.batch(0, tokens // shape.context)
    policy = CPUOffloadPolicy(pin_memory=device.cuda)
    made = {
        "ours, on the device": lambda: our_gradient(work, device, x, y, offloaded=False),
        'ours, fs.offload(params, "cpu")': lambda: our_gradient(work, device, x, y, offloaded=True),
        "FSDP2, on the device": lambda: gradient_of_fsdp2(work, device, x, y, {}),
        "FSDP2, CPUOffloadPolicy": lambda: gradient_of_fsdp2(work, device, x, y, {"offload_policy": policy}),
    }
    return {name: with_copies(build, device, rounds) for name, build in made.items()}


def with_copies(build: Callable[[], Callable[[], Tensor]], device: Device, rounds: int) -> dict[str, Any]:
    """What is ``measured``, and the copies of one more call, out of a trace of the profiler."""
    trace: dict[str, Any] = {}

    def traced() -> Callable[[], Tensor]:
        step = build()
        for _ in range(WARM_UP):
            step()
        trace.update(copies_in(step, device))
        return step

    return {**measured(traced, device, rounds), **trace}


def our_gradient(work: Workload, device: Device, x: Tensor, y: Tensor, *, offloaded: bool) -> Callable[[], Tensor]:
    model = work.model()
    params = fs.shard(model, fs.plan(model, fs.init_mesh(device=device.device.type)))
    if offloaded:
        params = fs.offload(params, "cpu")
    model.to("meta")
    return lambda: fs.grad_and_value(lambda p: work.loss(functional_call(model, fs.gather(p), (x,)), y))(params)[1]


def gradient_of_fsdp2(
    work: Workload, device: Device, x: Tensor, y: Tensor, options: Mapping[str, Any]
) -> Callable[[], Tensor]:
    model: Any = work.model()
    mesh = dist.init_device_mesh(device.device.type, (1,))
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, **options)

    def gradient() -> Tensor:
        loss = work.loss(model(x), y)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return gradient


def copies_in(step: Callable[[], Any], device: Device) -> dict[str, float]:
    """GB that ``step`` copies between CPU and device, GB/s while it does, and the part of that time with a kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    device.wait()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        device.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return copied(json.loads(path.read_text())["traceEvents"])


def copied(events: list[dict[str, Any]]) -> dict[str, float]:
    """Of events of a trace, whose times are in microseconds."""
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and ("HtoD" in e["name"] or "DtoH" in e["name"])]
    if not copies:
        return {}
    busy = joined([(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"])
    copying = joined([(e["ts"], e["ts"] + e["dur"]) for e in copies])
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copying for b in busy)
    seconds, gb = sum(end - start for start, end in copying) / 1e6, sum(e["args"]["bytes"] for e in copies) / 1e9
    return {"gb": gb, "gb_per_s": gb / seconds, "overlap": both / 1e6 / seconds}


def joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def table(title: str, rows: Mapping[str, dict[str, Any]], reference: str) -> str:
    """Markdown."""
    plain = rows[reference]
    head = "| | ms | ratio (quartiles) | host ms | peak GB (reserved) | first losses | CUDA graphs captured |"
    lines = [f"{title}:", "", head, "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {_cells(row, plain)} |" for name, row in rows.items()), *_said(rows)])


def _cells(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    if "error" in row:
        return " | ".join([row["error"], *[""] * 5])
    cells = [f"{statistics.median(row['ms']):.1f}", _ratio(row, plain), f"{statistics.median(row['host']):.1f}"]
    return " | ".join([*cells, _peak(row), difference(row, plain), str(row["captures"])])


def _peak(row: Mapping[str, Any]) -> str:
    return "{:.2f} ({:.2f})".format(*row["peak"]) if row.get("peak") else "-"


def _ratio(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    if "error" in plain:
        return "-"
    ratios = [ms / statistics.median(plain["ms"]) for ms in row["ms"]]
    low, middle, high = quartiles(ratios)
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


def difference(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """How far the losses of the first steps are from the plain ones; training in bfloat16 amplifies each rounding."""
    if "error" in plain:
        return "-"
    both = zip(row["losses"][:WARM_UP], plain["losses"], strict=False)
    worst = max(abs(a - b) / abs(b) for a, b in both)
    return "equal" if worst == 0 else f"within {worst:.0e}"


def offload_table(title: str, rows: Mapping[str, dict[str, Any]]) -> str:
    lines = [f"{title}, gradients:", "", "| | ms | peak GB (reserved) | GB copied | GB/s | of it beside a kernel |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | |")
            continue
        copied = [(row.get(key), digits) for key, digits in (("gb", 2), ("gb_per_s", 1), ("overlap", 2))]
        cells = ["-" if x is None else f"{x:.{digits}f}" for x, digits in copied]
        lines.append(f"| {name} | {statistics.median(row['ms']):.1f} | {_peak(row)} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_said(rows)])


def _said(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    said = [f"- {name} warns: {text}" for name, row in rows.items() for text in row["warnings"]]
    return ["", *said] if said else []


def main() -> None:
    chosen = command_line(__doc__, device="cuda", tiny=False, rounds=0, minutes=9.0, json=None)  # when no table begins
    device, begin = Device(torch.device(chosen.device)), time.monotonic()
    rounds = chosen.rounds or (2 if chosen.tiny else 20)
    shapes = [toy(shape) for shape in SHAPES] if chosen.tiny else SHAPES
    tokens = [shapes[0].context * n // 1024 for n in TOKENS]
    results: dict[str, Any] = {"device": device.name, "torch": torch.__version__, "tables": {}}
    print(f"{device.name}, torch {torch.__version__}, bfloat16, {WARM_UP} + {rounds} steps, one rank\n")
    with one_rank(device):
        jobs = [(shape, n, False) for shape in shapes for n in tokens] + [(shape, tokens[1], True) for shape in shapes]
        for shape, n, offloaded in sorted(jobs, key=lambda job: (job[1] == tokens[2], job[0] is shapes[1], job[2])):
            title = f"{shape.name}, {n} tokens"
            if time.monotonic() - begin > 60 * chosen.minutes:
                print(f"{title}{', gradients' * offloaded}: not begun after {chosen.minutes:g} minutes")
                continue
            rows = (offloads if offloaded else steps)(shape, n, device, rounds)
            print(offload_table(title, rows) if offloaded else table(title, rows, PLAIN), flush=True, end="\n\n")
            results["tables"][title + " offloaded" * offloaded] = rows
            if chosen.json:
                Path(chosen.json).write_text(json.dumps(results, indent=1))


@contextmanager
def one_rank(device: Device) -> Iterator[None]:
    """A process group of one, which FSDP2 and this library use alike."""
    backend = "cpu:gloo,cuda:nccl" if device.cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.cuda.device(0) if device.cuda else nullcontext():
            yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
