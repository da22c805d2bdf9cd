"""The spectrum of the Hessian of a sharded GPT, before and after some training.

python examples/lanczos.py                               # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/lanczos.py          # the same program on 2 real gloo ranks

Lanczos iteration with Hessian-vector products and with vectors that stay sharded: what it keeps is one vector for each
step, here of all parameters of the GPT of gpt.py, and each rank keeps its part. Eigenvalues and weights of the
tridiagonal matrix are a quadrature of the density of eigenvalues (Ghorbani et al., arxiv.org/abs/1901.10159).
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from gpt import GPT, batches, losses_of, read_text
from side_by_side import Row, arguments, dot, finish, nbytes, passed, ranks
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import functorch_shard as fs


def lanczos(matvec: Callable[[Any], Any], v: Any, dot: Callable[[Any, Any], Tensor], steps: int) -> Any:
    """Eigenvalues, weights and the basis, with full reorthogonalization; in terms of trees and their inner product."""

    def plus(y: Any, a: Tensor, x: Any) -> Any:
        return optree.tree_map(lambda y, x: y + a * x, y, x)

    def normalized(v: Any) -> Any:
        norm = dot(v, v).sqrt()
        return optree.tree_map(lambda x: x / norm, v)

    basis, alphas, betas = [normalized(v)], [], []
    for _ in range(steps):
        w = matvec(basis[-1])
        alphas.append(dot(basis[-1], w))
        for q in (*basis, *basis):
            w = plus(w, -dot(q, w), q)
        betas.append(dot(w, w).sqrt())
        basis.append(normalized(w))
    off = torch.stack(betas[:-1])
    values, vectors = torch.linalg.eigh(torch.diag(torch.stack(alphas)) + torch.diag(off, 1) + torch.diag(off, -1))
    return values, vectors[0].square(), basis


def picture(values: Tensor, weights: Tensor, columns: int = 57) -> str:
    """The weight of the eigenvalues in each column, by its logarithm: from 1e-8, a dot, to 0.1 and more, ``@``."""
    low, high = values.min().item(), values.max().item()
    place = ((values - low) / (high - low) * (columns - 1)).round().long()
    density = torch.zeros(columns, dtype=values.dtype).index_add(0, place, weights)
    levels = (density.clamp(min=1e-9).log10() + 9).clamp(0, 8).long()
    return f"{low:8.3f} |{''.join(' .:-=+*#@'[i] for i in levels)}| {high:.3f}"


def main() -> None:
    args = arguments(__doc__, steps=15, batch_size=8, text="")  # steps of Lanczos, and twice as many of training
    mesh, text = ranks(args.ranks), read_text(args.text)[0]
    *data, last = batches(text, 2 * args.steps + 1, args.batch_size)
    torch.manual_seed(0)
    model = GPT(width=64, depth=2).double()
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.AdamW, lr=4e-3)

    def loss_of(full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no forward mode
            return losses_of(functional_call(model, full, (x,)), y).mean()

    def loss_fn(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(fs.gather(params), x, y)

    @mesh.spmd
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        return opt.step(params, grads=fs.grad(loss_fn)(params, x, y), state=state)

    @mesh.spmd(out_dims=(None, None, 0))
    def spectrum(params: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        hessian, start = fs.curvature.hessian(loss_fn)(params, x, y), fs.curvature.randn_like(params, seed=1)
        return lanczos(hessian.matvec, start, fs.curvature.vdot, args.steps)

    batch, state = mesh.split(last), opt.init(params)
    *before, _ = spectrum(params, *batch)
    for each in data:
        params, state = train_step(params, state, *mesh.split(each))
    with fs.testing.count_collectives() as seen:
        *after, basis = spectrum(params, *batch)

    whole = {name: x.detach() for name, x in fs.gather(params, lazy=False).items()}
    start = dict(fs.gather(fs.curvature.randn_like(params, seed=1), lazy=False))

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return jvp(lambda full: torch.func.grad(loss_of)(full, *last), (whole,), (v,))[1]

    expected, _, _ = lanczos(product, start, dot, args.steps)
    rows = [
        Row("largest eigenvalue after training", after[0][-1].item(), expected[-1].item(), 1e-8),
        Row("smallest eigenvalue after training", after[0][0].item(), expected[0].item(), 1e-8),
    ]
    whole_bytes = sum(x.nbytes for x in whole.values()) * len(basis)
    costs = {
        "before": picture(*before),
        "after ": picture(*after),
        "a rank passes in all": passed(seen),
        "a rank holds of the basis": f"{nbytes(basis, mesh):,} bytes of {whole_bytes:,}",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
