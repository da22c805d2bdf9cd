"""A training step whose model is compiled: a function of plain, whole parameters, as ``gather(lazy=False)`` gives."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import functorch_shard as fs
from tests.support.models import loss_of, two_layers

BACKENDS = ["eager", "aot_eager"]
LR, STEPS = 0.1, 3


class Counted:
    """A backend of ``torch.compile`` that runs another one and counts the graphs it was given."""

    def __init__(self, name: str) -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def batches(num_ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    draw = lambda n: torch.randn(STEPS, 2 * num_ranks, n, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(5), draw(3)


def train(mesh: fs.Mesh, backend: str | None, fullgraph: bool) -> tuple[dict[str, Tensor], int]:
    """Whole parameters after a few steps of SGD, and how many graphs were compiled; without a backend, none are."""
    torch._dynamo.reset()
    counted, model = Counted(backend or "eager"), two_layers().double()
    loss: Any = lambda full, x, y: loss_of(model, full, x, y)  # noqa: E731
    if backend:
        loss = torch.compile(loss, backend=counted, fullgraph=fullgraph)

    @mesh.spmd
    def step(params: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        grads = fs.grad(lambda p: loss(dict(fs.gather(p, lazy=False)), x, y))(params)
        return optree.tree_map(lambda p, g: p - LR * g, params, grads)  # type: ignore[arg-type]

    params = fs.shard(model, fs.plan(model, mesh))
    for x, y in zip(*batches(mesh.size), strict=True):
        params = step(params, *mesh.split((x, y)))
    return dict(fs.gather(params, lazy=False)), counted.graphs


def unsharded(num_ranks: int) -> dict[str, Tensor]:
    """The same without ranks and without a compiler."""
    model = two_layers().double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for x, y in zip(*batches(num_ranks), strict=True):
        grads = torch.func.grad(lambda p, x=x, y=y: loss_of(model, p, x, y))(parameters)
        parameters = {name: p - LR * grads[name] for name, p in parameters.items()}
    return parameters
