"""What users of other libraries ask for, row by row: each is a few lines of pure functions here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, vjp

import functorch_shard as fs
from functorch_shard.layout.parts import select_buffers
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of, two_layers
from tests.support.ranks import Ranks, gloo, on_each, simulated

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


# -- layouts ----------------------------------------------------------------------------------------------------------

# Strides of tensors: only values matter, and gathered tensors are row-major.
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


@every_mesh
def test_a_tree_without_parameters_goes_through_everything(mesh: fs.Mesh) -> None:
    layout = fs.plan(nn.ReLU(), mesh)
    params, opt = fs.shard({}, layout), fs.optimizer(torch.optim.AdamW, lr=0.1)
    with count_collectives() as seen:
        assert dict(fs.gather(params)) == dict(fs.scatter_grads({}, layout)) == {}
        again, _ = opt.step(params, grads=fs.scatter_grads({}, layout), state=opt.init(params))
    assert len(again) == seen.total == 0
    assert [len(half) for half in fs.partition(params)] == [0, 0]


def test_one_simulated_rank_is_the_unsharded_model_and_sends_nothing() -> None:
    mesh, model = fs.simulated_mesh(1), two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh))
    x, y = samples(mesh, 5, 3)
    with count_collectives() as seen:
        grads = gradients_on(mesh, model, params, x, y)
    assert seen.total == 0
    assert_close(whole(grads), gradients_of(lambda p: loss_of(model, p, x, y), values_of(model)))


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
def test_small_parameters_stay_whole_when_they_are_named(mesh: fs.Mesh) -> None:
    """DeepSpeed's ``param_persistence_threshold``."""
    model = two_layers().double()
    small = [name for name, p in model.named_parameters() if p.numel() <= 7]
    layout = fs.plan(model, mesh, ignored=small)
    params = fs.shard(model, layout)
    assert {name for name in layout.slots if layout.buffers[layout.key_of[name]].num_shards == 1} >= set(small)
    with count_collectives() as seen:
        fs.gather(params, lazy=False) if mesh.in_spmd else mesh.spmd(lambda p: fs.gather(p, lazy=False))(params)
    assert seen["all_gather"] == (2 if layout.num_shards > 1 else 0)  # the weights
    x, y = samples(mesh, 5, 3)
    grads = gradients_on(mesh, model, params, x, y)
    assert_close(whole(grads), gradients_of(lambda p: loss_of(model, p, x, y), values_of(model)))


# -- gradients --------------------------------------------------------------------------------------------------------


@every_mesh
def test_gradients_are_divided_after_the_sum_and_never_before(mesh: fs.Mesh) -> None:
    """No predivision: a gradient of the smallest number there is would be lost by it."""
    smallest = torch.tensor([2.0**-149] * 3)
    layout = fs.plan({"w": torch.zeros(3)}, mesh)
    rows = smallest if mesh.in_spmd else smallest.expand(*mesh.axes.values(), 3)
    assert_trees_close(whole(fs.scatter_grads({"w": rows}, layout)), {"w": smallest}, rtol=0, atol=0)
    assert mesh.size == 1 or not (smallest / mesh.size)[0]


@every_mesh
def test_what_a_loss_does_not_use_has_zero_gradients_and_stays(mesh: fs.Mesh) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).double()
    params = fs.shard(model, fs.plan(model, mesh))
    (x,) = samples(mesh, 3)

    def gradient(p: fs.Sharded, x: Tensor) -> fs.Sharded:
        return fs.grad(lambda p: nn.functional.linear(x, fs.gather(p)["used.weight"]).square().sum())(p)

    grads = mesh.spmd(gradient)(params, mesh.split(x))
    full = whole(grads)
    assert full["used.weight"].all()
    assert not any(full[name].any() for name in ("used.bias", "unused.weight", "unused.bias"))
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.0)
    stepped = whole(opt.step(params, grads=grads, state=opt.init(params))[0])
    for name in ("used.bias", "unused.weight", "unused.bias"):
        assert torch.equal(stepped[name], values_of(model)[name])
    assert not torch.equal(stepped["used.weight"], values_of(model)["used.weight"])


@every_mesh
def test_a_gradient_of_none_is_zeros_and_a_buffer_of_none_is_left_alone(mesh: fs.Mesh) -> None:
    model = two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh))
    given = {name: torch.ones_like(p) for name, p in values_of(model).items() if name != "0.bias"}
    grads = mesh.spmd(lambda p: fs.scatter_grads({**given, "0.bias": None}, p.layout))(params)
    expected = {**given, "0.bias": torch.zeros(7, dtype=torch.float64)}
    assert_close(whole(grads), {name: expected[name] for name in values_of(model)})
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1)
    some = fs.Sharded({**grads, "2": None}, grads.layout)
    stepped, _ = opt.step(params, grads=some, state=opt.init(params))
    assert torch.equal(stepped["2"], params["2"])
    assert not torch.equal(stepped["0"], params["0"])


