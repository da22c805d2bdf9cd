"""A force field on shards: forces are a derivative of the energy by positions, inside of the loss.

python examples/force_field.py                         # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/force_field.py    # the same program on 2 real gloo ranks

The model passes scalars and vectors between atoms, as PaiNN does (Schuett et al., arxiv.org/abs/2102.03150): its energy
does not change when a molecule turns, and its forces turn with it. It learns a Morse potential.
FSDP2 runs the same model and loss, and raises: backward needs parameters that it has freed.
"""

from collections.abc import Callable
from typing import Any

import torch
from side_by_side import Row, arguments, beside, finish, fsdp2, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functorch_shard as fs

ATOMS, WIDTH, RADII, LR = 5, 24, 12, 1e-2
OTHERS = ~torch.eye(ATOMS, dtype=torch.bool)[:, :, None]  # no atom sends messages to itself


class Message(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Linear(RADII, 3 * WIDTH)
        self.scalars = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        self.mix = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, s: Tensor, v: Tensor, radial: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = (self.scalars(s)[:, None] * self.filter(radial) * OTHERS).chunk(3, -1)  # (n, to, from, WIDTH)
        v = v + (b[..., None] * direction[:, :, :, None] + c[..., None] * v[:, None]).sum(2)  # (n, atom, WIDTH, 3)
        return s + a.sum(2) + self.mix(torch.cat([s, v.square().sum(-1)], -1)), v


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.messages = nn.ModuleList([Message(), Message()])
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:  # (n, ATOMS, 3) -> (n,)
        arrow = x[:, None] - x[:, :, None]
        distance = (arrow.square().sum(-1) + 1e-6).sqrt()[..., None]
        radial = torch.exp(-4 * (distance - torch.linspace(0.5, 4, RADII, dtype=x.dtype)).square())
        s = self.first.expand(len(x), ATOMS, WIDTH)
        v = torch.zeros_like(s)[..., None].expand(-1, -1, -1, 3)
        for message in self.messages:
            s, v = message(s, v, radial, arrow / distance)
        return self.readout(s).sum((1, 2))


def potential(x: Tensor) -> Tensor:
    """The energy of molecules (n, ATOMS, 3): (n,)."""
    r = ((x[:, None] - x[:, :, None]).square().sum(-1) + 1e-6).sqrt()
    return ((1 - torch.exp(1.5 - r)).square() * OTHERS[..., 0]).sum((1, 2)) / 4


def energy_and_forces(energy: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((value := energy(x)).sum(), x, create_graph=True)
    return value, -slope


def loss_of(energy: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, f: Tensor) -> Tensor:
    value, forces = energy_and_forces(energy, x)
    return (value - e).square().mean() / ATOMS**2 + (forces - f).square().mean()


def molecules(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    corners = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 1], [0, 1, 1], [1.5, 1.5, 1.5]], dtype=torch.float64)
    x = 1.2 * corners + 0.15 * torch.randn(number, ATOMS, 3, generator=generator, dtype=torch.float64)
    energy, forces = energy_and_forces(potential, x)
    return x, energy.detach(), forces.detach()


def gradient(model: nn.Module) -> Any:
    return fs.grad_and_value(lambda params, *batch: loss_of(fs.bind(model, params), *batch))


def under_fsdp2(batch: tuple[Tensor, ...]) -> None:
    model = Energy().double()
    for unit in ([*model.messages], model):
        fully_shard(unit)
    loss_of(model, *batch).backward()


def main() -> None:
    args = arguments(__doc__, steps=60, molecules=16)
    mesh, generator = ranks(args.ranks), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, batches = Energy().double(), [molecules(args.molecules, generator) for _ in range(args.steps)]

    params = fs.shard(model, fs.plan(model, mesh, units="blocks"))
    found = train(mesh, params, gradient(model), [mesh.split(x) for x in batches], LR)
    rows, costs = beside(mesh, found, train_unsharded(model, lambda batch: loss_of(model, *batch), batches, LR))
    energy, (x, _, f) = fs.bind(model, fs.gather(found[0], lazy=False)), molecules(64, generator)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    forces, turned = (energy_and_forces(energy, y)[1] for y in (x, x @ turn))
    pulled = x[:1] + torch.linspace(0, 0.4, 6)[:, None, None] * (torch.arange(ATOMS) == ATOMS - 1)[:, None]
    pairs = zip(potential(pulled).tolist(), energy(pulled).tolist(), strict=True)
    rows += [Row("forces of turned molecules", turned.detach(), (forces @ turn).detach(), 1e-9)]
    costs |= {
        "error of forces of 64 unseen molecules": f"{(forces - f).norm() / f.norm():.3f} of their size",
        "energy as an atom is pulled away, and found": ", ".join(f"{e:.2f} {found:.2f}" for e, found in pairs),
        "FSDP2": fsdp2(lambda: under_fsdp2(batches[0])),
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
