"""Memory of products with curvature matrices on gloo ranks, counted to the byte, beside that of a gradient."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.curvature import gauss_newton, hessian
from functorch_shard.gloo.backend import SMALL_MESSAGE, GlooBackend
from functorch_shard.testing import run_ranks
from tests.support.live_bytes import LiveBytes, settle
from tests.support.memory import RANKS, UNIT, WIDTH, model_of_equal_units

pytestmark = pytest.mark.slow

MODEL = model_of_equal_units()


def predicted(params: fs.Sharded, x: Tensor) -> Tensor:
    return functional_call(MODEL, fs.gather(params), (x,))


def loss(params: fs.Sharded, x: Tensor) -> Tensor:
    return predicted(params, x).square().mean()


DERIVED: dict[str, Callable[..., Any]] = {
    "gradient": lambda params, v, x: fs.grad(loss)(params, x),
    "hessian": lambda params, v, x: hessian(loss)(params, x) @ v,
    "gauss_newton": lambda params, v, x: gauss_newton(predicted, lambda out: out.square().mean())(params, x) @ v,
}
SAMPLES = [16, 1024]


def all_on_this_rank() -> dict[tuple[str, int], int]:
    gc.disable()
    GlooBackend._memory = None  # over sockets
    mesh = fs.init_mesh()
    mesh["shard"].issue("all_gather", torch.empty(SMALL_MESSAGE)).wait()  # opens the memory of all ranks
    layout = fs.plan(MODEL, mesh)
    settle()
    gc.freeze()  # what is loaded stays: a collection before each measurement need not look at it
    return {each: live_on_this_rank(layout, *each) for each in product(DERIVED, SAMPLES)}


def live_on_this_rank(layout: fs.Layout, derived: str, samples: int) -> int:
    """The most that is alive at once, without what is passed in."""
    gc.collect()
    live = LiveBytes()
    with live:
        params, x = fs.shard(dict(MODEL.named_parameters()), layout), torch.randn(samples, WIDTH)
        v = fs.curvature.randn_like(params, 0)
        DERIVED[derived](params, v, x)
        live.mark("start")
        result = DERIVED[derived](params, v, x)
        live.mark("end")
        del result
    return live.growth("start", "end")


def test_a_product_takes_two_gradients_or_one_and_the_predictions() -> None:
    for measured, samples in product(run_ranks(all_on_this_rank, RANKS), SAMPLES):
        gradient, predictions, numbers = measured["gradient", samples], 4 * samples * WIDTH, 1000  # bytes of scalars
        assert measured["hessian", samples] <= 2 * gradient + numbers
        assert measured["gauss_newton", samples] <= gradient + 2 * predictions + UNIT
