"""``torch.compile`` of a model in a step is one graph; of a step it breaks the graph at each call of the library.

The numbers are those of the eager step.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.differentiated import Program, data
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated

EXACT: Any = {"rtol": 1e-12, "atol": 1e-14}
ADAMW = fs.optimizer(torch.optim.AdamW, lr=1e-2)


class Trained(Program):
    def adamw(self, params: fs.Sharded, x: Tensor) -> Any:
        grads, loss = fs.grad_and_value(self.loss)(params, x)
        params, state = ADAMW.step(params, grads=grads, state=ADAMW.init(params), lr=x.shape[0] / 100)
        return *ADAMW.step(params, grads=grads, state=state), fs.collectives.pmean(loss, self.mesh)


@on_each([*simulated(2, HYBRID), *gloo(2)])
def test_a_compiled_loss_of_plain_whole_parameters_is_one_graph_on_real_ranks(mesh: fs.Mesh) -> None:
    torch._dynamo.reset()
    program, x = Program(mesh), data(mesh, 1)

    def loss(full: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(program.model, full, (x,)).square().mean()

    # under the vmap of simulated ranks the graph breaks
    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=not mesh.is_simulated)
    step = mesh.spmd(fs.grad(lambda p, x: compiled(dict(fs.gather(p, lazy=False)), x)))
    assert_trees_close(step(program.params, x), mesh.spmd(fs.grad(program.loss))(program.params, x), **EXACT)


def check(mesh: fs.Mesh, name: str) -> None:
    torch._dynamo.reset()
    program = Trained(mesh)
    run: Any = getattr(program, name)
    step = mesh.spmd(run) if mesh.is_simulated else lambda params, x: run(params, x)
    compiled = torch.compile(step, backend="aot_eager")
    for seed in (1, 2):
        x = data(mesh, seed, 3)
        result = compiled(program.params, x)
        assert_trees_close(result, step(program.params, x), **EXACT)
        assert any(bool(leaf.any()) for leaf in optree.tree_leaves(result))


@pytest.mark.filterwarnings("ignore:Dynamo")  # about what it does not trace
@pytest.mark.parametrize(("ranks", "name"), [(*simulated(3), "hvp"), (*gloo(2), "adamw")], ids=str)
def test_a_compiled_step_has_the_derivatives_of_the_eager_one(ranks: Ranks, name: str) -> None:
    ranks.run(check, name)


@on_each(gloo(2))
def test_what_a_compiled_function_gathers_is_plain(mesh: fs.Mesh) -> None:
    torch._dynamo.reset()
    params = fs.shard({"w": torch.arange(3.0)}, fs.plan({"w": torch.zeros(3)}, mesh))
    kinds = []

    @torch.compile(backend="eager")
    def double(params: fs.Sharded) -> Tensor:
        w = fs.gather(params)["w"]
        kinds.append(type(w))
        return w * 2

    assert double(params).tolist() == [0, 2, 4]
    assert kinds == [Tensor]
