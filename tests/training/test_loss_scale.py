"""Loss scales: the rule of torch's GradScaler, a step skipped on all ranks or on none, and float16 training."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.layout.trees import map_items
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import two_layers
from tests.support.norms import INF, sharded
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.refusals import refused
from tests.support.steps import copied

F16, F32 = torch.float16, torch.float32


@pytest.mark.parametrize(("interval", "growth", "backoff", "odds"), [(1, 2.0, 0.5, 0.5), (7, 1.1, 0.3, 0.1)])
def test_the_sequence_of_scales_is_that_of_torch(interval: int, growth: float, backoff: float, odds: float) -> None:
    scaling = fs.LossScale.dynamic(2.0**16, growth, backoff, interval)
    state = scaling.init(sharded(fs.simulated_mesh(1)))
    state = {name: x[0] for name, x in state.items()}
    expected = {"scale": torch.tensor(2.0**16), "good_steps": torch.tensor(0, dtype=torch.int32)}
    draws, seen = random.Random(interval), {2.0**16}
    for _ in range(200):
        finite = draws.random() >= odds
        state = scaling.update(state, torch.tensor(finite))
        overflow = torch.tensor(0.0 if finite else 1.0)
        torch._amp_update_scale_(expected["scale"], expected["good_steps"], overflow, growth, backoff, interval)
        assert_trees_close(state, expected, rtol=0, atol=0)
        seen.add(state["scale"].item())
    assert len(seen) > 1


def test_a_scale_never_grows_to_infinity() -> None:
    scaling = fs.LossScale.dynamic(initial=2.0**126, interval=1)
    state = {"scale": torch.tensor(2.0**126), "good_steps": torch.tensor(0, dtype=torch.int32)}
    scales = []
    for finite in (True, True, True, False, True):
        state = scaling.update(state, torch.tensor(finite))
        scales.append(state["scale"].log2().item())
    assert scales == [127, 127, 127, 126, 127]


def test_a_loss_in_half_precision_is_scaled_in_float32() -> None:
    state = {"scale": torch.tensor(2.0**16), "good_steps": torch.tensor(0)}
    scaling = fs.LossScale.dynamic()
    for dtype, wide in ((F16, F32), (torch.bfloat16, F32), (F32, F32), (torch.float64, torch.float64)):
        for loss in (torch.tensor(2.5, dtype=dtype), torch.full((3,), 2.5, dtype=dtype)):
            scaled = scaling.scale(loss, state)
            assert scaled.dtype == wide
            assert (scaled == 2.5 * 2**16).all()


def test_unscaling_undoes_scaling_and_finds_all_finite() -> None:
    axes = {"replicate": 2, "shard": 3}
    mesh, scaling = fs.simulated_mesh(axes), fs.LossScale.static(128.0)
    tree = sharded(mesh, "mixed with float64", "b whole")
    grads = fs.Sharded({k: x if tree.layout.buffers[k].trainable else None for k, x in tree.items()}, tree.layout)
    state = scaling.init(grads)
    scaled = fs.Sharded({k: x if x is None else x * scaling.initial for k, x in grads.items()}, grads.layout)
    before = copied(scaled)
    for run in (lambda fn: fn, mesh.spmd):
        with count_collectives() as seen:
            unscaled, finite = run(scaling.unscale)(scaled, state)
        assert_trees_close(unscaled, grads, rtol=0, atol=0)  # a power of two: bitwise, and in every dtype
        assert finite.shape == tuple(axes.values())
        assert finite.all()
        assert [(c.kind, c.axis, c.numel) for c in seen.issued] == [
            ("pmax", n, 1) for n, size in axes.items() if size > 1
        ]
        assert_trees_close(scaled, before, rtol=0, atol=0)


def model_and_tree(mesh: fs.Mesh, **options: Any) -> tuple[nn.Module, fs.Sharded]:
    model = two_layers()
    return model, fs.shard(model, fs.plan(model, mesh, **options))


OPTIMIZERS: dict[str, fs.Optimizer] = {
    "adamw": fs.optimizer(torch.optim.AdamW, lr=0.1),
    "momentum": fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "whole": fs.optimizer(torch.optim.SGD, whole=True, lr=0.1, momentum=0.9),
}


def skipped(mesh: fs.Mesh, name: str, bad_rank: int) -> Any:
    """The last parameters and scale, of steps of which rank ``bad_rank`` alone has an infinite gradient in odd ones.

    These were skipped on all ranks, and the others taken.
    """
    opt, scaling = OPTIMIZERS[name], fs.LossScale.dynamic(initial=2.0**10, interval=3)
    _, params = model_and_tree(mesh)

    @mesh.spmd
    def step(params: Any, state: Any, scale: Any, bad: Any) -> Any:
        here = fs.collectives.axis_index(mesh) == bad_rank
        spoil = lambda _, x: torch.where(here & bad & (torch.arange(len(x)) == 1), INF, x * 2**10)  # noqa: E731
        grads, finite = scaling.unscale(map_items(spoil, params), scale)
        new = opt.step(params, grads=grads, state=state)
        return *scaling.select(finite, new, (params, state)), scaling.update(scale, finite), finite

    trees: Any = params, mesh.spmd(opt.init)(params)
    scale: Any = mesh.spmd(scaling.init)(params)
    # where owners keep whether the first step has been, it may be skipped too
    for odd in (*([True] if name == "whole" else []), False, True, False, True):
        bad = torch.tensor(odd).expand(tuple(mesh.axes.values()) if mesh.is_simulated else ())
        *after, new_scale, finite = step(trees[0], trees[1], scale, bad)
        assert (finite.all(), finite.any()) == (not odd, not odd)
        assert all(torch.equal(x, trees[0][key]) for key, x in after[0].items()) == odd
        if odd:
            assert_trees_close(tuple(after), trees, rtol=0, atol=0)
        assert ((new_scale["scale"] == scale["scale"] / 2) == odd).all()
        trees, scale = tuple(after), new_scale
    return dict(trees[0]), scale


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [*simulated(HYBRID), *gloo(2)], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all_of_them(ranks: Ranks, name: str) -> None:
    for bad_rank in range(ranks.size):
        results = ranks.run(skipped, name, bad_rank)
        if ranks.real:
            expected = ranks.simulated.run(skipped, name, bad_rank)
            assert_trees_close(results, expected)
            assert_trees_close([scale for _, scale in results], [scale for _, scale in expected], rtol=0, atol=0)


def test_momentum_that_is_not_there_yet_counts_as_zeros() -> None:
    axes = {"replicate": 2, "shard": 2}
    mesh, scaling, opt = fs.simulated_mesh(axes), fs.LossScale.static(128.0), OPTIMIZERS["momentum"]
    _, params = model_and_tree(mesh)
    start = opt.init(params)
    assert start["momentum_buffer"]["0"] is None
    overflowed = opt.step(params, grads=map_items(lambda key, x: x * INF, params), state=start)
    state = scaling.select(torch.zeros(tuple(axes.values()), dtype=torch.bool), overflowed, (params, start))
    assert_trees_close(state[0], params, rtol=0, atol=0)
    plain = params, start
    for _ in range(3):
        state, plain = (opt.step(each[0], grads=params, state=each[1]) for each in (state, plain))
    assert_trees_close(state, plain, rtol=0, atol=0)


def test_trees_that_do_not_match_and_numbers_out_of_their_ranges_are_refused() -> None:
    scaling, one = fs.LossScale.static(2.0), torch.ones(())
    finite = torch.tensor(True)
    assert "ValueError: LossScale.select: got 1 and 2: only tensors can differ" in refused(
        scaling.select, finite, [1], [2]
    )
    assert "got None and tensor(1.)" in refused(scaling.select, finite, [None], [one])
    assert "the first step makes a number" in refused(scaling.select, finite, [one], [None])
    assert refused(scaling.select, finite, {"a": one}, {"b": one}).startswith("ValueError")
    assert scaling.select(finite, [1, None, one], [1, None, one]) == [1, None, one]

    assert "expected 0 < backoff < 1 < growth" in refused(fs.LossScale.dynamic, 2.0, 0.5, 2.0)


def fp16_training(mesh: fs.Mesh, scaling: fs.LossScale, num_steps: int = 12) -> tuple[list[float], list[float]]:
    """Losses and scales of a model whose float16 gradients vanish without a scale."""
    model, params = model_and_tree(mesh, precision=fs.MixedPrecision(F16, F16))
    opt = fs.optimizer(torch.optim.SGD, lr=5e8, momentum=0.5)
    state, scale = opt.init(params), scaling.init(params)

    @mesh.spmd
    def step(params: Any, state: Any, scale: Any, x: Tensor, y: Tensor) -> Any:
        def scaled(params: Any) -> tuple[Tensor, Tensor]:
            output = functional_call(model, fs.gather(params), (x.half(),))
            loss = (output.float() - y).square().mean() * 1e-9
            return scaling.scale(loss, scale), loss

        grads, (_, loss) = fs.grad_and_value(scaled, has_aux=True)(params)
        grads, finite = scaling.unscale(grads, scale)
        new = opt.step(params, grads=grads, state=state)
        return *scaling.select(finite, new, (params, state)), scaling.update(scale, finite), loss

    x, losses, scales = torch.arange(12 * 5.0).view(12, 5).sin(), [], []
    for _ in range(num_steps):
        params, state, scale, loss = step(params, state, scale, *mesh.split((x, x[:, :3])))
        assert {x.dtype for x in params.values()} == {F32}
        losses.append(loss.mean().item())
        scales.append(scale["scale"].flatten()[0].log2().item())
    return losses, scales


def test_float16_training_learns_with_a_scale_and_not_without() -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
    losses, scales = fp16_training(mesh, fs.LossScale.dynamic(initial=2.0**50, backoff=0.25, interval=4))
    assert scales[0] == 48  # it starts too large
    assert losses[0] == losses[1]  # a step that was skipped changes nothing
    assert losses[-1] < 0.1 * losses[0]
    without, ones = fp16_training(mesh, fs.LossScale.static(1.0))
    assert (without[-1], {*ones}) == (losses[0], {0.0})
    assert fp16_training(mesh, fs.LossScale.static(2.0**30))[0][-1] < 0.1 * losses[0]
