"""Memory of products with curvature matrices on gloo ranks, counted to the byte, beside that of a gradient."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
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
from tests.support.memory import OPTIMIZERS, RANKS, UNIT, WIDTH, model_of_equal_units

pytestmark = pytest.mark.slow

MODEL, ADAMW = model_of_equal_units(), OPTIMIZERS["adamw"]


def predicted(params: fs.Sharded, x: Tensor) -> Tensor:
    return functional_call(MODEL, fs.gather(params), (x,))


def loss(params: fs.Sharded, x: Tensor) -> Tensor:
    return predicted(params, x).square().mean()


def by_product(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, v, x: made(params, x) @ v


DERIVED: dict[str, Callable[..., Any]] = {
    "gradient": lambda params, v, x: fs.grad(loss)(params, x),
    "hessian": by_product(hessian(loss)),
    "gauss_newton": by_product(gauss_newton(predicted, lambda out: out.square().mean())),
}


def step(params: fs.Sharded, state: Any, x: Tensor) -> Any:
    grads = fs.grad(loss)(params, x)
    return ADAMW.step(params, grads=grads, state=state, donate=True)


def all_on_this_rank() -> dict[tuple[str, int], tuple[int, int]]:
    gc.disable()
    GlooBackend._memory = None  # over sockets
    mesh = fs.init_mesh()
    mesh["shard"].issue("all_gather", torch.empty(SMALL_MESSAGE)).wait()  # opens the memory of all ranks
    layout = fs.plan(MODEL, mesh)
    settle()
    gc.freeze()  # what is loaded stays: a collection before each measurement need not look at it
    return {(derived, samples): live_on_this_rank(layout, derived, samples) for derived, samples in MEASURED}


def live_on_this_rank(layout: fs.Layout, derived: str, samples: int) -> tuple[int, int]:
    """The most that is alive at once: in all, and without what is passed in."""
    gc.collect()
    live = LiveBytes()
    with live:
        params, x = fs.shard(dict(MODEL.named_parameters()), layout), torch.randn(samples, WIDTH)
        beside = ADAMW.init(params) if derived == "step" else fs.curvature.randn_like(params, 0)
        run = DERIVED.get(derived, step)
        run(params, beside, x)
        live.mark("start")
        result = run(params, beside, x)
        live.mark("end")
        del result
    return live.peak("start", "end"), live.growth("start", "end")


SAMPLES = [16, 1024]
MEASURED = [(derived, samples) for derived in (*DERIVED, "step") for samples in SAMPLES]


@cache
def of_all_ranks() -> list[dict[tuple[str, int], tuple[int, int]]]:
    return run_ranks(all_on_this_rank, RANKS)


def memory(derived: str, samples: int) -> tuple[int, int]:
    return max(measured[derived, samples] for measured in of_all_ranks())


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
def test_a_product_takes_at_most_twice_the_memory_of_a_training_step(matrix: str, samples: int) -> None:
    assert memory(matrix, samples)[0] <= 2 * memory("step", samples)[0]


@pytest.mark.parametrize("samples", SAMPLES)
def test_beside_its_arguments_a_hessian_product_takes_at_most_two_gradients(samples: int) -> None:
    numbers = 1000  # bytes of scalars
    assert memory("hessian", samples)[1] <= 2 * memory("gradient", samples)[1] + numbers


@pytest.mark.parametrize("samples", SAMPLES)
def test_a_product_by_two_passes_takes_one_gradient_and_the_predictions(samples: int) -> None:
    predictions = 4 * samples * WIDTH
    assert memory("gauss_newton", samples)[1] <= memory("gradient", samples)[1] + 2 * predictions + UNIT
