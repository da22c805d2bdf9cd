"""Losses of torchebm that differentiate the energy by its input, and then by the parameters."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.referees.referee import Referee
from tests.referees.training import Task, trained, trained_by_fsdp2


def network(outputs: int) -> Any:
    """Of a point, and a time that it may ignore: a number, or a vector."""

    class Network(import_module("torchebm.core").BaseModel):
        def __init__(self) -> None:
            super().__init__(dtype=torch.float64)
            self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, outputs))

        def forward(self, x: Tensor, *_: Tensor) -> Tensor:
            return self.layers(x).squeeze(-1)

    return Network()


class Seeded(nn.Module):
    """A loss that draws the same numbers in every call."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        torch.manual_seed(7)
        with patch.object(torch, "randn_like", drawn):
            return self.loss(x, **inputs)


def drawn(x: Tensor, generator: object = None, **options: Any) -> Tensor:
    """As ``torch.randn_like``, which under a vmap draws apart for each rank if it is given a generator, or ``None``."""
    return torch.randn(x.shape, **options)


def loss(kind: str, outputs: int = 1, **options: Any) -> nn.Module:
    library = import_module("torchebm.losses")
    return Seeded(getattr(library, kind)(network(outputs), dtype=torch.float64, **options))


POINTS, SOURCE = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def referee(name: str, kind: str, batched: str = "", tolerance: float = 1e-10, **options: Any) -> Referee:
    source = {"x0": SOURCE} if "energy_type" in options else {}
    task = Task(partial(loss, kind, **options), partial(dict, x=POINTS, **source), randomness="same")
    program, fsdp2 = partial(trained, task), partial(trained_by_fsdp2, task)
    return Referee("torchebm", name, program, batched=batched, tolerance=tolerance, fsdp2=fsdp2)


DIFFERENCES = 1e-8  # it divides differences by 1e-10
EXPLICIT = {"outputs": 3, "ct": "linear"}
REFEREES = [
    referee("EnergyMatchingLoss", "EnergyMatchingLoss", batched="calling .item()", n_langevin_steps=3),
    *(
        referee(f"EquilibriumMatchingLoss, energy {energy}", "EquilibriumMatchingLoss", energy_type=energy, **EXPLICIT)
        for energy in ("dot", "l2")
    ),
    referee("EquilibriumMatchingLoss, implicit", "EquilibriumMatchingLoss", energy_type="none", **EXPLICIT),
    referee("ScoreMatching, exact", "ScoreMatching", hessian_method="exact"),
    referee("ScoreMatching, approximate", "ScoreMatching", hessian_method="approx", tolerance=DIFFERENCES),
    referee("DenoisingScoreMatching", "DenoisingScoreMatching"),
    referee("SlicedScoreMatching", "SlicedScoreMatching"),
]
