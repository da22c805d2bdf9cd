"""Buffers of a model from the meta device: what the resets leave in them, or those that the model has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import on_meta
from tests.support.refusals import refused


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("nothing", None)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.total.copy_(2 * self.weight.detach())


def test_buffers_are_what_the_resets_leave_in_them() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"bn": nn.BatchNorm1d(3), "c": Counting()}))
    model["c"].kept = torch.tensor([4, 0])
    weight = fs.gather(fs.init_params(model, fs.plan(model, fs.init_mesh()), seed=5))["c.weight"]
    for axes in (3, {"replicate": 2, "shard": 2}):
        mesh = fs.simulated_mesh(axes)
        layout = fs.plan(model, mesh)
        buffers = fs.init_buffers(model, layout, seed=5)
        assert list(buffers) == [name for name, _ in model.named_buffers()]
        inside = mesh.spmd(lambda layout=layout: fs.init_buffers(model, layout, seed=5))()
        assert_trees_close(inside, buffers, rtol=0, atol=0)
        first = {name: x[(0,) * len(mesh)] for name, x in buffers.items()}
        assert all(x.shape == (*mesh.axes.values(), *first[name].shape) for name, x in buffers.items())
        assert first["bn.num_batches_tracked"].dtype == torch.int64
        expected = dict(nn.BatchNorm1d(3).named_buffers("bn"))
        expected |= {"c.total": 2 * weight, "c.kept": torch.tensor([4, 0])}
        assert_trees_close(first, expected, rtol=0, atol=0)
        buffers["c.kept"].fill_(9)
        assert model["c"].kept.tolist() == [4, 0]


def test_buffers_that_no_reset_can_compute_are_named_and_kept_when_they_have_values() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"rope": Rope(), "c": Counting(), "fc": nn.Linear(2, 2)}))
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init_buffers, model, layout)
    assert text.startswith("ValueError: init_buffers: 3 problems")
    assert "'rope.table': neither Rope 'rope' nor a module around it has a reset" in text
    assert "'rope.mask': neither" in text
    assert "'c.kept': reset_parameters of Counting 'c' left 2 of 2 elements unfilled" in text
    assert "give the model the values of these buffers" in text
    model["rope"] = Rope()
    model["c"].kept = torch.zeros(2, dtype=torch.int64)
    buffers = fs.init_buffers(model, layout)
    assert buffers["rope.table"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert fs.init_params(model, layout)["fc"].any()


def test_a_model_from_the_meta_device_trains() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)))
    mesh = fs.simulated_mesh(3)
    layout = fs.plan(model, mesh)
    params, buffers = fs.init_params(model, layout), fs.init_buffers(model, layout)
    opt = fs.optimizer(torch.optim.SGD, lr=0.1)

    def loss(params: fs.Sharded, buffers: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        output, buffers = fs.apply(model, params, buffers, x)
        return (output - y).square().mean(), buffers

    @mesh.spmd
    def step(params: Any, state: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        grads, (value, buffers) = fs.grad_and_value(loss, has_aux=True)(params, buffers, x, y)
        return *opt.step(params, grads=grads, state=state), buffers, fs.collectives.pmean(value, mesh)

    torch.manual_seed(0)
    state, x, losses = opt.init(params), torch.randn(24, 5), []
    for _ in range(20):
        params, state, buffers, value = step(params, state, buffers, *mesh.split((x, x[:, :1].sin())))
        losses.append(value[0].item())
    assert losses[-1] < 0.3 * losses[0]
    assert buffers["1.num_batches_tracked"].tolist() == [20] * 3


def pretrained() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    statistics: Any = model[1]
    statistics.running_mean.fill_(3.0)
    statistics.running_var.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    statistics.num_batches_tracked.fill_(7)
    return model


def test_buffers_made_in_inference_mode_can_be_written_to() -> None:
    model = pretrained()
    with torch.inference_mode():
        buffers = fs.init_buffers(model, fs.plan(model, fs.simulated_mesh(2)))
    assert not any(x.is_inference() for x in buffers.values())
