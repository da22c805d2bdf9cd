"""remat with a policy: the same values in every nesting, fewer operators run again, and what is never saved."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import functorch_shard as fs
from functorch_shard.communication.gloo import SOCKET_LIMIT
from functorch_shard.testing import assert_trees_close, count_collectives, run_ranks
from tests.support import convention
from tests.support.convention import TASKS, Side, dot_over_ranks
from tests.support.live_bytes import LiveBytes, settle
from tests.support.pairs import in_pairs
from tests.support.ranks import HYBRID, Ranks, gloo, is_batched, sequential, simulated
from tests.support.refusals import refused
from tests.support.rematting import POLICIES, PRODUCTS, WAYS, Operators, plainly

aten = torch.ops.aten
KINDS = [*simulated(3), *gloo(2)]
MORE = [*simulated(HYBRID), *sequential(2, HYBRID), *gloo(HYBRID)]
WRAPS: dict[str, Callable[[Any], Any]] = {"plain": plainly, "remat": fs.remat, **POLICIES}


def everything(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


def derived(mesh: fs.Mesh, way: str, wrap: str) -> dict[str, fs.Full]:
    loss = partial(WAYS[way], WRAPS[wrap])
    tasks = [task for task in TASKS if task != "through three steps" or is_batched(mesh)]
    return convention.on_mesh(mesh, Side(loss, fs.grad(loss), fs.grad, dot_over_ranks, fs.global_norm), tasks)


@in_pairs(way=WAYS, policy=POLICIES, ranks=KINDS, more=MORE)
def test_derivatives_through_gradients_steps_and_penalties_are_bitwise_those_without_a_policy(
    way: str, policy: str, ranks: Ranks
) -> None:
    for actual, expected in zip(ranks.run(derived, way, policy), ranks.once(derived, way, "remat"), strict=True):
        assert_trees_close(actual, expected, rtol=0, atol=0)


DERIVED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "fs.grad": lambda loss, p, v: fs.grad(loss)(p),
    "torch.func.grad": lambda loss, p, v: grad(loss)(p),
    "forward over reverse": lambda loss, p, v: jvp(fs.grad(loss), (p,), (v,))[1],
    "reverse over forward": lambda loss, p, v: fs.grad(lambda p: jvp(loss, (p,), (v,))[1])(p),
    "reverse over reverse": lambda loss, p, v: fs.grad(lambda p: _dot(fs.grad(loss)(p), v))(p),
}
# How often a part runs after its first run.
RUNS_AGAIN = {
    "fs.grad": 1,
    "torch.func.grad": 1,
    "forward over reverse": 3,
    "reverse over forward": 3,
    "reverse over reverse": 3,
}


def _dot(a: list[fs.Sharded], b: list[fs.Sharded]) -> Tensor:
    return torch.stack([fs.vdot(x, y) for x, y in zip(a, b, strict=True)]).sum()


torch.manual_seed(0)
BLOCKS = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()).double() for _ in range(3)]


def ran(mesh: fs.Mesh, wrap: str, derive: str, lazy: bool | None) -> Any:
    """The derivative through three parts that gather inside, how many products ran, and what was communicated."""
    params = [fs.shard(dict(block.named_parameters()), fs.plan(block, mesh)) for block in BLOCKS]
    v = [fs.randn_like(own, i) for i, own in enumerate(params)]
    x = mesh.split(torch.linspace(-1, 1, 24 * mesh.size, dtype=torch.float64).unflatten(0, (-1, 6)))

    def loss(params: list[fs.Sharded], x: Tensor) -> Tensor:
        for block, own in zip(BLOCKS, params, strict=True):
            x = WRAPS[wrap](partial(called, block, lazy))(own, x)
        return x.square().mean()

    torch.manual_seed(1)
    with Operators() as operators, count_collectives() as seen:
        value = mesh.spmd(lambda p, v, x: DERIVED[derive](lambda p: loss(p, x), p, v))(params, v, x)
    return value, operators.products, dict(seen.by_kind)


def called(block: nn.Module, lazy: bool | None, own: fs.Sharded, x: Tensor) -> Tensor:
    return functional_call(block, fs.gather(own, lazy=lazy), (x,))


@in_pairs(derive=DERIVED, lazy=[None, False], policy=POLICIES, ranks=KINDS, more=MORE)
def test_no_saved_product_is_computed_again(derive: str, lazy: bool | None, policy: str, ranks: Ranks) -> None:
    each = len(BLOCKS) * (ranks.size if ranks.kind == "sequential" else 1)  # products that all parts have
    results = (ranks.once(ran, wrap, derive, lazy) for wrap in ("plain", "remat", policy))
    for (plain, once, _), (expected, again, kinds), (actual, saved, fewer) in zip(*results, strict=True):
        assert_trees_close(actual, expected, rtol=0, atol=0)
        assert_trees_close(actual, plain, rtol=1e-10, atol=1e-13)
        assert again - saved == RUNS_AGAIN[derive] * each
        assert saved == once or derive not in ("fs.grad", "torch.func.grad")
        assert all(fewer[kind] <= number for kind, number in kinds.items())  # a lazy unit that is not used again
        assert fewer["psum_scatter"] == kinds["psum_scatter"]


WIDTH, SAMPLES, PARTS = 64, 512, 6
BOUNDARY = 8 * WIDTH * SAMPLES  # bytes of what goes into a part


def deep(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(8):
        x = (x * w).sin()
    return x


SINES = partial(fs.remat, policy=[aten.sin.default])


def live_bytes(wrap: Any, simulate: bool) -> list[int]:
    """What is alive at the end of forward, and the most in backward, beside what was before."""
    mesh = fs.simulated_mesh(2) if simulate else fs.init_mesh()
    weights = {"w": torch.ones(PARTS, WIDTH, dtype=torch.float64)}
    params = fs.shard(weights, fs.plan(weights, mesh))
    x, live = mesh.split(torch.ones(SAMPLES, WIDTH, dtype=torch.float64)), LiveBytes()

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        for w in fs.gather(params)["w"].unbind():
            x = wrap(deep)(x, w)
        live.mark("backward")
        return x.sum()

    with live:
        live.mark("start")
        mesh.spmd(fs.grad(loss))(params, x)
        live.mark("end")
    return [live.at("backward") - live.at("start"), live.peak("backward", "end") - live.at("start")]


@pytest.mark.parametrize("simulate", [False, True])
def test_memory_is_that_of_what_is_saved_more(simulate: bool) -> None:
    forward, backward = live_bytes(fs.remat, simulate)
    forward_with, backward_with = live_bytes(SINES, simulate)
    assert live_bytes(plainly, simulate)[0] >= PARTS * 16 * BOUNDARY
    more = PARTS * 8 * BOUNDARY
    last = BOUNDARY  # of each part the result, which without a policy is what goes into the next
    assert more - PARTS * last <= forward_with - forward <= more
    assert backward_with - backward <= more


NUMEL = 128 * 512


def kept_of_parameters(wrap: str, lazy: bool | None, simulate: bool) -> int:
    """Bytes that forward keeps of one part, in which two casts of a whole parameter and their product are computed."""
    gc.disable()
    mesh = fs.simulated_mesh(2) if simulate else fs.init_mesh()
    values = {"w": torch.ones(128, 512)}
    params = fs.shard(values, fs.plan(values, mesh))
    x, live = mesh.split(torch.ones(2 * mesh.size, 128)), LiveBytes()

    def part(params: fs.Sharded, x: Tensor) -> Tensor:
        w = fs.gather(params, lazy=lazy)["w"]
        return x.double() @ (w.double() * w.sin().double())

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        y = WRAPS[wrap](part)(params, x)
        live.mark("end of forward")
        return y.square().sum()

    if not simulate:
        mesh["shard"].issue("all_gather", torch.empty(SOCKET_LIMIT)).wait()  # opens the files of all ranks
        settle()
    with live:
        live.mark("start")
        mesh.spmd(fs.grad(loss))(params, x)
        live.mark("end")
    return live.at("end of forward") - live.at("start")


@pytest.mark.parametrize(("simulate", "lazy"), [(True, None), (True, False), (False, None)])
def test_what_is_computed_from_parameters_alone_is_not_saved(simulate: bool, lazy: bool | None) -> None:
    def kept(wrap: str) -> int:
        if simulate:
            return kept_of_parameters(wrap, lazy, True)
        return max(run_ranks(kept_of_parameters, 2, wrap, lazy, False))

    assert kept("plain") - kept("remat") > 8 * NUMEL
    assert kept("everything saved") - kept("remat") < NUMEL / 4


def test_it_saves_what_checkpoint_saves_by_the_same_policy() -> None:
    def part(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (2, 3)).expand(3, -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v).sin() @ w[:3]

    x, w = torch.randn(2, 5, 6, dtype=torch.float64).unbind()[0], torch.randn(6, 6, dtype=torch.float64)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    for policy in ([*PRODUCTS], [attention], [*PRODUCTS, attention, aten.sin.default], [], everything):
        contexts: Any = partial(create_selective_checkpoint_contexts, policy)
        ways = [
            lambda x, w: checkpoint(part, x, w, use_reentrant=False, context_fn=contexts, early_stop=False),  # noqa: B023
            fs.remat(part, policy=policy),
        ]
        results = []
        for way in ways:
            with Operators() as operators:
                leaf = w.clone().requires_grad_()
                way(x, leaf).square().sum().backward()
            results.append((leaf.grad, operators.products, operators.ran["sin"], operators.ran[attention._opname]))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:], policy


W, V = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
WRITING: dict[str, Callable[[Tensor], Tensor]] = {
    "to a saved result": lambda w: (w @ V).relu_() @ w,
    "to a view of one": lambda w: _with_row(w @ V, w.sum()) @ w,
    "twice": lambda w: (w @ V).add_(1).mul_(w) @ w,
    "to the first of two that are equal": lambda w: (w @ V).relu_() @ (w @ V),
    "to the second of two that are equal": lambda w: (w @ V) @ (w @ V).relu_() @ (w @ V),
}


def _with_row(x: Tensor, value: Tensor) -> Tensor:
    x[0] = value
    return x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("writing", WRITING)
def test_the_function_may_write_to_what_was_saved(writing: str, policy: str) -> None:
    for derive in DERIVED.values():
        expected, actual = (
            (
                derive(lambda p: wrap(WRITING[writing])(p[0]["w"]).square().sum(), [{"w": W}], [{"w": V}])  # noqa: B023
                for wrap in (fs.remat, POLICIES[policy])
            )
            if derive is not DERIVED["reverse over reverse"]
            else (0, 0)
        )
        assert_trees_close(actual, expected, rtol=0, atol=0)


def test_a_write_to_a_result_that_was_saved_is_refused() -> None:
    w = W.clone().requires_grad_()
    with torch.no_grad():
        saved = fs.remat(lambda w: w @ V, policy=PRODUCTS)
    y = saved(w)
    y.detach().add_(1)
    assert "modified by an inplace operation" in refused(lambda: y.square().sum().backward())

    def loss(w: Tensor) -> Tensor:
        y = saved(w)
        value = y.sin().sum()
        y.detach().add_(1)
        return value

    assert "inplace" in refused(grad(loss), W) or "written to in place" in refused(grad(loss), W)


def test_constants_and_random_numbers_inside_of_a_part_are_the_same_again() -> None:
    def part(w: Tensor) -> Tensor:
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        noise = torch.rand(3, 3, dtype=w.dtype) + torch.randn_like(w) + torch.empty(3, 3, dtype=w.dtype).normal_()
        scaled = (w @ V).masked_fill(~mask, -1.0) * noise * torch.tensor([2.0, 3.0, 4.0], dtype=w.dtype)
        return F.dropout(scaled @ w, 0.5) @ w

    for derive in (fs.grad, grad, lambda f: lambda w: jvp(grad(f), (w,), (V,))[1]):
        results = []
        for wrap in (plainly, *POLICIES.values()):
            torch.manual_seed(0)
            with Operators() as operators:
                value = derive(lambda w: wrap(part)(w).sum())(W)  # noqa: B023
            results.append((value, operators.products, torch.get_rng_state()))
        for value, products, state in results[1:]:
            assert_trees_close(value, results[0][0], rtol=1e-12, atol=1e-12)
            assert torch.equal(state, results[0][2])
            assert derive not in (fs.grad, grad) or products == results[0][1]


def of_collectives(mesh: fs.Mesh, wrap: str) -> Tensor:
    """Sums over ranks of what rank 0 passes the same of twice, and the others do not."""

    def part(w: Tensor) -> Tensor:
        first, second = (x if mesh.rank else w for x in (w.sin(), w.cos()))
        return (fs.collectives.psum(first, mesh) @ V) * (fs.collectives.psum(second, mesh) @ V)

    return jvp(lambda w: fs.grad(lambda w: WRAPS[wrap](part)(w).square().sum())(w), (W,), (V,))[1]


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_other_ranks_pass_is_not_taken_for_known(policy: str, ranks: Ranks) -> None:
    for actual, expected in zip(ranks.run(of_collectives, policy), ranks.once(of_collectives, "remat"), strict=True):
        assert expected.any()
        assert_trees_close(actual, expected, rtol=0, atol=0)


def test_saved_results_go_where_saved_tensors_hooks_put_them() -> None:
    packed: list[Tensor] = []
    part = fs.remat(lambda w: (w @ V).sin(), policy=PRODUCTS)
    w = W.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(x), x.clone())[1], lambda x: x):
        value = part(w)
    assert any(torch.equal(x, W @ V) for x in packed)
    assert_trees_close(torch.autograd.grad(value.sum(), w)[0], grad(lambda w: (w @ V).sin().sum())(W))


def test_what_is_saved_is_let_go_as_backward_proceeds() -> None:
    w = W.clone().requires_grad_()
    value = fs.remat(lambda w: (w @ V).sin(), policy=PRODUCTS)(w).sum()
    node = value.grad_fn.next_functions[0][0]
    assert any(torch.equal(x, W @ V) for x in node.saved_tensors)
    value.backward()
    assert "freed" in refused(lambda: node.saved_tensors)


def test_a_policy_is_a_list_of_operators_or_a_function_that_decides() -> None:
    def run(policy: Any) -> Any:
        return grad(fs.remat(lambda w: (w @ V).sum(), policy=policy))(W)

    assert "with their overload: torch.ops.aten.mm.default" in refused(run, [aten.mm])
    assert "expected MUST_SAVE, PREFER_SAVE" in refused(run, lambda context, op, *args: "save")
    assert "save_on_cpu" in refused(run, lambda context, op, *args: None)
    for decision in (*(x for x in CheckpointPolicy if "OFFLOAD" not in x.name), True, False):
        assert_trees_close(run(lambda context, op, *args: decision), grad(lambda w: (w @ V).sum())(W))  # noqa: B023
