"""What users of other libraries ask for, row by row: each is a few lines of pure functions here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.layout.layout import select_buffers
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of, two_layers
from tests.support.ranks import gloo, on_each, simulated

Tree = Any
every_mesh = on_each([*simulated(5, {"replicate": 2, "shard": 3}), *gloo(2)])
tree_map: Any = optree.tree_map  # its type knows no trees of other libraries


def samples(mesh: fs.Mesh, *sizes: int, seed: int = 1) -> tuple[Tensor, ...]:
    """A global batch, two samples a rank, different on all of them."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2 * mesh.size, n, generator=generator, dtype=torch.float64) for n in sizes)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients_of(loss: Callable[[dict[str, Tensor]], Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return torch.func.grad(loss)(dict(values))


def whole(tree: fs.Sharded) -> dict[str, Tensor]:
    return dict(fs.gather(tree, lazy=False))


def assert_close(actual: Tree, expected: Tree) -> None:
    assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)


def gradients_on(mesh: fs.Mesh, model: nn.Module, params: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
    def gradient(p: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        return fs.grad(lambda p: loss_of(model, fs.gather(p), x, y))(p)

    return mesh.spmd(gradient)(params, *mesh.split((x, y)))


IN_MEMORY: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3, dtype=torch.float64).T,
    "channels_last": lambda: torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last),
    "one by one, channels_last": lambda: torch.randn(4, 3, 1, 1, dtype=torch.float64).to(
        memory_format=torch.channels_last
    ),
    "every second column": lambda: torch.randn(3, 8, dtype=torch.float64)[:, ::2],
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
    assert_close(whole(grads), {name: 3 * x**2 for name, x in values.items()})


# -- layouts ----------------------------------------------------------------------------------------------------------

# Strides of tensors: only values matter, and gathered tensors are row-major.


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


# -- gradients --------------------------------------------------------------------------------------------------------


@every_mesh
def test_gradients_are_divided_after_the_sum_and_never_before(mesh: fs.Mesh) -> None:
    """No predivision: a gradient of the smallest number there is would be lost by it."""
    smallest = torch.tensor([2.0**-149] * 3)
    layout = fs.plan({"w": torch.zeros(3)}, mesh)
    rows = smallest if mesh.in_spmd else smallest.expand(*mesh.axes.values(), 3)
    assert_trees_close(whole(fs.scatter_grads({"w": rows}, layout)), {"w": smallest}, rtol=0, atol=0)
    assert mesh.size == 1 or not (smallest / mesh.size)[0]


# -- whole parameters, parts of them, copies --------------------------------------------------------------------------


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
def test_a_copy_of_parameters_and_state_trains_by_itself(mesh: fs.Mesh) -> None:
    """deepcopy and pickle of what is trained: no module, no hooks, nothing that remembers."""
    model, opt = two_layers().double(), fs.optimizer(torch.optim.AdamW, lr=0.1)
    params = fs.shard(model, fs.plan(model, mesh))
    x, y = samples(mesh, 5, 3)
    params, state = opt.step(params, grads=gradients_on(mesh, model, params, x, y), state=opt.init(params))
    copied = copy.deepcopy((params, state))
    thawed = tree_map(lambda x: x, pickle.loads(pickle.dumps(params)))
    thawed = fs.Sharded(thawed, params.layout)
    before = whole(params)
    stepped = opt.step(copied[0], grads=gradients_on(mesh, model, copied[0], x, y), state=copied[1], donate=True)[0]
    for kept in (params, thawed):
        assert_trees_close(whole(kept), before, rtol=0, atol=0)
    expected = opt.step(params, grads=gradients_on(mesh, model, params, x, y), state=state)[0]
    assert_trees_close(whole(stepped), whole(expected), rtol=0, atol=0)


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
    (x,) = samples(mesh, 5)
    out = mesh.spmd(lambda a, f, x: functional_call(model, fs.gather(a, f), (x,)))(average, frozen, mesh.split(x))
    rest = {name: p for name, p in values_of(model).items() if name not in expected}
    assert_close(out.flatten(0, -2), mesh_rows(mesh, functional_call(model, {**expected, **rest}, (x,))))


def mesh_rows(mesh: fs.Mesh, rows: Tensor) -> Tensor:
    """Of the results for a global batch, those that this process has."""
    return mesh.split(rows).flatten(0, -2)


# -- control over each parameter --------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Something with more to call than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(5, 3), nn.Linear(3, 5)

    def encode(self, x: Tensor) -> Tensor:
        return self.inp(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x))


