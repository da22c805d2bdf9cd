"""What a saved result is known by: nothing that is another value has the identity of what remat's policy saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp
from torch.testing._internal.two_tensor import TwoTensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo
from tests.support.rematting import POLICIES, plainly

saved = POLICIES["everything saved"]
W, V = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
DERIVATIVES: list[Callable[[Any], Any]] = [fs.grad, grad, lambda f: lambda w: jvp(grad(f), (w,), (V,))[1]]


def summed(wrap: Callable[[Any], Any], part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda w: wrap(part)(w).sum()


def assert_same_derivatives(part: Callable[[Tensor], Tensor]) -> None:
    for derive in DERIVATIVES:
        results = []
        for wrap in (plainly, saved):
            torch.manual_seed(0)
            results.append(derive(summed(wrap, part))(W))
        assert_trees_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_hooks_of_saved_tensors_may_copy_an_input_that_is_part_of_a_tensor() -> None:
    def part(x: Tensor) -> Tensor:
        return x[:3].sin() * x[3:].sin().exp()  # in a copy of x the second half is where in x the first one was

    values = torch.arange(9.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda x: x):
        value = saved(part)(values[3:]).sum()
    assert_trees_close(torch.autograd.grad(value, values)[0], grad(lambda x: part(x[3:]).sum())(values.detach()))


def test_memory_is_not_known_by_what_was_written_to_its_conjugate() -> None:
    def part(w: Tensor) -> Tensor:
        z = torch.complex(w, w.sin())
        first, second = torch.empty_like(z).copy_(z), torch.empty_like(z)
        second.conj().copy_(z)
        return ((first @ z).exp() * (second @ z)).real

    assert_same_derivatives(part)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of those that are not subclasses
def test_sparse_and_nested_tensors_inside_of_a_part_are_computed_again() -> None:
    def sparse(w: Tensor) -> Tensor:
        return (torch.sparse.mm(V.to_sparse(), w @ V) @ w).sin()

    def nested(w: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([w[:2], w @ V]), 0.0).sin() @ w

    for part in (sparse, nested):
        expected, actual = (fs.grad(summed(wrap, part))(W) for wrap in (plainly, saved))
        assert_trees_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_statistics_are_others_once_batch_norm_has_written_to_them() -> None:
    def part(w: Tensor) -> Tensor:
        mean, variance = torch.zeros(3, dtype=w.dtype), torch.ones(3, dtype=w.dtype)
        before = (w - mean).sin()
        return F.batch_norm(w, mean, variance, training=True) + before * (w - mean).sin().exp()

    assert_same_derivatives(part)


def test_a_tensor_of_a_subclass_writes_to_the_tensors_that_it_is_made_of() -> None:
    def part(w: Tensor) -> Tensor:
        x = w.clone()
        before = x.exp()
        with torch.no_grad():
            TwoTensor(x.detach(), x.detach().clone()).mul_(2)
        return before * x.exp()

    expected, actual = (fs.grad(summed(wrap, part))(W) for wrap in (plainly, saved))
    assert_trees_close(actual, expected, rtol=1e-12, atol=1e-12)


class Noisy(torch.autograd.Function):
    """By an operator that does not say that it draws random numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return NOISE(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


def _with_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


NOISE = torch.library.custom_op("remat_tests::noise", _with_noise, mutates_args=(), schema="(Tensor x) -> Tensor")


def test_operators_that_are_not_of_torch_may_draw_random_numbers_without_saying_so() -> None:
    assert_same_derivatives(lambda w: F.dropout(Noisy.apply(w.sin()).exp() * Noisy.apply(w.sin()).sin(), 0.5) @ w)


def test_zeros_without_memory_which_forward_mode_makes_may_be_constants_of_a_part() -> None:
    zeros = torch._efficientzerotensor(3, 3, dtype=W.dtype)
    assert_same_derivatives(lambda w: ((w + zeros) @ V).sin() @ w)


def products(fulls: Sequence[Any], x: Tensor) -> Tensor:
    return torch.stack([(x * full["w"]).sin().exp() for full in fulls]).prod(0)


def gathered_outside(wrap: Any, lazy: bool | None, params: Sequence[fs.Sharded], x: Tensor) -> Tensor:
    return wrap(products)([fs.gather(p, lazy=lazy) for p in params], x).sum()


def computed_inside(wrap: Any, lazy: bool | None, params: Sequence[fs.Sharded], x: Tensor) -> Tensor:
    """Rank 0 gathers the same shard twice, and rank 1 two others."""
    own, rank = params[0], params[0].layout.mesh.rank

    def part(own: fs.Sharded, x: Tensor) -> Tensor:
        scaled = [fs.Sharded({key: (1 + rank * i) * s for key, s in own.items()}, own.layout) for i in (1, 2)]
        return products([fs.gather(p, lazy=lazy) for p in scaled], x)

    return wrap(part)(own, x).sum()


def with_gathers(mesh: fs.Mesh) -> list[Any]:
    trees = [{"w": torch.tensor(values, dtype=torch.float64)} for values in ([1.0], [2.0])]  # padding on rank 1
    wide = [{"w": torch.tensor(values, dtype=torch.float64)} for values in ([1.0, 2.0], [3.0, 4.0])]
    ways = [(gathered_outside, trees), (computed_inside, wide)]
    return [
        [fs.grad(partial(way, wrap, lazy))(params, torch.ones(2, dtype=torch.float64)) for wrap in (plainly, saved)]
        for way, values in ways
        for lazy in (None, False)
        for params in [[fs.shard(tree, fs.plan(tree, mesh)) for tree in values]]
    ]


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_what_is_gathered_is_not_known_by_the_shard_of_one_rank(ranks: Ranks) -> None:
    for results in ranks.run(with_gathers):
        for expected, actual in results:
            assert_trees_close(actual, expected, rtol=1e-12, atol=1e-12)
