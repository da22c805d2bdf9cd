"""Shards on the CPU and ranks on another device: operands of collectives are on the device, results on the CPU.

There need not be such a device: fake tensors have all of one but the memory, and refuse to compute across two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import functorch_shard as fs
from functorch_shard.communication import Backend, Collective, Finished, Work
from functorch_shard.communication.axis import Axis

DEVICE, CPU = torch.device("lazy"), torch.device("cpu")  # one that every build of torch knows
SGD = fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
tree_map: Any = optree.tree_map
SCALING = fs.LossScale.dynamic()


@pytest.fixture(autouse=True)
def no_memory() -> Iterator[None]:
    with FakeTensorMode():
        yield


@dataclass(frozen=True)
class Nccl(Backend):
    """One of two ranks whose collectives take what is on the device, and nothing else."""

    size: int = 2

    def index(self) -> int:
        return 1

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        return Finished(self._result(op, x))

    def _result(self, op: Collective, x: Tensor) -> Tensor:
        match op.kind:
            case "all_gather" | "exchange":
                return torch.cat([_taken(x.to(op.device or x.device, op.dtype))] * self.size, op.dim)
            case "psum_scatter":
                return _taken(x).unflatten(op.dim, (self.size, -1)).sum(op.dim)
            case "psum":
                return _taken(x) * self.size
        return _taken(x).clone()


def _taken(x: Tensor) -> Tensor:
    assert x.device == DEVICE, f"a collective was given a tensor on {x.device}"
    return x


def real_ranks() -> fs.Mesh:
    return fs.Mesh((Axis("replicate", 2, Nccl()), Axis("shard", 2, Nccl())), DEVICE)


def simulated_ranks() -> fs.Mesh:
    return fs.simulated_mesh({"replicate": 2, "shard": 2}, device=DEVICE)


VALUES = {"a": (3, 5), "b": (4,), "c": (2, 2)}


def parameters(mesh: fs.Mesh) -> fs.Sharded:
    """Of three units; ``b`` is whole on every rank."""
    tensors = {name: torch.ones(shape) for name, shape in VALUES.items()}
    layout = fs.plan(tensors, simulated_ranks(), units=[["a"], ["b"], ["c"]], ignored=["b"])
    return fs.shard(tensors, layout.on(mesh))


def offloaded(params: fs.Sharded, stays: str) -> fs.Sharded:
    """As ``fs.offload(params, "cpu")`` leaves them, but for what stays."""
    return fs.Sharded({key: x if key == stays else x.to(CPU) for key, x in params.items()}, params.layout)


def loss(params: fs.Sharded) -> Tensor:
    return torch.stack([x.square().sum() for x in fs.gather(params, lazy=False).values()]).sum()


def full_grads(params: fs.Sharded) -> dict[str, Tensor]:
    """On two devices, as who accumulates in the CPU's memory may have them."""
    return {name: x.to(CPU) if name == "a" else x for name, x in fs.gather(params, lazy=False).items()}


def devices(tree: Any) -> Any:
    return tree_map(lambda x: x.device, tree)


def like(params: fs.Sharded) -> Any:
    return devices(params)


def unscaled(params: fs.Sharded) -> Any:
    return SCALING.unscale(params, SCALING.init(params))


def selected(params: fs.Sharded) -> Any:
    _, finite = unscaled(params)
    return SCALING.select(finite, params, tree_map(torch.zeros_like, params))


def stepped(params: fs.Sharded) -> Any:
    state = SGD.init(params)
    grads = fs.scatter_grads(full_grads(params), params.layout)
    return SGD.step(params, grads=grads, state=state)[0]


# What one writes in a training step, and where its result is: where its shards are, or on the device.
TASKS: dict[str, tuple[Callable[[fs.Sharded], Any], Callable[[fs.Sharded], Any] | torch.device]] = {
    "gather": (lambda p: fs.gather(p, lazy=False), DEVICE),
    "grad": (fs.grad(loss), like),
    "torch.func.grad": (torch.func.grad(loss), like),
    "forward mode": (lambda p: torch.func.jvp(loss, (p,), (p,)), DEVICE),
    "scatter_grads": (lambda p: fs.scatter_grads(full_grads(p), p.layout), DEVICE),
    "encoded": (lambda p: fs.codecs.scatter_encoded_grads(full_grads(p), fs.codecs.int8(), layout=p.layout), DEVICE),
    "norm": (fs.global_norm, DEVICE),
    "largest": (lambda p: fs.global_norm(p, float("inf")), DEVICE),
    "norms": (fs.debug.param_norms, DEVICE),
    "clip": (lambda p: fs.clip_by_global_norm(p, 1.0)[0], like),
    "unscale": (lambda p: unscaled(p)[0], like),
    "finite": (lambda p: unscaled(p)[1], DEVICE),
    "select": (selected, like),
    "step": (stepped, like),
}


@pytest.mark.parametrize("mesh", [real_ranks, simulated_ranks])
@pytest.mark.parametrize("task", TASKS)
def test_operands_of_collectives_are_on_the_device_and_results_have_the_memory_kind_of_their_shard(
    task: str, mesh: Callable[[], fs.Mesh]
) -> None:
    fn, where = TASKS[task]
    params = offloaded(parameters(mesh()), stays="c")
    assert set(devices(params).values()) == {CPU, DEVICE}
    result = params.layout.mesh.spmd(fn)(params)
    expected = where(params) if callable(where) else tree_map(lambda _: where, result)
    assert devices(result) == expected


def test_inside_spmd_ranks_are_counted_on_the_device_whatever_the_first_argument_is_on() -> None:
    mesh = simulated_ranks()
    on_device = torch.ones(2, 2, 3, device=DEVICE)
    for args in [(torch.ones(2, 2, 3), on_device), (on_device,), ()]:
        assert mesh.spmd(lambda *args: fs.collectives.axis_index(mesh))(*args).device == DEVICE


def test_parameters_in_the_cpus_memory_are_sharded_onto_the_device_inside_spmd_too() -> None:
    mesh = simulated_ranks()
    layout = fs.plan({"w": torch.ones(7)}, mesh)
    shards = mesh.spmd(lambda x: fs.shard({"w": x}, layout))(torch.ones(2, 2, 7))
    assert set(devices(shards).values()) == {DEVICE}
