"""remat on simulated and on gloo ranks: steps as parts, collectives, random numbers, memory.

Its derivatives are in tests/laws, where remat is one of the features around each task.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives, run_ranks
from tests.laws import convention
from tests.laws.convention import INNER, of_shards
from tests.recompute.test_remat import plainly, twice
from tests.support.live_bytes import LiveBytes, settle
from tests.support.models import draws
from tests.support.ranks import Ranks, gloo, on_each, simulated
from tests.support.refusals import text_of

WRAPS: dict[str, Callable[[Any], Any]] = {"remat": fs.remat, "twice": twice, "plain": plainly}


def through_rematted_steps(mesh: fs.Mesh, inner: str) -> Any:
    """The whole step is a part, with an inner gradient in it."""
    loss = partial(convention.sharded_loss, lazy=None)
    by = {**INNER, "torch.autograd.grad": lambda loss, _: convention.autograd_grad(loss)}[inner]

    def step(p: Any, x: Tensor, y: Tensor) -> Any:
        return optree.tree_map(lambda w, g: w - convention.LR * g, p, by(loss, None)(p, x, y))

    def through(p: fs.Sharded, x: Tensor, y: Tensor, next_x: Tensor, next_y: Tensor) -> fs.Sharded:
        return fs.grad(lambda p: loss(fs.remat(step)(p, x, y), next_x, next_y))(p)

    params, _, samples = convention.on(mesh)
    return fs.gather(mesh.spmd(through)(params, *samples.tensors()), lazy=False)


STEPS = [("fs.grad", simulated(3)[0]), ("torch.func.grad", gloo(2)[0]), ("torch.autograd.grad", gloo(2)[0])]


@pytest.mark.parametrize(("inner", "ranks"), STEPS, ids=str)
def test_a_training_step_may_be_a_part(inner: str, ranks: Ranks) -> None:
    expected = convention.expected(ranks.size, ["through one step"])["through one step"]
    for result in ranks.run(through_rematted_steps, inner):
        assert_trees_close(dict(result), expected, rtol=1e-10, atol=1e-13)


def blocks_and_shards(mesh: fs.Mesh, num: int = 4) -> tuple[list[nn.Module], list[fs.Sharded]]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()).double() for _ in range(num)]
    return blocks, [fs.shard(block, fs.plan(block, mesh, units=[["0"]])) for block in blocks]


def through_blocks(wrap: Any, blocks: list[nn.Module], params: list[fs.Sharded], x: Tensor) -> Tensor:
    """Each block is a part, with the gather of its parameters inside."""
    for block, own in zip(blocks, params, strict=True):
        x = wrap(lambda own, x: functional_call(block, fs.gather(own), (x,)))(own, x)  # noqa: B023
    return x.square().mean()


DERIVATIVES: dict[str, Callable[[Any, Any], Any]] = {
    "fs.grad": lambda loss, p: fs.grad(loss)(p),
    "torch.func.grad": lambda loss, p: torch.func.grad(loss)(p),
    "jvp": lambda loss, p: torch.func.jvp(loss, (p,), (p,))[1],
    "forward over reverse": lambda loss, p: torch.func.jvp(fs.grad(loss), (p,), (p,))[1],
    "reverse over forward": lambda loss, p: fs.grad(lambda p: torch.func.jvp(loss, (p,), (p,))[1])(p),
}


def blockwise(mesh: fs.Mesh, wrap: str, randomness: str = "different") -> dict[str, Any]:
    """What is derived, the state of the generator after it, and what was communicated."""
    blocks, params = blocks_and_shards(mesh)
    x, results = mesh.split(draws(1)(4 * mesh.size, 6)), {}
    for name, derive in DERIVATIVES.items():
        torch.manual_seed(3)
        with count_collectives() as seen:
            body = lambda p, x: derive(lambda p: through_blocks(WRAPS[wrap], blocks, p, x), p)  # noqa: B023, E731
            value = mesh.spmd(body, randomness=randomness)(params, x)
        results[name] = value, str(torch.get_rng_state().tolist()), dict(seen.by_kind)
    return results


@pytest.mark.parametrize(
    ("randomness", "ranks"),
    [("same", simulated(3)[0]), ("different", simulated(3)[0]), ("different", gloo(2)[0])],
    ids=str,
)
def test_random_numbers_are_the_same_in_both_passes(randomness: str, ranks: Ranks) -> None:
    plain, again = (ranks.run(blockwise, wrap, randomness) for wrap in ("plain", "remat"))
    for expected, actual in zip(plain, again, strict=True):
        for name in DERIVATIVES:
            close = 1e-13 if name == "reverse over forward" else 0.0  # adds up in another order
            assert_trees_close(actual[name][0], expected[name][0], rtol=close, atol=close)
            assert actual[name][1] == expected[name][1], name


@on_each([*simulated(3), *gloo(2)])
def test_a_gradient_gathers_each_part_twice_and_reduces_it_once(mesh: fs.Mesh) -> None:
    result = blockwise(mesh, "remat")
    for name in ("fs.grad", "torch.func.grad"):
        assert result[name][2] == {"all_gather": 8, "psum_scatter": 4}
    # forward mode gathers parameters again, with their tangents
    assert result["jvp"][2] == {"all_gather": 12}


def gathered_outside(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two parts with whole parameters, lazy ones on real ranks, as arguments."""
    full = fs.gather(p)
    for i, layer in enumerate(convention.model().children()):
        own = {name: full[f"{i}.{name}"] for name, _ in layer.named_parameters()}
        x = fs.remat(functional_call)(layer, own, x) if own else fs.remat(layer)(x)
    return ((x - y) ** 2).mean()


