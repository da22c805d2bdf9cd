"""A recorded step is the eager step, bitwise, on other values than those it was recorded with.

So is each derivative of tests/laws, where recording is one of the features around each task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.device.programs import train
from tests.support.differentiated import Program, data
from tests.support.models import equal_units
from tests.support.ranks import Ranks, gloo, on_each, simulated, slow

WIDTH = 5
Step = Callable[[fs.Sharded, Tensor], Any]
Made = tuple[fs.Sharded, Step]
rows = partial(data, rows=4)


def of(
    mesh: fs.Mesh, gather: Any = fs.gather, net: nn.Module | None = None
) -> tuple[fs.Sharded, Callable[..., Tensor]]:
    """Parameters, and a loss of them."""
    model = net or equal_units()

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, gather(params), (x,)).square().mean()

    return fs.shard(model, fs.plan(model, mesh)), loss


def gradient(mesh: fs.Mesh, gather: Any) -> Made:
    params, loss = of(mesh, gather)
    return params, fs.grad_and_value(loss)


def buffers(mesh: fs.Mesh) -> Made:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    params, _ = of(mesh, net=net)
    given = dict(net.named_buffers())
    return params, lambda p, x: (fs.apply(net, p, given, x), fs.global_norm(p))


MADE: dict[str, Callable[[fs.Mesh], Made]] = {
    "gathered at once": lambda mesh: gradient(mesh, lambda p: fs.gather(p, lazy=False)),
    "encoded": lambda mesh: gradient(mesh, lambda p: fs.gather(p, codec=fs.codecs.int8())),
    "buffers": buffers,
}
TRAINED: dict[str, dict[str, Any]] = {  # options of whole steps of AdamW
    "in place": {"donate": True},
    "rates": {"lr": 0.01},
    "bfloat16": {"dtype": torch.bfloat16},
    "loss scale": {"scaling": fs.LossScale.dynamic(initial=64.0)},
    "kept": {"reshard_after_forward": False},
    "dropout": {"dropout": 0.5},
}


def compare(mesh: fs.Mesh, name: str, backend: str) -> None:
    close = {"rtol": 0, "atol": 0.0 if backend == "replay" else 1e-5}
    if options := TRAINED.get(name):
        assert_trees_close(train(mesh, backend=backend, **options), train(mesh, **options), **close)
        return
    params, fn = MADE[name](mesh)
    step = mesh.spmd(fn)
    compiled = fs.compile(step, backend=backend)
    compiled(params, rows(mesh, 0))
    results = []
    for each in (step, compiled):
        torch.manual_seed(0 if mesh.is_simulated else mesh.rank)
        results.append(each(params, rows(mesh, 1)))
    assert_trees_close(*results, **close)


@pytest.mark.parametrize("ranks", [*simulated(3), *gloo(2)], ids=str)
@pytest.mark.parametrize("name", [*MADE, *TRAINED])
def test_a_replay_is_bitwise_the_step(name: str, ranks: Ranks) -> None:
    ranks.run(compare, name, "replay")


@on_each(gloo(2))  # ranks in a batch refuse it
def test_so_is_that_of_a_model_that_checkpoints_itself(mesh: fs.Mesh) -> None:
    replayed, eager = (train(mesh, backend=backend, checkpoints=True) for backend in ("replay", None))
    assert_trees_close(replayed, eager, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
@pytest.mark.parametrize("name", ["dropout", "bfloat16", "kept", "loss scale", "buffers"])
def test_a_compiler_rounds_otherwise_than_the_step(name: str, ranks: Ranks) -> None:
    ranks.run(compare, name, "aot_eager")


def test_codecs_are_refused_by_compilers() -> None:
    mesh = fs.simulated_mesh(2)
    params, fn = MADE["encoded"](mesh)
    with pytest.raises(NotImplementedError, match="backend='replay'"):
        fs.compile(mesh.spmd(fn), backend="aot_eager")(params, rows(mesh, 0))


@on_each(gloo(2))
def test_a_module_of_its_own_buffers_counts_each_call_once(mesh: fs.Mesh) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    params, loss = of(mesh, net=net)
    compiled = fs.compile(fs.grad(loss), backend="replay")
    for i in range(1, 4):
        compiled(params, rows(mesh, i))
        assert dict(net.named_buffers())["1.num_batches_tracked"] == i


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


@on_each([*slow(simulated(3)), *gloo(2)])
def test_the_collectives_of_a_replay_are_counted_as_those_of_the_step(mesh: fs.Mesh) -> None:
    """At the first call as at others, where ranks also compare their recordings."""
    program = Program(mesh)
    step = mesh.spmd(program.clipped)
    compiled = fs.compile(step, backend="replay")
    counts = []
    for each in (compiled, step, compiled):
        with count_collectives() as counted:
            each(program.params, data(mesh, 1))
        counts.append(counted)
    first, eager, replayed = counts
    assert replayed.issued == compiled.schedules[0].collectives
    assert compiled.schedules == [compiled.trace(program.params, data(mesh, 0))]
    assert [op for op in first.issued if op.kind != "exchange"] == replayed.issued
    ahead = Counter(eager.issued) - Counter(replayed.issued)  # gathers that nothing uses
    assert {op.kind for op in ahead} <= {"all_gather"}
    assert sum(ahead.values()) == eager.total - replayed.total
