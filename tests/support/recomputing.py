"""Models that checkpoint themselves, in each of the ways that libraries write it, and training them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import count_collectives

WIDTH = 6
Run = Callable[[nn.Module, fs.Sharded, Tensor], Tensor]


class Block(nn.Module):
    """A direct use of a parameter, a submodule's, statistics, and a mask that has to be drawn alike twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.gate * nn.functional.dropout(self.norm(self.fc(x)).tanh(), 0.2)


class Layer(Block):
    """As transformers' ``GradientCheckpointingLayer``: the call itself is checkpointed, keywords go in beforehand."""

    how: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.how is None:
            return super().__call__(*args, **kwargs)
        return self.how(partial(super().__call__, **kwargs), *args)


class Model(nn.Module):
    """Three blocks between an embedding and a head that is tied to it."""

    def __init__(self, style: str, how: Callable[..., Any] | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        kind = Layer if style == "layer" else Block
        self.blocks = nn.Sequential(*(kind() for _ in range(3)))
        self.style, self.how = style, how
        for block in self.blocks:
            if isinstance(block, Layer):
                block.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(STYLES[self.style](self, x) if self.how else self.blocks(x))

    def inner(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def _in_layers(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x, scale=1.0)
    return x


def _modules(model: Any, x: Tensor) -> Tensor:  # timm
    for block in model.blocks:
        x = model.how(block, x)
    return x


def _calls(model: Any, x: Tensor) -> Tensor:  # diffusers
    for block in model.blocks:
        x = model.how(block.__call__, x, 1.0)
    return x


def _closures(model: Any, x: Tensor) -> Tensor:  # timm's checkpoint_seq, torch's checkpoint_sequential
    def run(start: int, end: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            for block in model.blocks[start:end]:
                x = block(x)
            return x

        return forward

    return run(2, 3)(model.how(run(0, 2), x))


def _method(model: Any, x: Tensor) -> Tensor:
    return model.blocks[2](model.how(model.inner, x))


def _nested(model: Any, x: Tensor) -> Tensor:
    return model.how(lambda x: model.how(model.blocks[2], model.how(model.inner, x)), x)


STYLES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "layer": _in_layers,
    "modules": _modules,
    "calls": _calls,
    "closures": _closures,
    "method": _method,
    "nested": _nested,
}

WITHOUT_REENTRY, WITH_REENTRY = (partial(checkpoint, use_reentrant=flag) for flag in (False, True))


def build(style: str, how: Callable[..., Any] | None = None) -> Model:
    torch.manual_seed(0)
    return Model(style, how).double()


def inputs(num_rows: int = 8) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_functional_call(model: nn.Module, params: fs.Sharded, x: Tensor, lazy: bool | None = None) -> Tensor:
    return functional_call(model, fs.gather(params, lazy=lazy), (x,))


def bound(model: nn.Module, params: Any, x: Tensor) -> Tensor:
    return fs.bind(model, params)(x)


def train(mesh: fs.Mesh, model: nn.Module, run: Run, steps: int = 10, rate: float = 0.3) -> Any:
    """SGD: losses, parameters, the model's buffers, and the collectives of each step."""
    layout = fs.plan(model, mesh)
    params, losses, kinds = fs.shard(model, layout), [], []
    for step in range(steps):
        torch.manual_seed(step)
        with count_collectives() as seen:
            grads, loss = fs.grad_and_value(lambda p, x: run(model, p, x).square().mean())(params, mesh.split(inputs()))
        kinds.append(dict(seen.by_kind))
        params = fs.Sharded({key: params[key] - rate * grads[key] for key in params}, layout)
        losses.append(fs.collectives.pmean(loss, mesh).item())
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    return losses, dict(fs.gather(params, lazy=False)), buffers, kinds


def own_state(model: nn.Module) -> list[tuple[str, int, int]]:
    """Which tensors the model has, and how often they were written to."""
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, id(x), x._version) for name, x in held]