WAYS = {"gathered inside": fs.remat(partial(convention.sharded_loss, lazy=None)), "gathered outside": gathered_outside}


def refuses(mesh: fs.Mesh, way: str) -> None:
    """A gradient through a step, by a derivative that would take the mean twice."""
    loss = WAYS[way]
    for inner in (fs.grad, torch.func.grad):
        side = of_shards(loss, inner(loss), torch.func.grad)
        text = text_of(convention.on_mesh, mesh, side, ["through one step"])
        assert "goes through a gather of values that were computed from another gather" in text


@pytest.mark.parametrize(
    ("way", "ranks"), [("gathered inside", gloo(2)[0]), ("gathered outside", simulated(3)[0])], ids=str
)
def test_a_gradient_that_would_take_the_mean_twice_is_refused(way: str, ranks: Ranks) -> None:
    ranks.run(refuses, way)


@on_each(gloo(3))
def test_ranks_may_use_different_units_of_what_a_part_gathers(mesh: fs.Mesh) -> None:
    """Gradients by parts that gather at once: each rank uses another block of each of them, or none."""
    blocks, _ = blocks_and_shards(mesh)
    model = nn.ModuleList(block[0] for block in blocks)  # pyright: ignore[reportIndexIssue]
    params, x = fs.shard(model, fs.plan(model, mesh)), mesh.split(draws(1)(4 * mesh.size, 6))

    def part(params: fs.Sharded, x: Tensor, i: int) -> Tensor:
        full = fs.gather(params, lazy=False)
        return x if i == 3 else (x @ full[f"{i}.weight"]).tanh()

    def loss(wrap: Any, params: fs.Sharded) -> Tensor:
        y = x
        for turn in range(3):
            y = wrap(part)(params, y, (turn + 2 * mesh.rank) % 4)
        return y.square().mean()

    expected, *others = (fs.grad(partial(loss, wrap))(params) for wrap in (plainly, fs.remat, twice))
    assert_trees_close(others, [expected] * 2, rtol=1e-12, atol=1e-15)


WIDTH, SAMPLES, PARTS = 64, 512, 6
BOUNDARY = 8 * WIDTH * SAMPLES  # bytes of what goes into a part
OF_A_PART = 8 * BOUNDARY  # what backward of a part keeps


