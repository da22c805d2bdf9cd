"""What is estimated is what is there: bytes of trees that are made, and collectives that are counted."""

from __future__ import annotations

import time
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.communication import Counter, Traffic
from tests.support.models import awkward, loss_of, two_layers

AXES: list[dict[str, int]] = [
    {"shard": 1},
    {"shard": 5},
    {"replicate": 3},
    {"replicate": 2, "shard": 3},
    {"shard": 2, "replicate": 2},
]
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed, in units of bytes": {"align_bytes": 0, "units": 200},
    "half precision": {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)},
    "gradients in half": {"precision": fs.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
    "whole on every rank": {"ignored": ["blocks"]},
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": fs.optimizer(torch.optim.AdamW),
    "sgd": fs.optimizer(torch.optim.SGD),
    "momentum": fs.optimizer(torch.optim.SGD, momentum=0.9),
    "adagrad": fs.optimizer(torch.optim.Adagrad),
}
PAIRS = [*zip(AXES, PLANS, [*OPTIMIZERS, "adamw"], strict=True), (AXES[3], "half precision", "adamw")]


def step(axes: dict[str, int], options: str, opt: Any) -> tuple[fs.Layout, Any, Counter]:
    """The layout; parameters, gradients and state after a step, of all ranks; and what was sent meanwhile."""
    counter, model = Counter(), awkward()
    mesh = fs.simulated_mesh(axes).with_backend(counter)
    layout = fs.plan(model, mesh, reshard_after_forward=False, **PLANS[options])
    params = fs.shard(model, layout)
    torch.manual_seed(1)
    x, y = mesh.split((torch.randn(2 * mesh.size, 5), torch.randn(2 * mesh.size, 3)))

    def gradient(p: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        return fs.grad(lambda p: loss_of(model, fs.gather(p), x, y).double())(p)

    x, y = x.to(model_dtype(options)), y.to(model_dtype(options))
    grads = mesh.spmd(gradient)(params, x, y)
    params, state = opt.step(params, grads=grads, state=opt.init(params))
    return layout, (params, grads, state), counter


def model_dtype(options: str) -> torch.dtype:
    return torch.bfloat16 if "half" in options else torch.float64


def nbytes(tree: Any, layout: fs.Layout) -> int:
    """Of one rank."""
    tensors = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors) // layout.mesh.size


@pytest.mark.parametrize(("axes", "options", "name"), PAIRS, ids=str)
def test_a_step_has_the_bytes_and_sends_what_was_estimated(axes: dict[str, int], options: str, name: str) -> None:
    layout, (params, grads, state), counter = step(axes, options, OPTIMIZERS[name])
    expected = fs.estimate(layout, OPTIMIZERS[name])
    assert expected.parameters == nbytes(params, layout) > 0
    assert expected.gradients == nbytes(grads, layout) > 0
    assert expected.optimizer == nbytes(state, layout)
    counted = {key: Traffic(t.number, t.nbytes, t.sent) for key, t in counter.traffic.items() if key[1] != "exchange"}
    assert expected.traffic == counted
    assert bool(counted) == (layout.mesh.size > 1)
    assert expected.sent == sum(one.sent for one in counted.values())


def test_two_neighbours_are_whole_at_a_time_and_small_units_always() -> None:
    sizes = [(10, 40), (40, 10), (10, 10), (10, 60), (60, 1)]
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh(2), align_bytes=0))
    first, second, _, last, small = (4 * a * b for a, b in sizes)
    assert small < last / 8
    assert expected.gathered == first + second + small
    assert expected.reducing == 2 * last
    assert expected.traffic["shard", "all_gather"].number == 5 + 2  # the first two again
    kept = fs.estimate(fs.plan(model, fs.simulated_mesh(2), align_bytes=0, reshard_after_forward=False))
    assert kept.gathered == sum(4 * a * b for a, b in sizes)
    assert kept.traffic["shard", "all_gather"].number == 5


def test_frozen_units_have_no_gradient_no_state_and_in_front_no_second_gather() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for i in (0, 1, 3):
        model[i].requires_grad_(False)
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh(4)), OPTIMIZERS["momentum"])
    shard = 4 * 8 * 9 // 4
    assert (expected.parameters, expected.gradients, expected.optimizer) == (6 * shard, 3 * shard, 3 * shard)
    assert expected.traffic["shard", "all_gather"].number == 6 + 2  # units 3 and 2
    assert expected.traffic["shard", "psum_scatter"].number == 3
    all_frozen = fs.estimate(fs.plan(model.requires_grad_(False), fs.simulated_mesh(4)), OPTIMIZERS["momentum"])
    assert (all_frozen.gradients, all_frozen.optimizer, all_frozen.reducing) == (0, 0, 0)
    assert all_frozen.traffic["shard", "all_gather"].number == 6


def test_a_model_that_no_machine_holds_on_1024_ranks_takes_no_time() -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(16384, 65536, bias=False) for _ in range(100))  # 400 GB
    begin = time.perf_counter()
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh({"replicate": 8, "shard": 128})), OPTIMIZERS["adamw"])
    assert time.perf_counter() - begin < 5
    unit = 4 * 16384 * 65536
    assert expected.parameters == expected.gradients == 100 * unit // 128
    assert expected.optimizer == 2 * expected.parameters + 100 * 4  # and a step count for each buffer
    assert (expected.gathered, expected.reducing) == (2 * unit, 2 * unit)
    assert expected.traffic == {
        ("shard", "all_gather"): Traffic(198, 198 * unit // 128, 198 * unit * 127 // 128),
        ("shard", "psum_scatter"): Traffic(100, 100 * unit, 100 * unit * 127 // 128),
        ("replicate", "psum"): Traffic(100, 100 * unit // 128, 100 * unit // 128 * 14 // 8),
    }
    assert f"{expected.peak:,}" in str(expected)


def test_other_arguments_than_a_layout_are_refused() -> None:
    with pytest.raises(TypeError, match="estimate: layout: got Sequential"):
        fs.estimate(two_layers())  # type: ignore[arg-type]
