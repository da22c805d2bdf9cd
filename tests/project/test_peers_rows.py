"""What users of other libraries ask for, row by row: each is a few lines of pure functions here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.layout.layout import select_buffers
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, two_layers
from tests.support.ranks import gloo, on_each, simulated

every_mesh = on_each([*simulated(5, {"replicate": 2, "shard": 3}), *gloo(2)])
tree_map: Any = optree.tree_map  # its type knows no trees of other libraries


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole(tree: fs.Sharded) -> dict[str, Tensor]:
    return dict(fs.gather(tree, lazy=False))


# Only values matter: gathered tensors are row-major.
IN_MEMORY: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3, dtype=torch.float64).T,
    "channels_last": lambda: torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1, dtype=torch.float64).expand(3, 4),
    "one element of a larger memory": lambda: torch.randn(9, dtype=torch.float64)[4],
}


@every_mesh
def test_parameters_that_are_not_contiguous_keep_their_values(mesh: fs.Mesh) -> None:
    torch.manual_seed(0)
    values = {f"{i}.w": make() for i, make in enumerate(IN_MEMORY.values())}
    params = fs.shard(values, fs.plan(values, mesh))
    full = fs.gather(params, lazy=False)
    assert_trees_close(dict(full), values, rtol=0, atol=0)
    assert all(x.is_contiguous() for x in full.values())
    grads = mesh.spmd(fs.grad(lambda p: sum((x**3).sum() for x in fs.gather(p).values())))(params)
    assert_trees_close(whole(grads), {name: 3 * x**2 for name, x in values.items()}, rtol=1e-10, atol=1e-12)


@every_mesh
def test_a_tree_without_parameters_goes_through_everything(mesh: fs.Mesh) -> None:
    layout = fs.plan(nn.ReLU(), mesh)
    params, opt = fs.shard({}, layout), fs.optimizer(torch.optim.AdamW, lr=0.1)
    with count_collectives() as seen:
        assert dict(fs.gather(params)) == dict(fs.scatter_grads({}, layout)) == {}
        again, _ = opt.step(params, grads=fs.scatter_grads({}, layout), state=opt.init(params))
    assert len(again) == seen.total == 0
    assert [len(half) for half in fs.partition(params)] == [0, 0]


@every_mesh
def test_dtypes_of_one_unit_have_buffers_gradients_and_steps_of_their_own(mesh: fs.Mesh) -> None:
    dtypes = {"u.d": torch.float64, "u.s": torch.float32, "u.h": torch.bfloat16}
    values = {name: torch.tensor([1.0, 2.0, 3.0], dtype=dtype) for name, dtype in dtypes.items()}
    params = fs.shard(values, fs.plan(values, mesh))
    assert {key: x.dtype for key, x in params.items()} == {
        "u/float64": torch.float64,
        "u/float32": torch.float32,
        "u/bfloat16": torch.bfloat16,
    }
    grads = mesh.spmd(fs.grad(lambda p: sum(x.square().sum().double() for x in fs.gather(p).values())))(params)
    assert_trees_close(whole(grads), {name: 2 * x for name, x in values.items()}, rtol=0, atol=0)
    opt = fs.optimizer(torch.optim.SGD, lr=0.25)
    stepped, _ = opt.step(params, grads=grads, state=opt.init(params))
    assert_trees_close(whole(stepped), {name: x / 2 for name, x in values.items()}, rtol=0, atol=0)


@every_mesh
def test_a_part_of_the_tree_is_selected_and_gathered_alone(mesh: fs.Mesh) -> None:
    """``summon_full_params(recurse=False)`` of one submodule, and its edit written back into the whole tree."""
    model = two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh))
    layout = select_buffers(params.layout, {key: key == "2" for key in params})
    part = fs.Sharded({key: params[key] for key in layout.buffers}, layout)
    with count_collectives() as seen:
        full = mesh.spmd(lambda p: dict(fs.gather(p, lazy=False)))(part)
    assert seen["all_gather"] == seen.total == (1 if layout.num_shards > 1 else 0)
    assert list(full) == ["2.weight", "2.bias"]
    edited = fs.shard({name: 2 * x for name, x in whole(part).items()}, layout)
    values = values_of(model)
    expected = {name: 2 * x if name.startswith("2") else x for name, x in values.items()}
    assert_trees_close(whole(fs.Sharded({**params, **edited}, params.layout)), expected, rtol=0, atol=0)


@every_mesh
def test_a_moving_average_sends_nothing_and_is_evaluated_like_parameters(mesh: fs.Mesh) -> None:
    model = awkward()
    params, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))
    average, plain = params, {n: x for n, x in values_of(model).items() if n in params.layout.slots}
    expected = dict(plain)
    for i in range(3):
        params = tree_map(lambda p, i=i: p * (i + 2), params)
        with count_collectives() as seen:
            average = tree_map(lambda a, p: 0.75 * a + 0.25 * p, average, params)
        assert seen.total == 0
        plain = {name: x * (i + 2) for name, x in plain.items()}
        expected = {name: 0.75 * expected[name] + 0.25 * x for name, x in plain.items()}
    x = torch.randn(2 * mesh.size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = mesh.spmd(lambda a, f, x: functional_call(model, fs.gather(a, f), (x,)))(average, frozen, mesh.split(x))
    rest = {name: p for name, p in values_of(model).items() if name not in expected}
    wanted = mesh.split(functional_call(model, {**expected, **rest}, (x,)))  # what this process has
    assert_trees_close(out.flatten(0, -2), wanted.flatten(0, -2), rtol=1e-10, atol=1e-12)
