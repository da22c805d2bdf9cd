"""Estimates beside steps: the bytes of each tree, and on gloo ranks every byte that is allocated."""

from __future__ import annotations

from math import prod
from typing import Any

import optree
import pytest
import torch
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.testing import run_ranks
from tests.support.gpt_steps import gpt_of, gpt_step
from tests.support.live_bytes import LiveBytes
from tests.support.memory import OPTIMIZERS, RANKS, STEPS, UNIT, activations, model_of_equal_units, training
from tests.support.models import awkward
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

KEPT: dict[str, Any] = {"reshard_after_forward": False}
HALF = fs.MixedPrecision(torch.bfloat16, torch.float32)
PLANS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": KEPT,
    "packed, in units of bytes": {**KEPT, "align_bytes": 0, "units": 200},
    "half precision": {**KEPT, "precision": HALF},
    "gradients in half": {**KEPT, "precision": fs.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
    "resharded, half precision": {"precision": HALF},
    "whole on every rank": {**KEPT, "ignored": ["blocks"]},
}
STATES: dict[str, Any] = {
    "adamw": fs.optimizer(torch.optim.AdamW),
    "sgd": fs.optimizer(torch.optim.SGD),
    "momentum": fs.optimizer(torch.optim.SGD, momentum=0.9),
    "adagrad": fs.optimizer(torch.optim.Adagrad),
}
SIMULATED = simulated(1, 5, {"replicate": 3}, {"replicate": 2, "shard": 3}, {"shard": 2, "replicate": 2})
CASES: list[Any] = [
    *zip(SIMULATED, [plan for plan in PLANS if "resharded" not in plan], [*STATES, "adamw"], strict=True),
    (gloo(HYBRID)[0], "resharded, half precision", "momentum"),
]


def step(mesh: fs.Mesh, plan: str, state: str) -> tuple[fs.Estimate, list[int]]:
    """What was estimated, and the bytes of parameters, state and gradients of a rank after a step."""
    module, opt = awkward(), STATES[state]
    layout = fs.plan(module, mesh, **PLANS[plan])
    params = fs.shard(module, layout)
    dtype = torch.bfloat16 if "half" in plan else torch.float64
    x = mesh.split(torch.randn(2 * mesh.size, 5, generator=torch.Generator().manual_seed(1)).to(dtype))
    loss = lambda p, x: functional_call(module, fs.gather(p), (x,)).double().square().sum()  # noqa: E731
    grads = mesh.spmd(fs.grad(loss))(params, x)
    trees: Any = *opt.step(params, grads=grads, state=opt.init(params)), grads
    ranks_here = mesh.size if mesh.is_simulated else 1
    return fs.estimate(layout, opt), [sum(x.nbytes for x in optree.tree_leaves(tree)) // ranks_here for tree in trees]


@pytest.mark.parametrize(("ranks", "plan", "state"), CASES, ids=str)
def test_a_step_holds_what_was_estimated(ranks: Ranks, plan: str, state: str) -> None:
    for expected, held in ranks.run(step, plan, state):
        assert [expected.parameters, expected.optimizer, expected.gradients] == held
        assert held[0] > 0 < held[2]


def test_memory_is_what_was_estimated() -> None:
    model, opt = model_of_equal_units(), OPTIMIZERS["adamw"]
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh(RANKS)), opt)
    received = UNIT * (RANKS - 1) // RANKS  # gloo's
    for live in training("adamw", "sockets"):
        assert live.at("end 9") == expected.parameters + expected.optimizer
        forward = max(live.growth(f"forward {i}", f"backward {i}") for i in range(STEPS))
        assert expected.gathered <= forward <= expected.gathered + activations()
        peak = max(live.peak(f"step {i}", f"end {i}") for i in range(1, STEPS))
        # not all is there at once: where the most is gathered, the last gradients are still to come
        assert expected.peak - 2 * UNIT <= peak <= expected.peak + activations() + received


def step_of_the_gpt(axes: dict[str, int], depth: int = 2) -> list[tuple[dict[Any, tuple[int, int]], int]]:
    """The collectives of a rank's third step, and the most bytes alive in it: counted, and traced."""
    torch.set_num_threads(1)
    mesh, model, counter = fs.init_mesh(axes), gpt_of(depth), Counter()
    with LiveBytes() as live:
        step, (params, state, *batch) = gpt_step(mesh, model, mesh.rank)
        for _ in range(2):
            params, state, _ = step(params, state, *batch)
        counted = params.layout.on(mesh.with_backend(counter))
        params, state = fs.Sharded(params, counted), {k: fs.Sharded(v, counted) for k, v in state.items()}
        live.mark("step")
        step(params, state, *batch)
        live.mark("end")
    counted_ones = {key: (one.number, one.nbytes) for key, one in counter.traffic.items()}
    schedule, traced = fs.compile(step).trace(params, state, *batch), dict[Any, tuple[int, int]]()
    for op in schedule.collectives:
        number, nbytes = traced.get((op.axis, op.kind), (0, 0))
        traced[op.axis, op.kind] = number + 1, nbytes + op.nbytes
    peak = schedule.inputs + max(event.alive for event in schedule.events)
    return [(counted_ones, live.peak("step", "end")), (traced, peak)]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"replicate": 2, "shard": 2}, {"shard": 8}], ids=str)
def test_a_traced_step_of_the_gpt_sends_and_holds_what_real_ranks_do(axes: dict[str, int]) -> None:
    for (sent, peak), (traced, traced_peak) in run_ranks(step_of_the_gpt, prod(axes.values()), axes, timeout=300):
        assert sent == traced
        assert 0.9 * peak <= traced_peak <= 1.1 * peak
