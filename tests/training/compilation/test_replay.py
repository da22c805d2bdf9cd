"""A recorded step is the eager step, bitwise, on other values than those it was recorded with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Collective, Work
from functorch_shard.communication.wrapper import Issue, Wrapped
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.differentiated import PROGRAMS, Program, data
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated, slow

KINDS = [*simulated(4), *gloo(2), *slow([*simulated(1, HYBRID), *gloo(HYBRID)])]
Step = Callable[..., Any]
tree_map: Any = optree.tree_map


def replayed(mesh: fs.Mesh, name: str) -> None:
    program = Program(mesh)
    step = mesh.spmd(getattr(program, name))
    compiled = fs.compile(step, backend="replay")
    compiled(program.params, data(mesh, 0))
    halved = tree_map(lambda p: p / 2 if p.is_floating_point() else p, program.params)
    for seed in (1, 2):
        got, expected = compiled(halved, data(mesh, seed)), step(halved, data(mesh, seed))
        assert_trees_close(got, expected, rtol=0, atol=0)
    assert len(compiled.schedules) == 1


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", KINDS, ids=str)
def test_a_replay_is_bitwise_the_eager_program(ranks: Ranks, name: str) -> None:
    ranks.run(replayed, name)


def trained(mesh: fs.Mesh, backend: str, cls: type[torch.optim.Optimizer], donate: bool, steps: int = 3) -> list[Any]:
    """Parameters and losses of compiled and of eager steps, with a learning rate of its own for each step."""
    program, opt = Program(mesh), fs.optimizer(cls, lr=1e-2)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, lr: float) -> Any:
        grads, loss = fs.grad_and_value(program.loss)(params, x)
        grads, norm = fs.clip_by_global_norm(grads, 1.0)
        params, state = opt.step(params, grads=grads, state=state, lr=lr, donate=donate)
        return params, state, fs.collectives.pmean(loss, mesh), norm

    results = []
    compiled = fs.compile(step, backend=backend)
    for each in (compiled, step):
        params = tree_map(torch.clone, program.params)
        state, seen = opt.init(params), []
        for i in range(steps):
            params, state, *numbers = each(params, state, data(mesh, i), 0.01 / (i + 1))
            seen.append(numbers)
        results.append((params, state, seen))
    assert len(compiled.schedules) == 1
    return results


@on_each(KINDS)
def test_whole_steps_of_adamw_are_bitwise_those_run_eagerly(mesh: fs.Mesh) -> None:
    assert_trees_close(*trained(mesh, "replay", torch.optim.AdamW, donate=False), rtol=0, atol=0)


@on_each([*simulated(3), *gloo(2)])
def test_donated_steps_are_bitwise_those_run_eagerly(mesh: fs.Mesh) -> None:
    assert_trees_close(*trained(mesh, "replay", torch.optim.AdamW, donate=True), rtol=0, atol=0)


@pytest.mark.parametrize(
    "cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adadelta]
)
def test_optimizers_without_a_fused_kernel_agree_to_rounding(cls: type[torch.optim.Optimizer]) -> None:
    assert_trees_close(*trained(fs.simulated_mesh(2), "replay", cls, donate=False), rtol=1e-7, atol=1e-9)


@on_each([*simulated(3), *gloo(2)])
def test_donated_leaves_are_returned_as_the_objects_that_were_passed(mesh: fs.Mesh) -> None:
    program, opt = Program(mesh), fs.optimizer(torch.optim.AdamW, lr=1e-2)
    grads = mesh.spmd(fs.grad(program.loss))(program.params, data(mesh, 0))
    update = fs.compile(mesh.spmd(lambda p, g, s: opt.step(p, grads=g, state=s, donate=True)), backend="replay")
    state = opt.init(program.params)
    version = program.params["out"]._version
    params, after = update(program.params, grads, state)
    assert all(params[key] is leaf for key, leaf in program.params.items())
    assert all(after[name][key] is leaf for name in state for key, leaf in state[name].items())
    assert mesh.is_simulated or params["out"]._version > version


@on_each([*simulated(3), *gloo(2)])
def test_the_collectives_of_a_replay_are_counted_as_those_of_the_step(mesh: fs.Mesh) -> None:
    program = Program(mesh)
    step = mesh.spmd(program.clipped)
    compiled = fs.compile(step, backend="replay")
    compiled(program.params, data(mesh, 0))
    with count_collectives() as eager:
        step(program.params, data(mesh, 1))
    with count_collectives() as replayed:
        compiled(program.params, data(mesh, 1))
    assert replayed.issued == compiled.schedules[0].collectives
    ahead = Counter(eager.issued) - Counter(replayed.issued)  # gathers that nothing uses
    assert {op.kind for op in ahead} <= {"all_gather"}
    assert sum(ahead.values()) == eager.total - replayed.total


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize("backend", ["replay", "aot_eager", "eager"])
@pytest.mark.parametrize("ranks", [*simulated(3), *gloo(2)], ids=str)
def test_a_first_call_is_counted_as_the_others_are(ranks: Ranks, backend: str) -> None:
    for first, second in ranks.run(counts_of_two_calls, backend):
        assert {kind: number for kind, number in first.items() if kind != "exchange"} == second


def counts_of_two_calls(mesh: fs.Mesh, backend: str) -> list[dict[str, int]]:
    program = Program(mesh)
    compiled, counts = fs.compile(mesh.spmd(program.grad), backend=backend), []
    for seed in range(2):
        with count_collectives() as counted:
            compiled(program.params, data(mesh, seed))
        counts.append(dict(counted.by_kind))
    return counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize("backend", ["replay", "aot_eager"])
def test_a_recorded_gather_may_be_in_memory_that_ranks_share_as_an_eager_one(backend: str) -> None:
    for eager, compiled in gloo(2)[0].run(gathers_of_two_ways, backend):
        assert eager == compiled == {True}


def gathers_of_two_ways(mesh: fs.Mesh, backend: str) -> list[set[bool]]:
    """Whether gathers are issued as transient, eagerly and by a recorded step."""
    issued: list[set[bool]] = []

    def see(op: Collective, x: Tensor, send: Issue) -> Work:
        if op.kind == "all_gather":
            issued[-1].add(op.transient)
        return send(op, x)

    program = Program(mesh.with_backend(lambda axis: Wrapped(axis.backend, see)))
    step = mesh.spmd(program.grad)
    compiled = fs.compile(step, backend=backend)
    issued.append(set())
    compiled(program.params, data(mesh, 0))
    for each in (step, compiled):
        issued.append(set())
        each(program.params, data(mesh, 1))
    return issued[1:]
