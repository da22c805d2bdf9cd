"""Which classes an optimizer takes, what they start from, and what their options do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.support.steps import (
    CASES,
    assert_equal_stock,
    optimizer,
    planned,
    run,
    sharded_grads,
    stock,
    values,
    whole,
)

STARTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd_momentum": {"momentum_buffer": None},
    "adamw": {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0},
    "adamw_amsgrad": {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0},
    "adagrad": {"step": 0.0, "sum": 0.3},
    "rmsprop": {"step": 0.0, "square_avg": 0.0, "momentum_buffer": 0.0, "grad_avg": 0.0},
    "nadam": {"step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0},
    "asgd": {"step": None, "eta": None, "mu": None, "ax": None},  # from the learning rate of the first step
    "rprop": {"step": None, "prev": None, "step_size": None},
}
SCALARS = {"step", "mu_product"}


@pytest.mark.parametrize("in_spmd", [False, True])
@pytest.mark.parametrize("case", STARTS)
def test_init_is_what_the_class_starts_from(case: str, in_spmd: bool) -> None:
    mesh = fs.simulated_mesh(2)
    params = fs.shard(whole(), planned(mesh))
    init = optimizer(case).init
    state = mesh.spmd(init)(params) if in_spmd else init(params)
    assert set(state) == set(STARTS[case])
    for name, start in STARTS[case].items():
        assert set(state[name]) == {key for key, buffer in params.layout.buffers.items() if buffer.trainable}
        for key, x in state[name].items():
            if start is None:
                assert x is None
            else:
                assert x.shape == ((2,) if name in SCALARS else params[key].shape)
                assert torch.equal(x, torch.full_like(x, start))


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    text = "'momentun': SGD has no such option\nIts options are lr, momentum, dampening"
    with pytest.raises(TypeError, match=text):
        fs.optimizer(torch.optim.SGD, momentun=0.9)
    with pytest.raises(TypeError, match=text):
        fs.optimizer(torch.optim.SGD, labels={"no_decay": {"momentun": 0.9}})
    params = fs.shard(whole(), planned(fs.simulated_mesh(2)))
    opt = fs.optimizer(torch.optim.SGD)
    with pytest.raises(TypeError, match=text):
        opt.step(params, grads=params, state={}, momentun=0.9)
    with pytest.raises(TypeError, match=text):
        opt.step(params, grads=params, state={}, labels={"no_decay": {"momentun": 0.9}})
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        fs.optimizer(torch.optim.SGD, lr=-1)


def test_a_label_has_options_of_its_own() -> None:
    layout = planned(fs.simulated_mesh(3), labels=lambda name, tensor: "vector" if tensor.ndim < 2 else "")
    opt = fs.optimizer(
        torch.optim.SGD, lr=0.1, weight_decay=0.5, labels={"vector": {"weight_decay": 0.0, "momentum": 0.9}}
    )
    params = {name: x.requires_grad_() for name, x in values().items()}
    matrices, vectors = ([x for x in params.values() if (x.ndim < 2) == small] for small in (False, True))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "momentum": 0.9}]
    reference: Any = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
    for i in range(3):
        for name, grad in values(i + 1).items():
            params[name].grad = grad
        reference.step()
    assert_equal_stock(run(opt, layout, 3), {name: x.detach() for name, x in params.items()})


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


def test_a_schedule_in_place_of_a_rate_and_an_object_in_place_of_a_class_are_explained() -> None:
    with pytest.raises(TypeError, match=r"'lr': got a function. A schedule is called .*\n.*lr=schedule\(i\)"):
        fs.optimizer(torch.optim.AdamW, lr=lambda i: 1e-3)
    with pytest.raises(TypeError, match=r"^optimizer: cls: got an object of SGD, expected a class such as torch.optim"):
        fs.optimizer(torch.optim.SGD([torch.zeros(1)]))  # pyright: ignore[reportArgumentType]


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
    params = fs.shard(whole(), layout)
    state = opt.init(params)
    for i in range(5):
        params, state = opt.step(params, grads=sharded_grads(layout, i + 1), state=state, lr=base * factor(i))
    assert_equal_stock(params, stock(case, 5, factor))


def test_an_override_may_bring_new_state_which_then_accumulates() -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer("sgd")
    params = fs.shard(whole(), layout)
    state = opt.init(params)
    for i in range(3):
        params, state = opt.step(params, grads=sharded_grads(layout, i + 1), state=state, momentum=0.9)
    assert_equal_stock(params, stock("sgd_momentum", 3))