def deep(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(8):
        x = (x + w).sin()
    return x


def live_bytes(wrap: str, derive: str) -> list[int]:
    """The most that is alive in forward and in backward, beside what was before."""
    mesh = fs.simulated_mesh(2) if "simulated" in derive else fs.init_mesh()
    whole = {"w": torch.ones(PARTS, WIDTH, dtype=torch.float64)}
    params = fs.shard(whole, fs.plan(whole, mesh))
    rows = torch.ones(mesh.size, SAMPLES // mesh.size, WIDTH, dtype=torch.float64)
    live = LiveBytes()

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        live.mark("forward")
        weights = fs.gather(params)["w"]
        for w in weights.unbind():
            x = WRAPS[wrap](deep)(x, w)
        live.mark("backward")
        return x.sum()

    of = {"fs.grad": fs.grad, "torch.func.grad": torch.func.grad, "fs.grad, simulated": fs.grad}[derive]
    with live:
        live.mark("start")
        mesh.spmd(of(loss))(params, rows if mesh.is_simulated else rows[0])
        live.mark("end")
    return [live.growth("start", "backward"), live.peak("backward", "end") - live.at("start")]


# torch.func.grad, and fs.grad inside of a transform, also keep the gradient of what goes into each part.
KEPT = {"fs.grad": PARTS, "torch.func.grad": 2 * PARTS, "fs.grad, simulated": 2 * PARTS}


@pytest.mark.parametrize("derive", KEPT)
def test_memory_is_that_of_the_activations_of_one_part_and_what_goes_into_each(derive: str) -> None:
    forward, backward = live_bytes("remat", derive)
    plain, _ = live_bytes("plain", derive)
    assert plain > PARTS * OF_A_PART
    assert forward < (PARTS + 2) * BOUNDARY + OF_A_PART
    # backward of one part has its activations, at most one gradient of each kept at a time, and a few temporaries
    assert backward < (KEPT[derive] + 4) * BOUNDARY + 2 * OF_A_PART


UNIT = 8 * WIDTH * WIDTH  # bytes of a weight
ROWS = 4  # samples: activations are small beside a unit


def gathering_parts() -> LiveBytes:
    """Two steps through parts that gather their own weight, without garbage collection."""
    gc.disable()
    mesh = fs.init_mesh()
    weights = [torch.full((WIDTH, WIDTH), 0.01 * i, dtype=torch.float64) for i in range(PARTS)]
    layout = fs.plan({"w": weights[0]}, mesh)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    settle()

    def loss(params: list[fs.Sharded], step: int) -> Tensor:
        live.mark(f"forward {step}")
        y = x
        for own in params:
            y = fs.remat(lambda own, y: (y @ fs.gather(own)["w"]).tanh())(own, y)
        live.mark(f"backward {step}")
        return y.sum()

    with LiveBytes() as live:
        params = [fs.shard({"w": w}, layout) for w in weights]
        for step in range(2):
            grads = fs.grad(partial(loss, step=step))(params)
            live.mark(f"end {step}")
            del grads
            live.mark(f"after {step}")
    return live


def test_a_part_that_gathers_holds_whole_parameters_only_while_it_runs() -> None:
    activations, shard = 8 * ROWS * WIDTH * (PARTS + 8), UNIT // 2
    assert activations < UNIT
    for live in run_ranks(gathering_parts, 2):
        for step in range(2):
            assert live.growth(f"forward {step}", f"backward {step}") <= UNIT + shard + activations  # a message
            # in backward also its gradient, what is received of it, and the reduced ones of the parts before
            backward = live.peak(f"backward {step}", f"end {step}") - live.at(f"forward {step}")
            assert backward <= 2 * UNIT + shard + (PARTS + 1) * shard + activations
        assert live.at("after 0") == live.at("after 1") == live.at("forward 0")