@every_mesh
def test_any_method_is_a_function_of_gathered_parameters(mesh: fs.Mesh) -> None:
    torch.manual_seed(0)
    model = Autoencoder().double()
    params = fs.shard(model, fs.plan(model, mesh))
    (x,) = samples(mesh, 5)

    def loss(p: Any, x: Tensor) -> Tensor:
        return fs.bind(model, p).encode(x).square().mean()

    codes = mesh.spmd(lambda p, x: fs.bind(model, p).encode(x))(params, mesh.split(x))
    assert_close(codes.flatten(0, -2), mesh_rows(mesh, model.encode(x).detach()))
    grads = mesh.spmd(fs.grad(loss))(params, mesh.split(x))
    assert_close(whole(grads), gradients_of(lambda p: loss(p, x), values_of(model)))
    assert whole(grads)["inp.weight"].all()
    assert not whole(grads)["out.weight"].any()


class Mixture(nn.Module):
    """A layer that everyone has, and an expert that a part of the ranks has."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.dense(x).tanh())


def mixtures() -> list[Mixture]:
    """One model an expert; the dense layer is the same in both."""
    torch.manual_seed(0)
    first, second = Mixture().double(), Mixture().double()
    second.dense.load_state_dict(first.dense.state_dict())
    return [first, second]


def of(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {name: x for name, x in values_of(model).items() if name.startswith(prefix)}


def dense_and_experts(experts: fs.Mesh, inside: fs.Mesh) -> tuple[fs.Sharded, fs.Sharded, fs.Layout, fs.Layout]:
    """Gradients of a dense layer cut over ``experts``, and of the experts, each cut over the ranks ``inside``."""
    models = mixtures()
    dense_layout = fs.plan(of(models[0], "dense"), experts, shard_axis="expert")
    layout = fs.plan(of(models[0], "expert"), inside)
    dense = fs.shard(of(models[0], "dense"), dense_layout)
    if experts.is_simulated:
        each = [fs.shard(of(model, "expert"), layout) for model in models]
        expert: fs.Sharded = tree_map(lambda *rows: torch.stack(rows), *each)
    else:
        expert = fs.shard(of(models[experts.rank], "expert"), layout)
    x, y = expert_samples()
    rows = (x, y) if experts.is_simulated else (x[experts.rank, inside.rank], y[experts.rank, inside.rank])

    def loss(dense: fs.Sharded, expert: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        full = {**fs.gather(dense), **fs.gather(expert)}
        return loss_of(models[0], full, x, y)

    def gradients(dense: fs.Sharded, expert: fs.Sharded, x: Tensor, y: Tensor) -> tuple[fs.Sharded, fs.Sharded]:
        by_dense, by_expert = fs.grad(loss, argnums=(0, 1))(dense, expert, x, y)
        # each gather has averaged over its own mesh: what is left is the mean over the other one, of zeros for experts
        return fs.collectives.pmean(by_dense, inside), tree_map(lambda g: g / experts.size, by_expert)

    each_rank = inside.spmd(gradients, in_dims=(None, 0, 0, 0))
    return *experts.spmd(each_rank)(dense, expert, *rows), dense_layout, layout


def expert_samples() -> tuple[Tensor, Tensor]:
    """For each expert and each of its two ranks."""
    generator = torch.Generator().manual_seed(8)
    return tuple(torch.randn(2, 2, 4, n, generator=generator, dtype=torch.float64) for n in (5, 3))  # pyright: ignore[reportReturnType]


def expected_of_experts() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """By a plain loop: the mean of four losses, by the dense layer and by each expert."""
    models, (x, y) = mixtures(), expert_samples()
    dense, experts = of(models[0], "dense"), [of(model, "expert") for model in models]

    def total(dense: dict[str, Tensor], experts: list[dict[str, Tensor]]) -> Tensor:
        losses = [
            loss_of(models[0], {**dense, **experts[e]}, x[e, rank], y[e, rank]) for e in range(2) for rank in range(2)
        ]
        return torch.stack(losses).mean()

    return torch.func.grad(total, argnums=(0, 1))(dense, experts)


def test_dense_and_expert_parameters_live_on_meshes_of_their_own() -> None:
    experts, inside = fs.simulated_mesh({"expert": 2}), fs.simulated_mesh(2)
    by_dense, by_expert, dense_layout, layout = dense_and_experts(experts, inside)
    dense, each = expected_of_experts()
    for rank in range(2):  # pmean has made them equal
        rows = fs.Sharded({key: x[:, rank] for key, x in by_dense.items()}, dense_layout)
        assert_close(whole(rows), dense)
    for expert in range(2):
        rows = fs.Sharded({key: x[expert] for key, x in by_expert.items()}, layout)
        assert_close(whole(rows), each[expert])
    assert not torch.allclose(each[0]["expert.weight"], each[1]["expert.weight"])
