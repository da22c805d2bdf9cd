"""Training that freezes and unfreezes between steps, sharded and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

STEPS = 3
# What is frozen in each phase, by the beginning of its name: in later phases some of it thaws, and other parts freeze.
PHASES = (("0.",), (), ("2.", "4.bias"), ("4.weight",))


def deep(seed: int = 0) -> nn.Sequential:
    """Three layers of awkward sizes, in float64."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    return layers.double()


def freeze(model: nn.Module, frozen: Sequence[str]) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def draw(n: int) -> Tensor:
        return torch.randn(24, n, generator=generator, dtype=torch.float64)

    return [(draw(5), draw(1)) for _ in range(STEPS * len(PHASES))]


@dataclass
class Run:
    """The losses of all steps, and the parameters at the end."""

    losses: list[float]
    full: dict[str, Tensor]


def phase_labels(name: str, p: Tensor) -> str | None:
    """Parameters with a history of their own: weight and bias of the last layer freeze at different times."""
    return "bias" if name == "4.bias" else None


def train_in_phases(mesh_of: Callable[[int], fs.Mesh], cls: Any, **options: Any) -> Run:
    """One phase after the other, each on its mesh and with its own layout; state carried over."""
    model, opt, losses = deep(), fs.optimizer(cls, **options), []
    layout = fs.plan(freeze(model, PHASES[0]), mesh_of(0), labels=phase_labels)
    params = fs.shard(model, layout)
    state = opt.init(params)
    data = iter(batches())
    for i, frozen in enumerate(PHASES):
        if i:
            layout = fs.plan(freeze(model, frozen), mesh_of(i), labels=phase_labels)
            params = fs.reshard(params, layout)
            state = fs.reshard(state, layout, fresh=opt.init(params))
        step = _step(model, opt, layout.mesh)
        for _ in range(STEPS):
            params, state, loss = step(params, state, *layout.mesh.split(next(data)))
            losses.append(loss.flatten()[0].item())
    return Run(losses, dict(fs.gather(params, lazy=False)))


def _step(model: nn.Module, opt: fs.Optimizer, mesh: fs.Mesh) -> Any:
    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        def loss_fn(params: fs.Sharded) -> Tensor:
            return ((functional_call(model, fs.gather(params), (x,)) - y) ** 2).mean()

        grads, loss = fs.grad_and_value(loss_fn)(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    return step


def train_unsharded(cls: Any, **options: Any) -> Run:
    """The same in plain torch: an optimizer a phase, which takes over the state of what it trains on."""
    model, losses, state = deep(), [], {}
    data = iter(batches())
    for frozen in PHASES:
        freeze(model, frozen)
        trainable = [p for p in model.parameters() if p.requires_grad]
        opt = cls(trainable, **options)
        opt.state.update({p: state[p] for p in trainable if p in state})
        for _ in range(STEPS):
            x, y = next(data)
            loss = ((model(x) - y) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        state = dict(opt.state)
    return Run(losses, {name: p.detach() for name, p in model.named_parameters()})
