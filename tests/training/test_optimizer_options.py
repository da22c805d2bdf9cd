"""Which classes an optimizer takes, and what their options do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support import homemade
from tests.support.ranks import HYBRID, gloo, simulated
from tests.support.steps import (
    CASES,
    SHAPES,
    assert_equal_stock,
    by_torch,
    copied,
    optimizer,
    planned,
    run,
    sharded_grads,
    stock,
    values,
    whole,
)


def test_sums_of_complex_parameters_begin_as_those_of_torch() -> None:
    given = {"w": torch.ones(3, dtype=torch.complex64)}
    params = fs.shard(given, fs.plan(given, fs.init_mesh()))
    state = fs.optimizer(torch.optim.Adagrad, initial_accumulator_value=0.5).init(params)
    assert_trees_close(state["sum"]["(root)"], torch.full((3,), 0.5 + 0.5j), rtol=0, atol=0)


def test_a_label_has_options_of_its_own() -> None:
    layout = planned(fs.simulated_mesh(3), labels=lambda name, tensor: "vector" if tensor.ndim < 2 else "")
    opt = fs.optimizer(
        torch.optim.SGD, lr=0.1, weight_decay=0.5, labels={"vector": {"weight_decay": 0.0, "momentum": 0.9}}
    )
    matrices, vectors = (
        [name for name, shape in SHAPES.items() if (len(shape) < 2) == small] for small in (False, True)
    )
    groups = (matrices, {"lr": 0.1, "weight_decay": 0.5}), (vectors, {"lr": 0.1, "momentum": 0.9})
    expected = by_torch(values, 3, *((torch.optim.SGD, *group) for group in groups))
    assert_equal_stock(run(opt, layout, 3), expected)


def test_label_options_of_a_step_win_over_all_others() -> None:
    layout = fs.plan({"x": torch.zeros(3), "y": torch.zeros(3)}, fs.simulated_mesh(2), labels={"y": "slow"})
    params = fs.shard({"x": torch.zeros(3), "y": torch.zeros(3)}, layout)
    grads = fs.shard({"x": torch.ones(3), "y": torch.ones(3)}, layout)
    opt = fs.optimizer(torch.optim.SGD, lr=1.0, labels={"slow": {"lr": 2.0}})
    rates = []
    calls: list[dict[str, Any]] = [{}, {"lr": 4.0}, {"lr": 4.0, "labels": {"slow": {"lr": 8.0}}}]
    for options in calls:
        new = fs.gather(opt.step(params, grads=grads, state=opt.init(params), **options)[0])
        rates.append((-new["x"][0].item(), -new["y"][0].item()))
    assert rates == [(1.0, 2.0), (4.0, 2.0), (4.0, 8.0)]


def test_a_label_that_no_buffer_has_is_refused_in_a_step_as_in_init() -> None:
    layout = fs.plan({"x": torch.zeros(3), "y": torch.zeros(3)}, fs.simulated_mesh(2), labels={"y": "no_decay"})
    params = fs.shard({"x": torch.zeros(3), "y": torch.zeros(3)}, layout)
    opt = fs.optimizer(torch.optim.SGD)
    with pytest.raises(ValueError, match=r"step: labels.*\n.*'no_decy': no buffer has this label .did you mean 'no_de"):
        opt.step(params, grads=params, state=opt.init(params), labels={"no_decy": {"lr": 0.1}})
    with pytest.raises(ValueError, match=r"init: labels.*\n.*'no_decy': no buffer has this label .did you mean 'no_de"):
        fs.optimizer(torch.optim.SGD, labels={"no_decy": {"lr": 0.1}}).init(params)


@pytest.mark.parametrize("whole_parameters", [False, True])
@pytest.mark.parametrize("case", ["sgd_momentum", "adamw", "asgd", "rprop"])
def test_a_learning_rate_per_step_equals_torchs_scheduler(case: str, whole_parameters: bool) -> None:
    base = CASES[case][1]["lr"]

    def factor(i: int) -> Any:
        return 0.5 * (1 + math.cos(math.pi * (i + 1) / 6))  # the rate of the first step is not the one of the class

    layout, opt = planned(fs.simulated_mesh(3)), optimizer(case, whole=whole_parameters)
    params = run(opt, layout, 5, options=lambda i: {"lr": base * factor(i)})
    assert_equal_stock(params, stock(case, 5, factor))


def test_an_override_may_bring_new_state_which_then_accumulates() -> None:
    params = run(optimizer("sgd"), planned(fs.simulated_mesh(2)), 3, options=lambda i: {"momentum": 0.9})
    assert_equal_stock(params, stock("sgd_momentum", 3))


DECLARED: dict[Any, set[str]] = {
    homemade.Averaged: {"step", "mean"},
    homemade.HalvesItsRate: {"mean", "group.step", "group.scale", "group.warm"},
    homemade.WritesGradients: set(),
    homemade.FromTheFirst: {"square"},
}


def by_itself(cls: Any, num_steps: int) -> dict[str, Tensor]:
    return by_torch(values, num_steps, (cls, SHAPES, {"lr": 0.1}))


def trained(mesh: fs.Mesh, cls: Any, donate: bool) -> tuple[set[str], fs.Full]:
    """The names of the first state, and the parameters after seven steps."""
    opt, layout = fs.optimizer(cls, elementwise=True, lr=0.1), planned(mesh)
    params = fs.shard(whole(), layout)
    state = mesh.spmd(opt.init)(params)
    names = set(state)
    step = mesh.spmd(lambda params, grads, state: opt.step(params, grads=grads, state=state, donate=donate))
    for i in range(7):
        grads = sharded_grads(layout, i + 1)
        before = copied(grads)
        params, state = step(params, grads, state)
        assert_trees_close(grads, before, rtol=0, atol=0)
        assert set(state) == names
    return names, fs.gather(params, lazy=False)


@pytest.mark.parametrize("cls", DECLARED)
def test_a_class_that_is_declared_to_be_elementwise_trains_as_it_does_by_itself(cls: Any) -> None:
    expected = by_itself(cls, 7)
    for ranks, donate in ((simulated(HYBRID)[0], False), (gloo(3)[0], True)):
        for found, full in ranks.run(trained, cls, donate):
            assert found == DECLARED[cls]
            assert_trees_close({name: full[name] for name in expected}, expected, rtol=1e-12, atol=1e-13)


def test_numbers_of_a_group_are_tensors_that_are_selected_described_and_moved_like_all_state() -> None:
    mesh = fs.simulated_mesh(2)
    layout, opt = planned(mesh), fs.optimizer(homemade.HalvesItsRate, elementwise=True, lr=0.1)
    params = fs.shard(whole(), layout)
    old = opt.step(params, grads=sharded_grads(layout, 1), state=opt.init(params))
    new = opt.step(old[0], grads=sharded_grads(layout, 2), state=old[1])
    kept = fs.LossScale.static(1.0).select(torch.tensor([False, False]), new, old)
    assert_trees_close(kept, old, rtol=0, atol=0)
    assert {int(x[0]) for x in kept[1]["group.step"].values()} == {1}
    described = opt.state_dict(new[1], new[0])
    assert {"step": 2, "scale": 0.25, "warm": False}.items() <= described["param_groups"][0].items()
    other = planned(fs.simulated_mesh(3))
    moved = fs.reshard(new, other)
    third = opt.step(moved[0], grads=sharded_grads(other, 3), state=moved[1])[0]
    expected = by_itself(homemade.HalvesItsRate, 3)
    assert_trees_close({k: x for k, x in fs.gather(third).items() if k in expected}, expected, rtol=1e-12, atol=1e-13)


def test_numbers_in_a_group_that_only_options_of_a_step_change_are_an_error() -> None:
    params = fs.shard(whole(), planned(fs.simulated_mesh(2)))
    opt = fs.optimizer(homemade.CountsIfAsked, elementwise=True, lr=0.1)
    with pytest.raises(RuntimeError, match="CountsIfAsked changes 'step' in its parameter groups"):
        opt.step(params, grads=sharded_grads(params.layout, 1), state=opt.init(params), counts=True)
