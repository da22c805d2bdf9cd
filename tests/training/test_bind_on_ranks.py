"""bind on gloo ranks: a model that checkpoints itself trains as one that does not; functional_call of it is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.pool import run_ranks
from tests.support.recomputing import (
    STYLES,
    WITHOUT_REENTRY,
    bound,
    build,
    by_functional_call,
    inputs,
    train,
)


def _bound(model: Any, params: fs.Sharded, x: Tensor, lazy: bool | None) -> Tensor:
    return bound(model, fs.gather(params, lazy=lazy), x)


# A region of several units runs through all of them forward before it goes back; of one unit it gathers nothing more.
GATHERED_AGAIN = {"closures": 1, "method": 1, "nested": 5}


def train_on_this_rank() -> dict[str, Any]:
    mesh, results = fs.init_mesh(), {}
    for style in STYLES:
        expected = train(mesh, build(style), by_functional_call)
        others = [train(mesh, build(style, WITHOUT_REENTRY), partial(_bound, lazy=lazy)) for lazy in (None, False)]
        results[style] = expected, others
    return results


@pytest.mark.slow
def test_ten_steps_are_bitwise_those_without_checkpointing_and_gather_what_they_must() -> None:
    for results in run_ranks(train_on_this_rank, 2):
        for style, ((losses, params, _, kinds), others) in results.items():
            assert losses[-1] < losses[0] / 2
            for actual in others:
                assert actual[0] == losses, style
                assert_trees_close(actual[1], params, rtol=0, atol=0)
            more = GATHERED_AGAIN.get(style, 0)
            assert kinds == [{"all_gather": 8, "psum_scatter": 5}] * 10
            assert others[0][3] == [{"all_gather": 8 + more, "psum_scatter": 5}] * 10, style


def backward_on_this_rank() -> list[Any]:
    return [_called_with_two_sets_of_parameters(style) for style in STYLES]


def _called_with_two_sets_of_parameters(style: str) -> Any:
    """Plain backward, twice; without and with checkpointing."""
    mesh, results = fs.init_mesh(), []
    for how in (None, WITHOUT_REENTRY):
        model = build(style, how)
        params = fs.shard(model, fs.plan(model, mesh))
        leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)
        other = fs.Sharded({key: 0.9 * x + 0.01 for key, x in leaves.items()}, params.layout)
        x = mesh.split(inputs())
        torch.manual_seed(0)
        loss = (bound(model, leaves, x) * bound(model, other, x + 1)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({key: x.grad for key, x in leaves.items()})
    return results


def test_each_copy_of_one_model_is_recomputed_with_its_own_parameters_by_plain_backward() -> None:
    for results in run_ranks(backward_on_this_rank, 2):
        for expected, actual in results:
            assert_trees_close(actual, expected, rtol=1e-12, atol=1e-12)
