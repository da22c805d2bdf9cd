"""Every derivative of the examples in several dimensions is that of the whole program, which one rank runs.

On one rank no collective changes a value. On gloo ranks examples train in test_example_results, beside a loop without
shards; tests/mutants drops each of their collectives.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import gloo
from tests.support.scripts import example

AXES = {
    "moe": ("expert", "shard"),
    "ring": ("shard", "context"),
    "ulysses": ("shard", "context"),
    "pipeline": ("stage", "shard"),
}


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (8, 13), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def program_of(name: str, mesh: fs.Mesh, microbatches: int = 2) -> Any:
    """It has params, loss and split; and by of_rank what a rank computes."""
    torch.manual_seed(0)
    module = example(name if name in ("moe", "pipeline") else "long_context")
    if name == "pipeline":
        return module.Program(mesh, module.new_model(), microbatches)
    return module.Program(mesh, module.Model().double(), *([] if name == "moe" else [getattr(module, name)]))


def derivatives(name: str, mesh: fs.Mesh) -> dict[str, Any]:
    """Of the loss, and of that of each sequence of all ranks, as whole values."""
    program = program_of(name, mesh)
    direction, loss = fs.curvature.randn_like(program.params, seed=1), program.loss

    def losses(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        if name == "moe":
            found = example("gpt").losses_of(program.of_rank(params, x)[0], y)
        else:
            found = program.of_rank(params, x, y)
        if "context" in mesh.axes:
            found = fs.collectives.pmean(found, mesh["context"])
        for axis in ("shard", "expert", "replicate"):
            found = fs.collectives.all_gather(found, mesh[axis]) if axis in mesh.axes else found
        return found

    @mesh.spmd(out_dims=(0, None, None, 0, 0))
    def of_rank(params: fs.Sharded, v: fs.Sharded, *batch: Tensor) -> Any:
        grads, value = fs.grad_and_value(loss)(params, *batch)
        hvp = jvp(lambda params: fs.grad(loss)(params, *batch), (params,), (v,))[1]
        pushed = jvp(lambda params: loss(params, *batch), (params,), (v,))[1]
        scalars = (fs.collectives.pmean(x, mesh) for x in (value, pushed))
        return grads, *scalars, hvp, fs.jacrev(losses)(params, *batch)

    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        grads, value, pushed, hvp, rows = of_rank(program.params, direction, *program.split(batch()))
    axes = len(mesh.axes) if mesh.is_simulated else 0
    of_samples = [fs.Sharded({key: x.select(axes, i) for key, x in rows.items()}, rows.layout) for i in range(8)]
    trees = {"gradient": grads, "hvp": hvp, **{f"sample {i}": tree for i, tree in enumerate(of_samples)}}
    return {"loss": value, "jvp": pushed, **{key: dict(fs.gather(x, lazy=False)) for key, x in trees.items()}}


@cache
def of_one_rank(name: str) -> dict[str, Any]:
    return derivatives(name, fs.simulated_mesh(dict.fromkeys(AXES[name], 1)))


def check(name: str, mesh: fs.Mesh) -> None:
    assert_trees_close(derivatives(name, mesh), of_one_rank(name), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", AXES)
def test_derivatives_on_eight_simulated_ranks_are_those_of_the_whole_program(name: str) -> None:
    check(name, fs.simulated_mesh({"replicate": 2, **dict.fromkeys(AXES[name], 2)}))


def test_a_ring_of_four_ranks_attends_to_the_whole_sequence() -> None:
    check("ring", fs.simulated_mesh({"shard": 1, "context": 4}))


def by_schedule(mesh: fs.Mesh, schedule: str, microbatches: int = 2) -> None:
    """The gradient that a schedule takes by itself, and its derivative, against those of the loss on one rank."""
    schedules, program = example("schedules"), program_of("pipeline", mesh, microbatches)
    ticks = getattr(schedules, schedule)(mesh.axes["stage"], microbatches)
    held = microbatches if schedule == "gpipe" else min(microbatches, mesh.axes["stage"])
    assert schedules.slots(ticks) == held
    direction = fs.curvature.randn_like(program.params, seed=1)

    @mesh.spmd(out_dims=(0, 0, None))
    def derivatives(params: fs.Sharded, v: fs.Sharded, *batch: Tensor) -> Any:
        of = lambda params: schedules.gradients(program, ticks, params, *batch)  # noqa: E731
        (grads, loss), (hvp, _), *_ = jvp(of, (params,), (v,))
        return grads, hvp, fs.collectives.pmean(loss, mesh)

    with sdpa_kernel(SDPBackend.MATH):
        grads, hvp, loss = derivatives(program.params, direction, *program.split(batch()))
    found = {"loss": loss, **{key: dict(fs.gather(x, lazy=False)) for key, x in (("gradient", grads), ("hvp", hvp))}}
    assert_trees_close(found, {key: of_one_rank("pipeline")[key] for key in found}, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_gradients_by_a_schedule_are_those_of_the_whole_program(schedule: str) -> None:
    by_schedule(fs.simulated_mesh({"replicate": 2, "stage": 2, "shard": 2}), schedule)
    by_schedule(fs.simulated_mesh({"stage": 4, "shard": 1}), schedule, microbatches=8)  # of which 1F1B holds 4


@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_so_are_those_of_real_ranks(schedule: str) -> None:
    gloo({"stage": 2, "shard": 2})[0].run(by_schedule, schedule)
