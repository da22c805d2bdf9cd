"""``torch.compile`` of the model in a step: a function of plain, whole parameters, as ``gather(lazy=False)`` gives."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import loss_of, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo, simulated


class Counted:
    """A backend of ``torch.compile`` that runs another one and counts the graphs it was given."""

    def __init__(self, name: str) -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


BACKENDS = ["eager", "aot_eager"]
LR, STEPS = 0.1, 3


def batches(num_ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(STEPS, 2 * num_ranks, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return x, y


def train(mesh: fs.Mesh, backend: str) -> tuple[dict[str, Tensor], int]:
    """Whole parameters after a few steps of SGD, and how many graphs were compiled."""
    torch._dynamo.reset()
    counted, model = Counted(backend), two_layers().double()

    @torch.compile(backend=counted, fullgraph=not mesh.is_simulated)  # under the vmap of simulated ranks it breaks
    def loss(full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, full, x, y)

    @mesh.spmd
    def step(params: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        grads = fs.grad(lambda p: loss(dict(fs.gather(p, lazy=False)), x, y))(params)
        return optree.tree_map(lambda p, g: p - LR * g, params, grads)  # type: ignore[arg-type]

    params = fs.shard(model, fs.plan(model, mesh))
    for x, y in zip(*batches(mesh.size), strict=True):
        params = step(params, *mesh.split((x, y)))
    return mesh.spmd(lambda params: dict(fs.gather(params, lazy=False)))(params), counted.graphs


def unsharded(num_ranks: int) -> dict[str, Tensor]:
    """The same without ranks and without a compiler."""
    model = two_layers().double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for x, y in zip(*batches(num_ranks), strict=True):
        grads = torch.func.grad(lambda p, x=x, y=y: loss_of(model, p, x, y))(parameters)
        parameters = {name: p - LR * grads[name] for name, p in parameters.items()}
    return parameters


@pytest.mark.parametrize("ranks", [*simulated(2, HYBRID), *gloo(2)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for that of its inputs
def test_a_step_with_a_compiled_model_is_that_of_the_plain_one(ranks: Ranks, backend: str) -> None:
    """And on real ranks it is one graph, without a break."""
    for trained, graphs in ranks.run(train, backend):
        assert graphs == 1 or not ranks.real
        assert_trees_close(trained, unsharded(ranks.size), rtol=1e-10, atol=1e-12)
