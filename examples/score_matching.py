"""Score matching of a sharded energy: a derivative by parameters of second derivatives by inputs.

python examples/score_matching.py                        # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/score_matching.py   # the same program on 2 real gloo ranks

The loss of Hyvarinen (jmlr.org/papers/v6/hyvarinen05a) for a density exp(-E): half the square of the score -dE/dx plus
its divergence, which needs no samples of the model and no normalization. Here it is written as it is in the paper, by
torch.func.jvp over torch.func.grad; fs.grad differentiates it by the shards. The data are eight Gaussians on a circle,
whose true score is known.
"""

import math
from typing import Any

import torch
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import functorch_shard as fs

SPREAD, LR = 0.35, 5e-3
Full = dict[str, Tensor]


def centers() -> Tensor:  # (8, 2)
    angles = torch.arange(8, dtype=torch.float64) * math.pi / 4
    return 2 * torch.stack([angles.cos(), angles.sin()], 1)


def samples(number: int, generator: torch.Generator) -> Tensor:  # (number, 2)
    chosen = centers()[torch.randint(8, (number,), generator=generator)]
    return chosen + SPREAD * torch.randn(number, 2, generator=generator, dtype=torch.float64)


def true_score(x: Tensor) -> Tensor:  # (2,) -> (2,)
    return grad(lambda x: torch.logsumexp(-(x - centers()).square().sum(1) / (2 * SPREAD**2), 0))(x)


def score(model: nn.Module, full: Full, x: Tensor) -> Tensor:  # (2,) -> (2,)
    return -grad(lambda x: functional_call(model, full, (x,)).squeeze())(x)


def loss_of(model: nn.Module, full: Full, batch: Tensor) -> Tensor:
    def of_sample(x: Tensor) -> Tensor:
        s, rows, *_ = vmap(lambda v: jvp(lambda x: score(model, full, x), (x,), (v,)))(torch.eye(2, dtype=x.dtype))
        return s[0].square().sum() / 2 + rows.trace()

    return vmap(of_sample)(batch).mean()


def train(mesh: fs.Mesh, model: nn.Module, batches: list[Tensor]) -> Any:
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.Adam, lr=LR)

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, batch: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda params: loss_of(model, fs.gather(params), batch))(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    with fs.testing.count_collectives() as seen:
        train_step(params, state, mesh.split(batches[0]))  # a step is pure: this one is for the count
    for batch in batches:
        params, state, loss = train_step(params, state, mesh.split(batch))
        losses.append(loss)
    return params, torch.stack(losses), seen


def train_unsharded(model: nn.Module, batches: list[Tensor]) -> tuple[Full, Tensor]:
    """The same in plain torch, by backward through autograd's double backward."""
    opt, losses = torch.optim.Adam(model.parameters(), lr=LR), []
    for batch in batches:
        x = batch.clone().requires_grad_()
        s = torch.autograd.grad(-model(x).sum(), x, create_graph=True)[0]
        rows = [torch.autograd.grad(s[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        loss = (s.square().sum(1) / 2 + rows[0] + rows[1]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return {name: p.detach() for name, p in model.named_parameters()}, torch.stack(losses)


def picture(model: nn.Module, full: Full) -> str:
    """The learned density on a grid."""
    grid = torch.cartesian_prod(torch.linspace(-3, 3, 15), torch.linspace(-3, 3, 31)).double()
    density = (-functional_call(model, full, (grid,)).detach()).view(15, 31)
    levels = (9 * (density - density.max()).exp()).long()
    return "\n".join("".join(" .:-=+*#%@"[i] for i in row) for row in levels)


def main() -> None:
    args = arguments(__doc__, steps=500, batch_size=256)
    mesh, generator = ranks(args.ranks), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)).double()
    batches, unseen = [samples(args.batch_size, generator) for _ in range(args.steps)], samples(1024, generator)
    params, losses, seen = train(mesh, model, batches)
    full = fs.gather(params, lazy=False)
    whole, expected = train_unsharded(model, batches)

    def missed(full: Full) -> float:
        """The part of the true score that the learned one does not have."""
        truth, found = vmap(true_score)(unseen), vmap(lambda x: score(model, full, x))(unseen)
        return ((found - truth).square().sum() / truth.square().sum()).item()

    rows = [
        Row("part of the true score that is missing", missed(full), missed(whole), 1e-8),
        Row("losses of all steps", losses, expected, 1e-8),
        Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-8),
    ]
    costs = {
        "a rank passes in a step": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters",
        "the learned density": f"\n{picture(model, full)}",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
