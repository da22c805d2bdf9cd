"""Force fields of mace: energies, and forces as derivatives by positions inside of the loss."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import functorch_shard as fs
from tests.referees.referee import Referee, Where
from tests.referees.training import whole_of

ATOMS = 4


def model() -> nn.Module:
    with torch.serialization.safe_globals([slice]):  # e3nn 0.4 loads its constants when it is imported
        o3 = import_module("e3nn.o3")
    modules = import_module("mace.modules")

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return modules.ScaleShiftMACE(
            r_max=4.0,
            num_bessel=4,
            num_polynomial_cutoff=3,
            max_ell=2,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            num_interactions=2,
            num_elements=2,
            hidden_irreps=o3.Irreps("4x0e + 4x1o"),
            MLP_irreps=o3.Irreps("4x0e"),
            atomic_energies=np.zeros(2),
            avg_num_neighbors=3.0,
            atomic_numbers=[1, 8],
            correlation=2,
            gate=torch.nn.functional.silu,
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        )
    finally:
        torch.set_default_dtype(default)


EDGES = torch.tensor([[i, j] for i in range(ATOMS) for j in range(ATOMS) if i != j]).T


def molecules(num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, energies and forces of one molecule for each rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = (num_ranks, ATOMS, 3), (num_ranks, 1), (num_ranks, ATOMS, 3)
    x, e, f = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, e, f


def loss(net: Any, positions: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
    """Of one molecule, with an edge between each two atoms."""
    nothing = torch.zeros(EDGES.shape[1], 3, dtype=torch.float64)
    kinds = torch.eye(2, dtype=torch.float64)[torch.arange(ATOMS) % 2]
    cell = 20 * torch.eye(3, dtype=torch.float64)
    graph = {"edge_index": EDGES, "shifts": nothing, "unit_shifts": nothing, "node_attrs": kinds, "cell": cell}
    batch = {"batch": torch.zeros(ATOMS, dtype=torch.int64), "ptr": torch.tensor([0, ATOMS])}
    out = net({"positions": positions, **graph, **batch}, training=True)
    return (out["energy"] - energy).square().mean() + (out["forces"] - forces).square().mean()


def gradients(where: Where) -> dict[str, Any]:
    net = model()
    if isinstance(where, int):
        torch.stack([loss(net, *molecule) for molecule in zip(*molecules(where), strict=True)]).mean().backward()
        return {"gradients": {name: p.grad for name, p in net.named_parameters()}}
    batch = dict(zip("xef", molecules(where.size), strict=True))
    of_rank = lambda full, **molecule: loss(fs.bind(net, full), *(x[0] for x in molecule.values()))  # noqa: E731
    return {"gradients": whole_of(where, net, batch, of_rank)}


REFEREES = [Referee("mace", "energies and forces", gradients, batched="scatter_add_")]