@every_mesh
def test_several_forwards_and_then_their_backwards_in_any_order(mesh: fs.Mesh) -> None:
    """Contrastive losses, teachers, GradCache: a forward is a function, and its pullback waits as long as it likes."""
    model = two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh))
    x, y, w = samples(mesh, 5, 5, 3)

    def pulled(params: fs.Sharded, x: Tensor, y: Tensor, w: Tensor) -> fs.Sharded:
        outputs, pulls = [], []
        for given in (x, y):
            out, pull, *_ = vjp(lambda p, given=given: functional_call(model, fs.gather(p), (given,)), params)
            outputs.append(out)
            pulls.append(pull)
        one, two = outputs
        (second,), (first,) = pulls[1](one * w), pulls[0](two * w)  # what d(one * two * w) is by each of them
        return tree_map(torch.add, first, second)

    actual = mesh.spmd(pulled)(params, *mesh.split((x, y, w)))

    def loss(p: Any) -> Tensor:
        return (functional_call(model, p, (x,)) * functional_call(model, p, (y,)) * w).sum()

    expected = gradients_of(lambda p: loss(p) / mesh.size, values_of(model))
    assert_close(whole(actual), expected)


@every_mesh
def test_two_models_train_against_each_other_in_one_step(mesh: fs.Mesh) -> None:
    """A GAN: the critic learns from what the generator makes, the generator through the critic."""
    generator, critic = two_layers((5, 7, 3), 0).double(), two_layers((3, 6, 1), 1).double()
    lr = 0.05

    def made(g: Any, z: Tensor) -> Tensor:
        return functional_call(generator, g, (z,))

    def critic_loss(c: Any, g: Any, x: Tensor, z: Tensor) -> Tensor:
        real, fake = (functional_call(critic, c, (given,)) for given in (x, made(g, z).detach()))
        return (fake - real).tanh().mean() + real.square().mean()

    def generator_loss(g: Any, c: Any, z: Tensor) -> Tensor:
        return -functional_call(critic, c, (made(g, z),)).tanh().mean()

    def step(g: fs.Sharded, c: fs.Sharded, x: Tensor, z: Tensor) -> tuple[fs.Sharded, fs.Sharded]:
        fake = fs.gather(g)
        c_grads = fs.grad(lambda c: critic_loss(fs.gather(c), fake, x, z))(c)
        c = tree_map(lambda p, d: p - lr * d, c, c_grads)
        judge = fs.gather(c)
        g_grads = fs.grad(lambda g: generator_loss(fs.gather(g), judge, z))(g)
        return tree_map(lambda p, d: p - lr * d, g, g_grads), c

    g, c = (fs.shard(model, fs.plan(model, mesh)) for model in (generator, critic))
    plain_g, plain_c = values_of(generator), values_of(critic)
    for i in range(3):
        x, z = samples(mesh, 3, 5, seed=i)
        g, c = mesh.spmd(step)(g, c, *mesh.split((x, z)))
        by_c = gradients_of(lambda c, g=plain_g, x=x, z=z: critic_loss(c, g, x, z), plain_c)
        plain_c = {name: p - lr * by_c[name] for name, p in plain_c.items()}
        by_g = gradients_of(lambda g, c=plain_c, z=z: generator_loss(g, c, z), plain_g)
        assert all(d.any() for grads in (by_c, by_g) for d in grads.values())
        plain_g = {name: p - lr * by_g[name] for name, p in plain_g.items()}
        assert_close((whole(g), whole(c)), (plain_g, plain_c))


# -- whole parameters, parts of them, copies --------------------------------------------------------------------------


@every_mesh
def test_summoning_with_grads_is_the_same_gather_of_gradient_shards(mesh: fs.Mesh) -> None:
    model = two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh))
    x, y = samples(mesh, 5, 3)
    grads = gradients_on(mesh, model, params, x, y)
    assert_trees_close(whole(params), values_of(model), rtol=0, atol=0)
    assert_close(whole(grads), gradients_of(lambda p: loss_of(model, p, x, y), values_of(model)))


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


