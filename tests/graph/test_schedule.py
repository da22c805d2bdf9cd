"""The schedule of a recorded step is that of the lazy gather, and a compiler keeps it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.communication.collective import START, WAIT
from tests.benchmarks.workloads import Block
from tests.support.gpt_steps import gpt_of, gpt_step
from tests.support.ranks import gloo, simulated

BLOCKS, UNITS = 4, 8  # of the GPT: embed, position, the blocks, norm, head


def gpt_on_this_rank(mesh: fs.Mesh) -> dict[str, Any]:
    """The schedules of a step of AdamW, with a unit for each part, and with the units of fully_shard."""
    (step, args), counter = gpt_step(mesh, gpt_of(BLOCKS), mesh.rank), fs.communication.Counter()
    counted = args[0].layout.on(mesh.with_backend(counter))
    schedule = fs.compile(step).trace(fs.Sharded(args[0], counted), *args[1:])
    with_root, of_root = gpt_step(mesh, gpt_of(BLOCKS), mesh.rank, units=Block)
    rooted = fs.compile(with_root).trace(*of_root)
    return {
        "events": [
            (e.what, e.collective and e.collective.kind, e.collective and e.collective.key) for e in schedule.events
        ],
        "numbers": [one.number(kind) for one in (schedule, rooted) for kind in ("all_gather", "psum_scatter")],
        "largest": max(4 * sum(b.numel for b in unit.buffers) for unit in counted.units),
        "whole": 4 * sum(b.numel for b in counted.buffers.values()),
        "peak": max(e.alive for e in schedule.events),
        "table": str(schedule),
        "sent": dict(counter.traffic),
    }


@cache
def gpt() -> dict[str, Any]:
    return gloo(2)[0].run(gpt_on_this_rank)[0]


def test_a_step_gathers_twice_and_reduces_each_unit_once() -> None:
    """In backward the blocks again, but for the last, which is whole still; a root unit in forward twice."""
    assert gpt()["numbers"] == [UNITS + BLOCKS - 1, UNITS, BLOCKS + 2 + BLOCKS - 1, BLOCKS + 1]
    assert gpt()["sent"] == {}  # a trace communicates nothing


def test_every_start_is_waited_for_once_and_has_its_row() -> None:
    starts, waits = ([event[1:] for event in gpt()["events"] if event[0] == what] for what in ("start", "wait"))
    assert sorted(starts) == sorted(waits)
    lines = gpt()["table"].splitlines()
    assert sum(line.startswith("start") for line in lines) == len(starts) == 2 * UNITS + BLOCKS - 1
    assert f"{UNITS + BLOCKS - 1} all_gather, {UNITS} psum_scatter; inputs " in lines[-1]


def test_a_unit_is_started_before_the_one_in_use_has_computed() -> None:
    """In forward, there is a computation between the start and the wait of each block but the first two."""
    events = gpt()["events"]
    forward = events[: next(i for i, event in enumerate(events) if event[1] == "psum_scatter")]
    for block in range(2, BLOCKS):
        place = [i for i, event in enumerate(forward) if event[2] == f"blocks.{block}"]
        assert "compute" in [event[0] for event in forward[place[0] + 1 : place[1]]], block


def test_the_graph_never_holds_all_units() -> None:
    """At most a few units, their gradients and activations are alive at a time: fs.grad frees them as it goes on."""
    assert gpt()["largest"] < gpt()["peak"] < min(gpt()["whole"], 6 * gpt()["largest"] + 40e6)


LAYERS = 4


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(LAYERS)))


def compiled_by_inductor(mesh: fs.Mesh) -> tuple[list[Tensor], list[Tensor], str]:
    """Losses of ten steps of AdamW, eagerly and by inductor, and the code that it made."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model = layers()
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.AdamW)

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, lr: float) -> Any:
        grads, value = fs.grad_and_value(loss)(params, x)
        grads, _ = fs.clip_by_global_norm(grads, 1.0)
        return *opt.step(params, grads=grads, state=state, lr=lr), value

    def losses(each: Any) -> list[Tensor]:
        now, seen = (params, opt.init(params)), []
        for i in range(10):
            x = mesh.split(torch.randn(3 * mesh.size, 64, generator=torch.Generator().manual_seed(i)))
            *now, value = each(*now, x, 1e-3 / (i + 1))
            seen.append(value)
        return [*seen, *now[0].values()]

    got, code = run_and_get_code(losses, fs.compile(step))
    return got, losses(step), "\n".join(code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
def test_inductor_trains_as_the_eager_step_and_keeps_products_between_a_start_and_its_wait() -> None:
    """In forward: a start that was put just before its wait would overlap nothing."""
    results = [result for ranks in (*simulated(4), *gloo(2)) for result in ranks.run(compiled_by_inductor)]
    for got, expected, _ in results:
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    *_, code = results[-1]
    kinds = {str(START): "start", str(WAIT): "wait", "extern_kernels.addmm(": "product"}
    lines = [line for line in code[code.index("def call(") :].splitlines() if not line.strip().startswith("#")]
    marks = [kind for line in lines for mark, kind in kinds.items() if f" {mark}" in line or f"{mark}(" in line]
    forward = marks[: 3 * LAYERS]
    assert sorted(forward) == sorted(["start", "wait", "product"] * LAYERS)
    starts, waits = ([i for i, mark in enumerate(forward) if mark == kind] for kind in ("start", "wait"))
    for start, wait in [*zip(starts, waits, strict=True)][1:]:
        assert "product" in forward[start:wait], forward
