"""``torch.compile(step, fullgraph=True)``: one graph, and the derivatives of the eager program, not zeros."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call, jvp, vmap
from torch.utils._pytree import tree_map

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.compiling import Counted
from tests.support.differentiated import PROGRAMS, Program, data
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated, slow

KINDS = [*simulated(4, HYBRID), *gloo(2)]
copied: Any = optree.tree_map
EXACT: Any = {"rtol": 1e-12, "atol": 1e-14}
Step = Callable[..., Any]
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def cases(kinds: list[Ranks], names: list[str], quick: set[tuple[str, str]]) -> list[Any]:
    """Every name on every kind of ranks; a graph is compiled for seconds, so all but a few are left to ``-m slow``."""
    return [
        pytest.param(ranks, name, id=f"{ranks}-{name}", marks=() if (str(ranks), name) in quick else pytest.mark.slow)
        for ranks in kinds
        for name in names
    ]


def compiled(step: Step, name: str = "aot_eager") -> tuple[Step, Counted]:
    torch._dynamo.reset()
    backend = Counted(name)
    return torch.compile(step, backend=backend, fullgraph=True), backend


def check(step: Step, mesh: fs.Mesh, params: fs.Sharded, shapes: int) -> None:
    """One graph for two calls with different values, another one for another shape; each as eager."""
    graph, backend = compiled(step)
    calls = ((1, 1, 3), (1, 2, 3), (2, 3, 2), (2, 4, 2))
    for graphs, seed, rows in calls[: 2 * shapes]:
        x = data(mesh, seed, rows)
        result = graph(params, x)
        assert_trees_close(result, step(params, x), **EXACT)
        assert any(bool(leaf.any()) for leaf in optree.tree_leaves(result))
        assert backend.graphs == graphs


def shapes(mesh: fs.Mesh, name: str) -> int:
    """That another shape is another graph depends on none of the axes, nor does it on the kind of ranks: gloo ranks,
    each of which compiles, have it for one program, those of one axis in this process for all."""
    return 2 if len(mesh.axes) == 1 and (mesh.is_simulated or name == "grad") else 1


def whole(mesh: fs.Mesh, name: str) -> None:
    program = Program(mesh)
    check(mesh.spmd(getattr(program, name)), mesh, program.params, shapes(mesh, name))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [*cases(KINDS, PROGRAMS, {("shard=4", "jvp")}), *cases(gloo(HYBRID), ["hvp", "clipped"], set())],
)
def test_a_step_under_spmd_is_one_graph_with_the_numbers_of_the_eager_program(ranks: Ranks, name: str) -> None:
    ranks.run(whole, name)


class Plain(Program):
    """Functions that Dynamo reads: it sees transforms of ``torch.func``, and each function of the library as a call."""

    def one_loss(self, x: Tensor, frozen: fs.Sharded) -> Callable[[fs.Sharded], Tensor]:
        return lambda params: self.loss(fs.combine(params, frozen), x)

    def jvp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        return jvp(self.one_loss(x, frozen), (trainable,), (tree_map(torch.sin, trainable),))

    def hvp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        return jvp(fs.grad(self.one_loss(x, frozen)), (trainable,), (tree_map(torch.cos, trainable),))

    def func_hvp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        return jvp(torch.func.grad(self.one_loss(x, frozen)), (trainable,), (tree_map(torch.cos, trainable),))

    def through_a_gradient(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        loss = self.one_loss(x, frozen)

        def outer(params: fs.Sharded) -> Tensor:
            grads = fs.grad(loss)(params)
            return loss(params) + fs.vdot(grads, grads)

        return fs.grad(outer)(trainable)

    def autograd(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        leaves = {key: shard.detach().requires_grad_() for key, shard in trainable.items()}
        value = self.one_loss(x, frozen)(fs.Sharded(leaves, trainable.layout))
        return list(torch.autograd.grad(value, list(leaves.values())))

    def several(self, params: fs.Sharded, x: Tensor) -> Any:
        loss = lambda x, params: (self.loss(params, x), {"twice": 2 * x})  # noqa: E731
        return fs.grad_and_value(loss, argnums=(1, 0), has_aux=True)(x, params)

    def collectives(self, params: fs.Sharded, x: Tensor) -> Any:
        shard = self.mesh["shard"]
        everything = fs.collectives.all_gather({"x": x}, shard)["x"]
        return fs.collectives.psum(everything, self.mesh), fs.collectives.psum_scatter(everything.sin(), shard)


PLAIN = ["grad", "func_grad", "jvp", "hvp", "func_hvp", "per_sample", "clipped", "autograd", "several", "collectives"]
PLAIN += ["through_a_gradient"]


def plain(mesh: fs.Mesh, name: str) -> None:
    program = Plain(mesh)
    refused = name == "autograd" and TORCH < (2, 12)  # Dynamo reads no requires_grad_ there
    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(Unsupported) if refused else nullcontext():
        check(lambda params, x: getattr(program, name)(params, x), mesh, program.params, shapes(mesh, name))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *cases([*simulated(1), *gloo(2)], PLAIN, {("shard=1", "autograd")}),
        *cases(gloo(HYBRID), ["hvp", "through_a_gradient", "clipped", "collectives"], set()),
    ],
)
def test_a_plain_function_is_one_graph_with_the_numbers_of_the_eager_program(ranks: Ranks, name: str) -> None:
    ranks.run(plain, name)


def trained(mesh: fs.Mesh, backend: str, donate: bool = False, opaque: bool = True) -> None:
    program, opt = Program(mesh), fs.optimizer(torch.optim.AdamW, lr=1e-2)

    def step(params: fs.Sharded, state: Any, x: Tensor, lr: float) -> Any:
        grads, loss = fs.grad_and_value(program.loss)(params, x)
        grads, norm = fs.clip_by_global_norm(grads, 1.0)
        params, state = opt.step(params, grads=grads, state=state, lr=lr, donate=donate)
        return params, state, {"loss": fs.collectives.pmean(loss, mesh), "norm": norm}

    results, numbers = [], None
    eager = mesh.spmd(step) if opaque else step
    graph, counted = compiled(eager, backend)
    for each in (graph, eager):
        params = copied(torch.clone, program.params)
        state = opt.init(params)
        for i in range(4):
            params, state, numbers = each(params, state, data(mesh, i), 0.01 / (i + 1))
            assert isinstance(params, fs.Sharded)
            assert params.layout is program.params.layout
        results.append((params, state, numbers))
    assert counted.graphs == 2  # a float is a constant at first, and from its second value on an input
    assert_trees_close(*results, rtol=1e-6, atol=1e-9)  # capturable arithmetic


@pytest.mark.slow
@on_each(gloo(2))
def test_a_whole_step_of_adamw_takes_sharded_trees_and_returns_them(mesh: fs.Mesh) -> None:
    trained(mesh, "aot_eager")


@pytest.mark.slow
@on_each([*simulated(4), *gloo(HYBRID)])
def test_a_whole_step_of_adamw_on_other_ranks(mesh: fs.Mesh) -> None:
    trained(mesh, "aot_eager")


@pytest.mark.slow
@on_each([*simulated(1), *gloo(2)])
def test_a_step_of_adamw_without_spmd_is_one_graph_too(mesh: fs.Mesh) -> None:
    trained(mesh, "aot_eager", opaque=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@on_each([*simulated(2), *gloo(2)])
def test_a_step_of_adamw_compiled_by_inductor(mesh: fs.Mesh) -> None:
    trained(mesh, "inductor")


@pytest.mark.slow
@on_each([*simulated(2), *gloo(2)])
def test_a_donated_step(mesh: fs.Mesh) -> None:
    trained(mesh, "aot_eager", donate=True)


@on_each([*simulated(2), *slow(gloo(2))])
def test_the_backend_eager_runs_the_calls_themselves(mesh: fs.Mesh) -> None:
    program = Program(mesh)
    step = mesh.spmd(program.clipped) if mesh.is_simulated else program.clipped
    graph, backend = compiled(step, "eager")
    for seed in (1, 2):
        assert_trees_close(graph(program.params, data(mesh, seed)), step(program.params, data(mesh, seed)), **EXACT)
    assert backend.graphs == 1


@on_each([*simulated(2), *gloo(2)])
def test_what_a_graph_cannot_do_is_refused_and_says_what_instead(mesh: fs.Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    params, x = fs.shard(model, fs.plan(model, mesh)), mesh.split(torch.randn(4 * mesh.size, 4))
    written = lambda params, x: functional_call(model, fs.gather(params), (x,)).sum()  # noqa: E731
    read = lambda params, x: fs.gather(params)["0.weight"] * x.sum().item()  # noqa: E731
    drawn = lambda params, x: x + torch.rand(4, generator=torch.Generator())  # noqa: E731
    for step in (written, read, drawn):
        graph, _ = compiled(mesh.spmd(step))
        with pytest.raises(Unsupported, match=r"use fs\.compile"):
            graph(params, x)
    assert not model[1].num_batches_tracked


@on_each(gloo(2))
def test_what_dynamo_would_read_and_communicates_is_refused(mesh: fs.Mesh) -> None:
    graph, _ = compiled(lambda x: mesh["shard"].issue("psum", x).wait())
    with pytest.raises(Unsupported, match=r"Decorate the step with @mesh\.spmd"):
        graph(torch.ones(3))


def test_many_steps_can_be_compiled() -> None:
    mesh = fs.simulated_mesh(2)
    torch._dynamo.reset()
    for i in range(10):
        step = torch.compile(
            mesh.spmd(lambda x, i=i: fs.collectives.psum(x, mesh) * i), backend="eager", fullgraph=True
        )
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0 * i))


def test_a_function_around_a_marked_one_is_not_taken_for_it() -> None:
    from functools import wraps

    mesh = fs.simulated_mesh(2)
    step = mesh.spmd(lambda x: fs.collectives.psum(x, mesh))

    @wraps(step)
    def negative(x: Tensor) -> Tensor:
        return -step(x)

    for fn in (negative, lambda x: negative(x)):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), -2.0))


def test_spmd_leaves_functions_as_they_are_on_real_ranks() -> None:
    mesh = fs.init_mesh()
    fn = vmap(torch.sin)
    assert mesh.spmd(fn) is fn
    assert mesh.spmd(mesh.split).__func__ is fs.Mesh.split