@every_mesh
def test_every_parameter_can_have_a_learning_rate_of_its_own(mesh: fs.Mesh) -> None:
    """``use_orig_params`` with a parameter group for each: a label for each."""
    model = two_layers().double()
    rates = {name.replace(".", "_"): 0.01 * (i + 1) for i, (name, _) in enumerate(model.named_parameters())}
    layout = fs.plan(model, mesh, labels=lambda name, p: name.replace(".", "_"))
    opt = fs.optimizer(torch.optim.SGD, lr=9.0, momentum=0.9, labels={k: {"lr": lr} for k, lr in rates.items()})
    params = fs.shard(model, layout)
    state = opt.init(params)
    groups = [{"params": [p], "lr": rates[name.replace(".", "_")]} for name, p in model.named_parameters()]
    stock, plain = torch.optim.SGD(groups, lr=9.0, momentum=0.9), dict(model.named_parameters())
    for i in range(3):
        x, y = samples(mesh, 5, 3, seed=i)
        params, state = opt.step(params, grads=gradients_on(mesh, model, params, x, y), state=state)
        for name, grad in gradients_of(lambda p, x=x, y=y: loss_of(model, p, x, y), values_of(model)).items():
            plain[name].grad = grad
        stock.step()
        assert_close(whole(params), values_of(model))


def orthogonal(x: Tensor) -> Tensor:
    """Five steps of Newton and Schulz towards the nearest orthogonal matrix (https://kellerjordan.github.io/posts/muon)."""
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def directions(momentum: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: orthogonal(x) if x.ndim == 2 else x for name, x in momentum.items()}


@every_mesh
def test_muon_on_shards_is_muon_on_whole_matrices(mesh: fs.Mesh) -> None:
    """Momentum on shards, one gather of it, matrices as a whole, and each rank keeps its part: nothing is reduced."""
    model, lr = two_layers().double(), 0.1
    params = fs.shard(model, fs.plan(model, mesh))
    momentum, plain = tree_map(torch.zeros_like, params), values_of(model)
    plain_momentum = {name: torch.zeros_like(x) for name, x in plain.items()}

    def update(params: fs.Sharded, momentum: fs.Sharded, grads: fs.Sharded) -> tuple[fs.Sharded, fs.Sharded]:
        momentum = tree_map(lambda m, g: 0.9 * m + g, momentum, grads)
        step = fs.shard(directions(fs.gather(momentum, lazy=False)), params.layout)
        return tree_map(lambda p, s: p - lr * s, params, step), momentum

    for i in range(4):
        x, y = samples(mesh, 5, 3, seed=i)
        grads = gradients_on(mesh, model, params, x, y)
        with count_collectives() as seen:
            params, momentum = mesh.spmd(update)(params, momentum, grads)
        assert seen.by_kind == ({"all_gather": 2} if params.layout.num_shards > 1 else {})
        by_plain = gradients_of(lambda p, x=x, y=y: loss_of(model, p, x, y), plain)
        plain_momentum = {name: 0.9 * m + by_plain[name] for name, m in plain_momentum.items()}
        plain = {name: p - lr * directions(plain_momentum)[name] for name, p in plain.items()}
        assert_close(whole(params), plain)


class Autoencoder(nn.Module):
    """Something with more to call than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(5, 3), nn.Linear(3, 5)

    def encode(self, x: Tensor) -> Tensor:
        return self.inp(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x))


class Method(nn.Module):
    """``forward`` is a method of another module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self.name)(*args)


def call(module: nn.Module, name: str, parameters: Mapping[str, Tensor], *args: Any) -> Any:
    return functional_call(Method(module, name), {f"module.{key}": x for key, x in parameters.items()}, args)


@every_mesh
def test_any_method_is_a_function_of_gathered_parameters(mesh: fs.Mesh) -> None:
    torch.manual_seed(0)
    model = Autoencoder().double()
    params = fs.shard(model, fs.plan(model, mesh))
    (x,) = samples(mesh, 5)

    def loss(full: Any, x: Tensor) -> Tensor:
        return call(model, "encode", full, x).square().mean()

    codes = mesh.spmd(lambda p, x: call(model, "encode", fs.gather(p), x))(params, mesh.split(x))
    assert_close(codes.flatten(0, -2), mesh_rows(mesh, model.encode(x).detach()))
    grads = mesh.spmd(lambda p, x: fs.grad(lambda p: loss(fs.gather(p), x))(p))(params, mesh.split(x))
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


def experts_on_this_rank(mesh: fs.Mesh) -> tuple[int, dict[str, Any], dict[str, Any]]:
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    experts, inside = (fs.Mesh.from_device_mesh(devices[name]) for name in ("expert", "shard"))
    dense, expert, *_ = dense_and_experts(experts, inside)
    return experts.rank, whole(dense), whole(expert)


@pytest.mark.parametrize("ranks", gloo(4), ids=str)
def test_dense_and_expert_parameters_live_on_slices_of_a_device_mesh(ranks: Ranks) -> None:
    dense, each = expected_of_experts()
    for index, by_dense, by_expert in ranks.run(experts_on_this_rank):
        assert_close((by_dense, by_expert), (dense, each[index]))
