"""Loss scales on gloo ranks: a step is skipped on all of them, and float16 training is that of simulated ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.pool import run_ranks
from tests.training.test_loss_scale import (
    DYNAMIC,
    OPTIMIZERS,
    SCALES,
    as_grads,
    assert_odd_steps_were_skipped,
    fp16_training,
    sharded,
    skipping_steps,
)

AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]


def on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    mesh = fs.init_mesh(axes)
    histories = {(n, rank): skipping_steps(mesh, n, rank) for n in OPTIMIZERS for rank in range(mesh.size)}
    for history in histories.values():
        assert_odd_steps_were_skipped(history)
    grads, sent = as_grads(sharded(mesh)), {}
    for name, scaling in SCALES.items():
        with count_collectives() as seen:
            scaling.unscale(grads, scaling.init(grads))
        sent[name] = [(c.kind, c.axis, c.numel) for c in seen.issued]
    finals = {key: (dict(history[-1][0]), history[-1][2]) for key, history in histories.items()}
    return {"finals": finals, "sent": sent, "training": fp16_training(mesh, DYNAMIC)}


@cache
def results(axes: tuple[tuple[str, int], ...]) -> list[Any]:
    return run_ranks(on_this_rank, fs.simulated_mesh(dict(axes)).size, dict(axes))


every_axes = pytest.mark.parametrize("axes", AXES, ids=str)


@every_axes
def test_an_overflow_on_one_rank_skips_the_step_on_all_of_them(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    for rank, result in enumerate(results(tuple(axes.items()))):
        assert len(result["finals"]) == len(OPTIMIZERS) * mesh.size
        for (name, bad_rank), (params, scale) in result["finals"].items():
            history = skipping_steps(mesh, name, bad_rank)
            stacked, _, expected, _ = history[-1]
            assert_trees_close(params, {k: x.flatten(0, len(axes) - 1)[rank] for k, x in stacked.items()})
            assert_trees_close(scale, {k: x.flatten()[rank] for k, x in expected.items()}, rtol=0, atol=0)


@every_axes
def test_one_number_is_sent_over_each_axis(axes: dict[str, int]) -> None:
    one = [("psum", name, 1) for name in axes]
    for result in results(tuple(axes.items())):
        assert result["sent"] == {"dynamic": one, "static": one, "none": []}


@every_axes
def test_float16_training_is_that_of_simulated_ranks(axes: dict[str, int]) -> None:
    simulated = fp16_training(fs.simulated_mesh(axes), DYNAMIC)
    first, *others = [result["training"] for result in results(tuple(axes.items()))]
    assert others == [first] * len(others)
    assert [row[1:] for row in first] == [row[1:] for row in simulated]
    losses = [torch.tensor([row[0] for row in log]) for log in (first, simulated)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=0)  # float16 sums in another order
    assert first[-1][0] < 0.1 * first[0][0]
