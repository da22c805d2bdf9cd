"""An equation solved by a sharded network: second derivatives by inputs inside of the loss that is differentiated.

python examples/pinn.py                          # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/pinn.py     # the same program on 2 real gloo ranks

The equation is u_xx + u_yy = u^3 + f on the unit square, with u = 0 around it and f such that the solution is known.
The loss is the mean square of its residual at random points (Raissi et al., arxiv.org/abs/1711.10561), in plain torch.
FSDP2 runs the same model and loss, and raises: backward needs parameters that it has freed.
"""

from collections.abc import Callable
from math import pi
from typing import Any

import torch
from side_by_side import arguments, beside, finish, fsdp2, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functorch_shard as fs

WIDTH, LR = 32, 2e-2


class Solution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:  # (n, 2) -> (n,); zero on the boundary
        return 16 * (x * (1 - x)).prod(1) * self.net(2 * x - 1).squeeze(1)


def solution(x: Tensor) -> Tensor:
    return (pi * x[:, 0]).sin() * (2 * pi * x[:, 1]).sin()


def residual(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    value = u(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    known = solution(x)
    f = -5 * pi**2 * known - known**3
    return (seconds[0] + seconds[1] - value**3 - f) / (5 * pi**2)


def gradient(model: nn.Module) -> Any:
    return fs.grad_and_value(lambda params, points: residual(fs.bind(model, params), points).square().mean())


def under_fsdp2(points: Tensor) -> None:
    model = Solution().double()
    for layer in model.net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    residual(model, points).square().mean().backward()


def main() -> None:
    args = arguments(__doc__, steps=120, points=128)
    mesh, generator = ranks(args.ranks), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Solution().double()
    batches = [torch.rand(args.points, 2, generator=generator, dtype=torch.float64) for _ in range(args.steps)]

    params = fs.shard(model, fs.plan(model, mesh))
    found = train(mesh, params, gradient(model), [(mesh.split(x),) for x in batches], LR)
    whole = train_unsharded(model, lambda points: residual(model, points).square().mean(), batches, LR)
    rows, costs = beside(mesh, found, whole)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 17), torch.linspace(0, 1, 33)).double()
    u = fs.bind(model, fs.gather(found[0], lazy=False))(grid).detach()
    shades = " .:-=+*#%@"
    picture = ["".join(shades[int(4.99 * (1 + x))] for x in row.clamp(-1, 1)) for row in u.reshape(17, 33)]
    costs |= {
        "largest error of the solution": f"{(u - solution(grid)).abs().max():.3f}, of values to 1",
        "FSDP2": fsdp2(lambda: under_fsdp2(batches[0])),
        "the solution, from -1 (blank) to 1": "\n" + "\n".join(picture),
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
