"""Programs of the laws, and published ones repaired, each a function of a mesh that returns whole values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from tests.laws import tasks, training
from tests.laws.wrappers import WRAPPERS
from tests.support import public_bugs

RANKS = 4  # on which there are the fewest samples for each
Program = Callable[[fs.Mesh], Any]


def law(mesh: fs.Mesh, task: str, wrapper: str = "plain") -> Any:
    """A derivative of the table of laws, of all samples."""
    result = tasks.on_mesh(mesh, tasks.Data(RANKS), [task], WRAPPERS[wrapper])[task]
    if isinstance(result, fs.Sharded):
        whole = tasks.whole(result, mesh.axes["replicate"])
        return {n: x.mean(0) for n, x in whole.items()} if task == "per-sample gradients, sharded" else whole
    if task == "per-sample gradients, whole":  # samples in their order
        return {n: x.flatten(0, len(mesh.axes)) for n, x in result.items()}
    return result.flatten(0, len(mesh.axes) - 1).mean(0)


def steps_of(mesh: fs.Mesh, case: str) -> Any:
    """One step of a training of the laws: the gradient, the loss and the parameters."""
    of = training.CASES[case]
    model = of.build(torch.float64)
    params, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))
    opt = fs.optimizer(torch.optim.SGD, lr=training.LR, momentum=training.MOMENTUM)

    @mesh.spmd(out_dims=(0, 0, None))
    def step(params: fs.Sharded, frozen: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda p: of.loss_of(model, fs.gather(p, frozen), x, y))(params)
        return grads, opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    return step(params, frozen, opt.init(params), *mesh.split(of.batches(RANKS, torch.float64)[0]))


# Results that depend on how many samples a rank has, or have a dim of an ensemble in front of the shards.
NOT_WHOLE = {"gradient penalty", "ensemble", "gradients of an ensemble"}
PROGRAMS: dict[str, Program] = {
    **{f"law: {task}": partial(law, task=task) for task in tasks.ON_RANK if task not in NOT_WHOLE},
    **{
        f"law: fs.grad, {name}": partial(law, task="fs.grad", wrapper=name)
        for name in ("remat", "one parameter a unit")
    },
    **{f"training: {case}": partial(steps_of, case=case) for case in training.CASES},
    **{f"repaired: {name}": partial(public_bugs.whole, name=name, wrong=False) for name in public_bugs.BUGS},
}
# Mutants that are the program: a pattern of its name, one of the mutant, and why.
EQUIVALENT = [
    ("law", r"of \d+ bool .*: doubled", "twice a bool is that bool"),
    ("law: value", r"psum", "the gradient is thrown away"),
    ("law: forward over", r"(1[3579]|2[13579]|31), psum", "of a gradient whose tangent alone is returned"),
    ("law: reverse over reverse", r"(8|9|1[0-8]), psum", "of a gradient whose derivative alone is returned"),
    ("law: reverse over reverse", r"19, psum .* over 'replicate'$", "the cotangent is one on every rank"),
    ("law: gradient of a mean", r"[89], psum", "the mean itself is thrown away"),
    ("law: gradient of a mean", r"1[01], psum .* over '\w+': over", "the cotangent is one on every rank"),
    ("law: fs.grad, remat", r" [0-7], all_gather", "of a forward whose value is thrown away: backward gathers again"),
    ("law: fs.grad, one parameter a unit", r"of 0 float64", "of no elements"),
    ("law: fs.grad, one parameter a unit", r"all_gather .*norm.bias", "a bias of a normalization is zeros at first"),
]
