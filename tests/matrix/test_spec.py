"""Which classes update whole parameters; others are refused, with the reason and before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import functorch_shard as fs
from tests.support import homemade
from tests.support.ranks import gloo, on_each

REFUSED: list[tuple[Any, str]] = [
    (homemade.HasModes, "it has a train mode and an eval mode"),
    (homemade.ChangesItsRate, r"it changes its own options \(lr\)"),
    (homemade.Estimates, "its update of a parameter depends on others"),
    (homemade.EstimatesSlowly, "its update of a parameter depends on others"),
    (homemade.OnItself, "its update of a parameter depends .* on more than its state"),
]
ACCEPTED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (torch.optim.Muon, {}, ["momentum_buffer"]),
    (torch.optim.Adafactor, {}, ["col_var", "row_var", "step"]),
    (torch.optim.AdamW, {}, ["exp_avg", "exp_avg_sq", "step"]),
    (torch.optim.SGD, {}, []),
    (torch.optim.SGD, {"momentum": 0.9}, ["momentum_buffer", "owner.started"]),
    (homemade.Cautious, {"caution": True}, ["mean", "owner.started"]),
    (homemade.Lists, {}, ["momentums.0", "momentums.1", "owner.started"]),
    (homemade.FromTheFirst, {}, ["square", "owner.started"]),
    (homemade.CountsSteps, {}, ["group.step", "mean", "owner.started"]),
    (
        homemade.Soap,
        {},
        ["adam.mean", "adam.square", "bases.0", "bases.1", "grams.0", "grams.1", "step", "owner.started"],
    ),
]


@pytest.mark.parametrize(("cls", "text"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_a_class_that_does_not_update_each_parameter_by_itself_is_refused_with_its_reason(cls: Any, text: str) -> None:
    for rate in (1e-6, 0.0):
        with pytest.raises(TypeError, match=rf"{cls.__name__}: .*{text}(?s:.*)Gather what it needs"):
            fs.optimizer(cls, whole=True, lr=rate)


def one_matrix() -> fs.Sharded:
    return fs.shard({"w": torch.ones(6, 4)}, fs.plan({"w": torch.ones(6, 4)}, fs.simulated_mesh(2)))


@pytest.mark.parametrize(("cls", "options", "names"), ACCEPTED, ids=[case[0].__name__ for case in ACCEPTED])
def test_what_a_class_keeps_for_a_parameter_is_found_by_name(
    cls: Any, options: dict[str, Any], names: list[str]
) -> None:
    assert list(fs.optimizer(cls, whole=True, lr=0.1, **options).init(one_matrix())) == names


def test_a_step_that_keeps_more_than_the_first_one_raises() -> None:
    opt, params = fs.optimizer(homemade.GrowsLater, whole=True, lr=0.1), one_matrix()
    first = opt.step(params, grads=params, state=opt.init(params))
    with pytest.raises(RuntimeError, match=r"the state of 'w': .*second.* in a trial"):
        opt.step(first[0], grads=params, state=first[1])


def test_labels_may_have_optimizers_of_any_kind_inside_of_each_other() -> None:
    source = {"a": torch.ones(2, 2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(3, 3)}
    labels = {"b": "vector", "c": "slow", "d": "other"}
    layout = fs.plan(source, fs.simulated_mesh(2), labels=labels)
    params, grads = fs.shard(source, layout), fs.shard(source, layout)
    sgd = fs.optimizer(torch.optim.SGD, lr=1.0, labels={"slow": {"lr": 0.5}})
    adafactor = fs.optimizer(torch.optim.Adafactor, whole=True, lr=0.1)
    both = {"vector": sgd, "slow": sgd, "other": adafactor}
    opt = fs.optimizer(torch.optim.Muon, whole=True, lr=0.0, labels=both)
    state = opt.init(params)
    assert {name: list(tree) for name, tree in state.items()} == {
        "momentum_buffer": ["(owners)"],
        "col_var": ["(owners)/other"],
        "row_var": ["(owners)/other"],
        "step": ["(owners)/other"],
    }
    full = fs.gather(opt.step(params, grads=grads, state=state)[0])
    assert (full["a"][0, 0].item(), full["b"][0].item(), full["c"][0].item()) == (1.0, 0.0, 0.5)
    groups = opt.state_dict(state, params)["param_groups"]
    assert [(group["params"], group["lr"]) for group in groups] == [
        (["a"], 0.0),
        (["b"], 1.0),
        (["c"], 0.5),
        (["d"], 0.1),
    ]


@on_each(gloo({"shard": 1, "tensor": 2}))
def test_dtensors_are_refused_by_name_since_no_rank_has_them_as_a_whole(mesh: fs.Mesh) -> None:
    axes: Any = mesh.device_mesh
    source = {"w": distribute_tensor(torch.ones(4, 4), axes["tensor"], [Shard(0)]), "b": torch.ones(4, 4)}
    params = fs.shard(source, fs.plan(source, fs.Mesh.from_device_mesh(axes["shard"])))
    with pytest.raises(TypeError, match="'w' is a DTensor\nIts ranks have parts of it") as caught:
        fs.optimizer(torch.optim.Muon, whole=True).init(params)
    assert "'b'" not in str(caught.value)


def test_a_tracer_that_would_record_a_step_is_refused() -> None:
    params, opt = one_matrix(), fs.optimizer(torch.optim.Muon, whole=True)
    state = opt.init(params)

    def step(x: Tensor) -> Tensor:
        return opt.step(fs.Sharded({"(root)": x}, params.layout), grads=params, state=state)[0]["(root)"]

    with pytest.raises(NotImplementedError, match="whole=True: a compiled or recorded function cannot contain a step"):
        make_fx(step)(params["(root)"])
