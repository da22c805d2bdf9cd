"""What a saved result is known by: nothing that is another value has the identity of what remat's policy saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
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
