"""Differentially private training of a sharded model on handwritten digits.

python examples/dp_sgd.py                                # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/dp_sgd.py           # the same program on 2 real gloo ranks

DP-SGD (Abadi et al., arxiv.org/abs/1607.00133) with all samples in each step: the gradient of every sample is clipped
to a norm of 1, and noise is added to their sum. Norms come first, some samples at a time, by vmap over grad; then one
sharded gradient of the losses, each weighted by its clipping factor (docs/guides/per_sample.md has what this holds and
sends). Each rank draws the noise of its own shard, which depends on seed, names and indices alone: nothing is sent, and
any number of ranks trains the same model. (It is not a cryptographic generator: for a release draw from one.)
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import Row, arguments, digits, finish, flat, nbytes, passed, ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import functorch_shard as fs

CLIP, LR = 1.0, 1.0


def losses_of(model: nn.Module, full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:  # (B, 64), (B,) -> (B,)
    return F.cross_entropy(functional_call(model, full, (x,)), y, reduction="none")


def sample_grad(model: nn.Module, full: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return grad(lambda full: losses_of(model, full, x[None], y[None])[0])(full)


def clipping_factors(model: nn.Module, full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:  # (B,)
    def norm(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in sample_grad(model, full, x, y).values()]).sum().sqrt()

    return CLIP / vmap(norm, chunk_size=60)(x, y).clamp(min=CLIP)


def epsilon(noise: float, steps: int, delta: float) -> float:
    """Of ``steps`` Gaussian mechanisms, by zero-concentrated privacy (Bun and Steinke, arxiv.org/abs/1605.02065)."""
    rho = steps / (2 * noise**2) if noise else math.inf
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def train(mesh: fs.Mesh, model: nn.Module, data: tuple[Tensor, Tensor], noise: float, steps: int) -> Any:
    params, size = fs.shard(model, fs.plan(model, mesh)), len(data[0])
    opt = fs.optimizer(torch.optim.SGD, lr=LR, momentum=0.9)

    @mesh.spmd
    def private_step(params: fs.Sharded, state: Any, seed: int, x: Tensor, y: Tensor) -> Any:
        weights = clipping_factors(model, fs.gather(params), x, y)
        grads = fs.grad(lambda params: (weights * losses_of(model, fs.gather(params), x, y)).mean())(params)
        drawn = fs.curvature.randn_like(params, seed)
        noisy = {key: g + noise * CLIP / size * drawn[key] for key, g in grads.items()}
        return opt.step(params, grads=fs.Sharded(noisy, params.layout), state=state)

    state = opt.init(params)
    with fs.testing.count_collectives() as seen:
        private_step(params, state, 0, *mesh.split(data))  # a step is pure: this one is for the count
    for step in range(steps):
        params, state = private_step(params, state, step, *mesh.split(data))
    return params, seen


def train_unsharded(model: nn.Module, data: tuple[Tensor, Tensor], noise: float, steps: int) -> dict[str, Tensor]:
    """The same in plain torch, with the gradients of all samples at once."""
    whole = dict(model.named_parameters())
    opt = torch.optim.SGD(whole.values(), lr=LR, momentum=0.9)
    alone = fs.shard(model, fs.plan(model, fs.simulated_mesh(1)))  # for its noise
    for step in range(steps):
        full = {name: x.detach() for name, x in whole.items()}
        grads = vmap(lambda x, y: sample_grad(model, full, x, y))(*data)  # noqa: B023
        factors, drawn = clipping_factors(model, full, *data), fs.gather(fs.curvature.randn_like(alone, step))
        for name, x in whole.items():
            x.grad = (torch.tensordot(factors, grads[name], 1) + noise * CLIP * drawn[name]) / len(factors)
        opt.step()
    return {name: x.detach() for name, x in whole.items()}


def main() -> None:
    args = arguments(__doc__, steps=60, noise=5.0)  # noise: its standard deviation, in units of the clipping norm
    mesh, (x, y) = ranks(args.ranks), digits()
    data, held_out = (x[:1440], y[:1440]), (x[1440:], y[1440:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def accuracy(full: dict[str, Tensor]) -> float:
        return (functional_call(model, full, (held_out[0],)).argmax(1) == held_out[1]).double().mean().item()

    params, seen = train(mesh, model, data, args.noise, args.steps)
    by_clipping = fs.gather(train(mesh, model, data, 0.0, args.steps)[0], lazy=False)
    full, whole = fs.gather(params, lazy=False), train_unsharded(model, data, args.noise, args.steps)
    spent = epsilon(args.noise, args.steps, 1 / 1440)
    rows = [
        Row(f"accuracy at epsilon {spent:.1f}, delta 1/1440", accuracy(full), accuracy(whole), 0.0),
        Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-10),
    ]
    costs = {
        "accuracy without noise": f"{accuracy(by_clipping):.3f}",
        "a rank passes in a step": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
