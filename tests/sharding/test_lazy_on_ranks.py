"""A lazy gather on real ranks computes, bitwise, what a gather of everything does, at a known price in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, linearize

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.laws.tasks import ON_RANK, Data, on_mesh
from tests.support.lazy_uses import (
    USES,
    Block,
    Gather,
    at_once,
    blocks,
    delayed_training_on_this_rank,
    exceptions_on_this_rank,
    gradients,
    input_of,
    leaves_of,
    run_blocks,
    same_jacobians_on_this_rank,
    tree_map,
    use_on_this_rank,
)
from tests.support.models import awkward, loss_of, two_layers
from tests.support.pool import run_ranks


def same_derivatives_on_this_rank() -> None:
    mesh = fs.init_mesh()
    lazy = on_mesh(mesh, Data(mesh.size), list(ON_RANK))
    with patch.object(fs, "gather", at_once):
        expected = on_mesh(mesh, Data(mesh.size), list(ON_RANK))
    assert_trees_close(lazy, expected, rtol=0, atol=0)


def test_every_derivative_is_bitwise_that_of_a_gather_at_once() -> None:
    run_ranks(same_derivatives_on_this_rank, 2)


def test_jacobians_and_hessians_are_bitwise_those_of_a_gather_at_once() -> None:
    run_ranks(same_jacobians_on_this_rank, 2)


def linearized_on_this_rank() -> None:
    mesh, model = fs.init_mesh(), two_layers((2, 3, 1)).double()
    params = fs.shard(model, fs.plan(model, mesh))
    x, y = input_of(mesh.rank)[:, :2], input_of(mesh.rank)[:, 2:3]
    for gather in (fs.gather, at_once):

        def loss(p: fs.Sharded, gather: Any = gather) -> Tensor:
            return loss_of(model, gather(p), x, y)

        value, along = linearize(loss, params)
        for seed in (1, 2):
            tangent = fs.randn_like(params, seed)
            expected = jvp(loss, (params,), (tangent,))
            assert_trees_close((value, along(tangent)), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of any tensor that is closed over
def test_what_linearize_records_is_the_jvp_along_other_tangents() -> None:
    run_ranks(linearized_on_this_rank, 2)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "labels": {"labels": lambda name, x: "bias" if name.endswith("bias") else None},
    "two units": {"units": [["inp", "blocks.0"], ["blocks.1", "out"]]},
    "sum": {"reduction": "sum"},
    "mixed precision": {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)},
}


def train(mesh: fs.Mesh, gather: Gather, **options: Any) -> list[Any]:
    """SGD with momentum: the loss and the parameters after each step."""
    model = awkward()
    params = fs.shard(model, fs.plan(model, mesh, **options))
    opt = fs.optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)
    state, history = opt.init(params), []
    dtype = torch.bfloat16 if "precision" in options else torch.float64
    for i in range(6):
        x, y = input_of(10 * i + mesh.rank).to(dtype), input_of(10 * i + mesh.rank)[:, :3].to(dtype)
        grads, loss = fs.grad_and_value(lambda p, x=x, y=y: loss_of(model, gather(p), x, y))(params)
        params, state = opt.step(params, grads=grads, state=state)
        history += [loss, dict(params)]
    return history


def train_on_this_rank(axes: dict[str, int], name: str) -> tuple[list[Any], list[Any]]:
    mesh = fs.init_mesh(axes)
    expected = train(mesh, at_once, **PLANS[name])
    for reshard in (True, False):
        actual = train(mesh, fs.gather, **PLANS[name], reshard_after_forward=reshard)
        assert_trees_close(actual, expected, rtol=0, atol=0)
    return expected[0], expected[-2]


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"shard": 2}, "plain"),
        ({"shard": 3}, "plain"),
        ({"replicate": 2, "shard": 2}, "labels"),
        *(({"shard": 2}, name) for name in PLANS if name != "plain"),
    ],
    ids=str,
)
def test_training_is_bitwise_the_same_resharded_kept_and_gathered_at_once(axes: dict[str, int], name: str) -> None:
    for first, last in run_ranks(train_on_this_rank, fs.simulated_mesh(axes).size, axes, name):
        assert last < 0.9 * first


@pytest.mark.parametrize("name", USES)
def test_every_use_of_autograd_is_bitwise_that_of_a_gather_at_once(name: str) -> None:
    run_ranks(use_on_this_rank, 2, name, True)


@pytest.mark.parametrize("name", ["blocks used again", "double backward", "without gradients"])
def test_units_that_are_kept_compute_the_same(name: str) -> None:
    run_ranks(use_on_this_rank, 2, name, False)


def two_gathers_on_this_rank() -> tuple[fs.Sharded, fs.Sharded]:
    mesh, model = fs.init_mesh(), blocks()
    params = fs.shard(model, fs.plan(model, mesh))
    x = input_of(mesh.rank)

    def first(p: fs.Sharded) -> Any:
        return run_blocks(model, fs.gather(p), x).square().sum()

    def second(p: fs.Sharded) -> Any:
        return run_blocks(model, fs.gather(p), x.sin()).sum()

    both = fs.grad(lambda p: first(p) + second(p))(params)
    return both, tree_map(torch.add, fs.grad(first)(params), fs.grad(second)(params))


def test_a_shard_in_two_gathers_receives_both_gradients() -> None:
    for both, expected in run_ranks(two_gathers_on_this_rank, 2):
        assert_trees_close(both, expected, rtol=1e-12, atol=1e-12)
        assert all(grad.abs().max() > 0 for grad in both.values())


def test_after_an_exception_nothing_stays_and_the_next_call_is_right() -> None:
    run_ranks(exceptions_on_this_rank, 2)


def stopped_backward_on_this_rank() -> None:
    mesh, model = fs.init_mesh(), blocks()
    params, x, stopping, grads = fs.shard(model, fs.plan(model, mesh)), input_of(mesh.rank), [True], []

    def stop(grad: Tensor) -> None:
        if stopping.pop():
            raise ArithmeticError

    for gather in (fs.gather, at_once):
        leaves = leaves_of(params)
        full = gather(leaves)
        middle = run_blocks(model, full, x, [0, 1])
        if gather is fs.gather:
            middle.register_hook(stop)
        out = run_blocks(model, full, middle, [2, 3])
        if gather is fs.gather:
            with pytest.raises(ArithmeticError):
                out.square().sum().backward(retain_graph=True)
            stopping.append(False)
        out.cos().sum().backward()
        grads.append(gradients(leaves))
    assert_trees_close(grads[0], grads[1], rtol=0, atol=0)


def test_a_backward_that_was_stopped_leaves_nothing_to_the_next_one_of_the_same_gather() -> None:
    run_ranks(stopped_backward_on_this_rank, 2)


NUM_UNITS = 5


def traffic_on_this_rank(reshard: bool) -> dict[str, list[tuple[str, str]]]:
    """Collectives as they were issued, with the units they were for."""
    mesh, model = fs.init_mesh(), blocks(NUM_UNITS)
    layout = fs.plan(model, mesh, reshard_after_forward=reshard)
    params, x = fs.shard(model, layout), input_of(mesh.rank)

    def loss(p: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(p), (x,)).square().sum()

    leaves = leaves_of(params)
    with count_collectives() as by_grad:
        fs.grad(loss)(params)
    with count_collectives() as by_backward:
        loss(leaves).backward()
    with count_collectives() as evaluating, torch.no_grad():
        loss(leaves)
    with count_collectives() as inferring, torch.inference_mode():
        loss(params)
    counters = {"grad": by_grad, "backward": by_backward, "no_grad": evaluating, "inference": inferring}
    return {name: _by_unit(counter.issued, layout) for name, counter in counters.items()}


def _by_unit(issued: Sequence[Any], layout: fs.Layout) -> list[tuple[str, str]]:
    """Operands are whole buffers, or shards of them."""
    units = {b.shard_numel: b.key for b in layout.buffers.values()}
    units |= {b.numel: b.key for b in layout.buffers.values()}
    assert len(units) == 2 * len(layout.buffers)
    return [(collective.kind, units[collective.numel]) for collective in issued]


def _units(issued: list[tuple[str, str]], kind: str) -> list[int]:
    return [int(key.partition("/")[0]) for name, key in issued if name == kind]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_costs_no_more_messages_than_the_last_two_units_allow(reshard: bool) -> None:
    forward = list(range(NUM_UNITS))
    again = [2, 1, 0] if reshard else []
    first, second = run_ranks(traffic_on_this_rank, 2, reshard)
    assert first == second
    for name in ("grad", "backward"):
        assert _units(first[name], "all_gather") == forward + again
        assert _units(first[name], "psum_scatter") == forward[::-1]
        assert len(first[name]) == len(forward + again + forward)
    for name in ("no_grad", "inference"):
        assert first[name] == [("all_gather", str(unit)) for unit in forward]


def embedding_on_this_rank() -> list[tuple[str, int]]:
    mesh = fs.init_mesh()
    model = nn.Sequential(nn.Embedding(11, 5), *blocks()).double()
    layout = fs.plan(model, mesh)
    params, tokens = fs.shard(model, layout), torch.tensor([[1, 3], [10, mesh.rank]])
    with count_collectives() as seen:
        fs.grad(lambda p: functional_call(model, fs.gather(p), (tokens,)).sum())(params)
    return [(kind, int(unit)) for kind, unit in _by_unit(seen.issued, layout)]


def test_what_backward_has_no_use_for_is_not_gathered_again() -> None:
    for issued in run_ranks(embedding_on_this_rank, 2):
        assert [unit for kind, unit in issued if kind == "all_gather"] == [0, 1, 2, 3, 4, 2, 1]
        assert [unit for kind, unit in issued if kind == "psum_scatter"] == [4, 3, 2, 1, 0]


class Rooted(nn.Module):
    """A language model: blocks, and what is used before and after them, which lies around them or before them."""

    def __init__(self, head_first: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 5)
        if head_first:
            self.head = nn.Linear(5, 11, bias=not tied)  # of another size than the embedding
        self.blocks = nn.ModuleList([Block(5, 9 + i) for i in range(3)])
        if not head_first:
            self.head = nn.Linear(5, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rooted_on_this_rank(name: str) -> list[tuple[str, str]]:
    """A step's collectives, with the units they were for; the step is that of a gather at once."""
    mesh, model = fs.init_mesh(), Rooted(head_first=name == "before", tied=name == "tied").double()
    layout = fs.plan(model, mesh, units="auto" if name in ("tied", "apart") else Block)
    params, tokens = fs.shard(model, layout), torch.tensor([[1, 3], [10, mesh.rank]])

    def loss(params: fs.Sharded, gather: Gather) -> Tensor:
        return functional_call(model, gather(params), (tokens,)).square().sum()

    with count_collectives() as seen:
        step = fs.grad_and_value(loss)(params, fs.gather)
    assert_trees_close(step, fs.grad_and_value(loss)(params, at_once), rtol=0, atol=0)
    return _by_unit(seen.issued, layout)


