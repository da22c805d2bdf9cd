"""A recorded step is the eager step, bitwise, on other values than those it was recorded with.

So is each derivative of tests/laws, where recording is one of the features around each task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.differentiated import Program, data
from tests.support.ranks import Ranks, gloo, on_each, simulated

WIDTH = 33
Step = Callable[[fs.Sharded, Tensor], Any]
Made = tuple[fs.Sharded, Step]
tree_map: Any = optree.tree_map


class Net(nn.Module):
    """Blocks with dropout, behind checkpoints or not."""

    def __init__(self, dropout: float = 0.0, checkpoints: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 0.3, generator=generator)
        self.dropout, self.checkpoints = nn.Dropout(dropout), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.one, block, x, use_reentrant=False) if self.checkpoints else self.one(block, x)
        return x

    def one(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.dropout(block(x).tanh())


def rows(mesh: fs.Mesh, seed: int) -> Tensor:
    return mesh.split(torch.randn(4 * mesh.size, WIDTH, generator=torch.Generator().manual_seed(seed)))


def of(mesh: fs.Mesh, net: nn.Module, gather: Any = fs.gather, **plan: Any) -> tuple[fs.Sharded, Callable[..., Tensor]]:
    """Parameters, and a loss of them."""
    dtype = torch.bfloat16 if "precision" in plan else torch.float32

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(net, gather(params), (x.to(dtype),)).float().square().mean()

    return fs.shard(net, fs.plan(net, mesh, **plan)), loss


def gradient(mesh: fs.Mesh, net: nn.Module, gather: Any = fs.gather, **plan: Any) -> Made:
    params, loss = of(mesh, net, gather, **plan)
    return params, fs.grad_and_value(loss)


def frozen_and_kept(mesh: fs.Mesh) -> Made:
    net = Net()
    net.blocks[0].requires_grad_(False)
    return gradient(mesh, net, reshard_after_forward=False)


def loss_scale(mesh: fs.Mesh) -> Made:
    params, loss = of(mesh, Net())
    scale = fs.LossScale.dynamic()

    def step(params: fs.Sharded, x: Tensor) -> Any:
        state = scale.init(params)
        grads = fs.grad(lambda p: scale.scale(loss(p, x), state))(params)
        grads, finite = scale.unscale(grads, state)
        return scale.select(finite, tree_map(torch.sub, params, grads), params), scale.update(state, finite)

    return params, step


def buffers(mesh: fs.Mesh) -> Made:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    params, _ = of(mesh, net)
    given = dict(net.named_buffers())
    return params, lambda p, x: (fs.apply(net, p, given, x), fs.global_norm(p))


def checkpoints(mesh: fs.Mesh, dropout: float = 0.0) -> Made:
    net = Net(dropout, checkpoints=True)
    params, _ = of(mesh, net)
    return params, fs.grad_and_value(lambda p, x: fs.bind(net, p)(x).square().mean())


MADE: dict[str, Callable[[fs.Mesh], Made]] = {
    "dropout": lambda mesh: gradient(mesh, Net(dropout=0.5)),
    "bfloat16": lambda mesh: gradient(mesh, Net(), precision=fs.MixedPrecision(torch.bfloat16, torch.float32)),
    "gathered at once": lambda mesh: gradient(mesh, Net(), lambda p: fs.gather(p, lazy=False)),
    "encoded": lambda mesh: gradient(mesh, Net(), lambda p: fs.gather(p, codec=fs.codecs.int8())),
    "frozen and kept": frozen_and_kept,
    "loss scale": loss_scale,
    "buffers": buffers,
    "checkpoints": checkpoints,
}


def compare(mesh: fs.Mesh, name: str, backend: str) -> None:
    params, fn = MADE[name](mesh)
    step = mesh.spmd(fn)
    compiled = fs.compile(step, backend=backend)
    compiled(params, rows(mesh, 0))
    results = []
    for each in (step, compiled):
        torch.manual_seed(0 if mesh.is_simulated else mesh.rank)
        results.append(each(params, rows(mesh, 1)))
    assert_trees_close(*results, rtol=0, atol=0.0 if backend == "replay" else 1e-5)


SIMULATED = ("dropout", "encoded", "loss scale", "buffers")
COMPILED = ("dropout", "bfloat16", "frozen and kept", "loss scale", "buffers")
CASES: list[Any] = [*product(gloo(2), MADE, ["replay"]), *product(simulated(2), SIMULATED, ["replay"])]
BY_COMPILER = product([*simulated(2), *gloo(2)], COMPILED, ["aot_eager"])
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in BY_COMPILER]


@pytest.mark.parametrize(("ranks", "name", "backend"), CASES, ids=str)
def test_a_replay_is_bitwise_the_step_and_a_compiler_rounds(ranks: Ranks, name: str, backend: str) -> None:
    ranks.run(compare, name, backend)


def test_codecs_are_refused_by_compilers() -> None:
    mesh = fs.simulated_mesh(2)
    params, fn = MADE["encoded"](mesh)
    with pytest.raises(NotImplementedError, match="backend='replay'"):
        fs.compile(mesh.spmd(fn), backend="aot_eager")(params, rows(mesh, 0))


@on_each(gloo(2))
def test_a_module_of_its_own_buffers_counts_each_call_once(mesh: fs.Mesh) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    params, loss = of(mesh, net)
    compiled = fs.compile(fs.grad(loss), backend="replay")
    for i in range(1, 4):
        compiled(params, rows(mesh, i))
        assert dict(net.named_buffers())["1.num_batches_tracked"] == i


def trained(mesh: fs.Mesh, cls: type[torch.optim.Optimizer], donate: bool) -> list[Any]:
    """Parameters and losses of replayed and of eager steps, with a learning rate of its own for each step."""
    program, opt = Program(mesh), fs.optimizer(cls, lr=1e-2)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, lr: float) -> Any:
        grads, loss = fs.grad_and_value(program.loss)(params, x)
        grads, norm = fs.clip_by_global_norm(grads, 1.0)
        rate = 0.5 * lr if cls is torch.optim.AdamW else lr  # what is computed is for fused kernels, which read nothing
        params, state = opt.step(params, grads=grads, state=state, lr=rate, donate=donate)
        return params, state, fs.collectives.pmean(loss, mesh), norm

    results = []
    compiled = fs.compile(step, backend="replay")
    for each in (compiled, step):
        params = tree_map(torch.clone, program.params)
        state, seen = opt.init(params), []
        for i in range(3):
            params, state, *numbers = each(params, state, data(mesh, i), 0.01 / (i + 1))
            seen.append(numbers)
        results.append((params, state, seen))
    assert len(compiled.schedules) == 1
    return results


@on_each([*simulated(3), *gloo(2)])
def test_whole_steps_of_adamw_are_bitwise_those_run_eagerly_donated_ones_too(mesh: fs.Mesh) -> None:
    for donate in (False, True):
        assert_trees_close(*trained(mesh, torch.optim.AdamW, donate), rtol=0, atol=0)


def test_an_optimizer_without_a_fused_kernel_agrees_to_rounding() -> None:
    assert_trees_close(*trained(fs.simulated_mesh(2), torch.optim.NAdam, donate=False), rtol=1e-7, atol=1e-9)


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
    assert [op for op in first.issued if op.kind != "exchange"] == replayed.issued
    ahead = Counter(eager.issued) - Counter(replayed.issued)  # gathers that nothing uses
    assert {op.kind for op in ahead} <= {"all_gather"}
    assert sum(ahead.values()) == eager.total - replayed.total
