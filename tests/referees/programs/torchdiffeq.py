"""Solvers of torchdiffeq, whose functions have gathered parameters."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.referees.referee import Referee
from tests.referees.training import Task, trained


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.layers(y) * (1 + t) + torch.sin(y * y)


class Flow(nn.Module):
    """Where points are after some time."""

    def __init__(self, solver: str, method: str) -> None:
        super().__init__()
        self.velocity, self.solver, self.method = Velocity(), solver, method

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 4, dtype=x.dtype)
        options: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6} if self.method == "dopri5" else {}
        return getattr(import_module("torchdiffeq"), self.solver)(
            self.velocity, x, times, method=self.method, **options
        )[-1]


# Of different size on each rank, so that adaptive solvers take other steps there.
POINTS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
POINTS = POINTS * torch.tensor([0.1, 0.3, 1.0, 2.5])[:, None]


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


def of(name: str, solver: str, method: str, task: Any = None, **options: Any) -> Referee:
    made = Task(partial(Flow, solver, method), partial(dict, x=POINTS), squares, **(task or {}))
    return Referee("torchdiffeq", name, partial(trained, made), **options)


WHOLE, BOUND = {"lazy": False}, {"bound": True}
UNITS = "All ranks must use the same units in the same order"
WRITTEN = {"batched": "exists a Tensor"}
OWN = {"batched": "setup_context", "refused": "grad: backward differentiates a module's own parameter"}
REFEREES = [
    of("rk4", "odeint", "rk4", **WRITTEN),
    of("dopri5, other numbers of steps on each rank", "odeint", "dopri5", **WRITTEN, gloo=UNITS),
    of("dopri5, gather(lazy=False)", "odeint", "dopri5", WHOLE, **WRITTEN),
    of("odeint_adjoint by functional_call", "odeint_adjoint", "rk4", **OWN),
    of("odeint_adjoint by functional_call, lazy=False", "odeint_adjoint", "rk4", WHOLE, **OWN),
    of("odeint_adjoint by fs.bind", "odeint_adjoint", "rk4", BOUND, batched=OWN["batched"]),
]