@pytest.mark.parametrize(
    ("name", "gathers"),
    [
        ("around", "root 0 1 2 root 1 0"),
        ("before", "root 0 1 2 root 1 0"),
        ("tied", "embed 0 1 2 embed 1 0"),
        ("apart", "embed 0 1 2 head 1 0"),
    ],
)
def test_a_unit_that_is_used_first_and_last_is_gathered_twice_and_nothing_for_nothing(name: str, gathers: str) -> None:
    first, second = run_ranks(rooted_on_this_rank, 2, name)
    assert first == second

    def short(key: str) -> Any:
        return key.strip("()").removeprefix("blocks.")

    assert " ".join(short(key) for kind, key in first if kind == "all_gather") == gathers
    reduced = [short(key) for kind, key in first if kind == "psum_scatter"]
    assert sorted(reduced) == sorted(set(gathers.split()))


def frozen_front_on_this_rank() -> list[tuple[str, str]]:
    mesh, model = fs.init_mesh(), blocks(NUM_UNITS)
    for block in list(model)[:2]:
        block.requires_grad_(False)
    layout = fs.plan(model, mesh)
    params = fs.shard(model, layout)
    with count_collectives() as seen:
        fs.grad(lambda p: functional_call(model, fs.gather(p), (input_of(mesh.rank),)).square().sum())(params)
    return _by_unit(seen.issued, layout)


def test_frozen_units_in_front_are_not_gathered_again() -> None:
    for issued in run_ranks(frozen_front_on_this_rank, 2):
        assert _units(issued, "all_gather") == [0, 1, 2, 3, 4, 2]
        assert _units(issued, "psum_scatter") == [4, 3, 2]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_sends_in_the_same_order_whatever_holds_it_up(num_ranks: int) -> None:
    results = run_ranks(delayed_training_on_this_rank, num_ranks)
    assert len(results[0]) > 6 * 4
    assert all(result == results[0] for result in results)
