"""Find mislabelled digits by influence functions of a sharded model.

python examples/influence.py                             # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/influence.py        # the same program on 2 real gloo ranks

The influence of a training sample on the loss of clean held-out samples is -g' H^-1 v (Koh and Liang,
arxiv.org/abs/1703.04730): v is the held-out gradient, g that of the sample, H the Gauss-Newton matrix with damping.
Conjugate gradients solve with H on shards; products with H and with all g are forward and reverse derivatives by the
shards. No gradient of a single sample and no matrix is ever computed.

Of 142 nines, 100 have the label 4. The model learns that nines are fours, and the right labels have a large loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from side_by_side import Row, arguments, digits, dot, finish, nbytes, passed, ranks, train
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

import functorch_shard as fs

DAMPING, NUM_TRAIN, NUM_WRONG = 0.1, 1440, 100
losses = partial(F.cross_entropy, reduction="none")  # of each sample


def conjugate_gradients(operator: Callable[[Any], Any], b: Any, dot: Callable[[Any, Any], Tensor], steps: int) -> Any:
    """Solve ``operator(x) = b``, in terms of trees and their inner product."""
    x, r, p = optree.tree_map(torch.zeros_like, b), b, b
    for _ in range(steps):
        q = operator(p)
        step = dot(r, r) / dot(p, q)
        x = optree.tree_map(lambda x, p: x + step * p, x, p)  # noqa: B023
        old, r = r, optree.tree_map(lambda r, q: r - step * q, r, q)  # noqa: B023
        ratio = dot(r, r) / dot(old, old)
        p = optree.tree_map(lambda r, p: r + ratio * p, r, p)  # noqa: B023
    return x


def plus_damping(product: Any, v: Any) -> Any:
    return optree.tree_map(lambda a, b: a + DAMPING * b, product, v)


def by_shards(mesh: fs.Mesh, model: nn.Module, params: fs.Sharded, data: Any, held_out: Any, steps: int) -> Any:
    """The influence of every sample, and what was sent."""

    def predict(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,))

    @mesh.spmd
    def influences(params: fs.Sharded, data: Any, held_out: Any) -> Any:
        v = fs.grad(lambda params: F.cross_entropy(predict(params, held_out[0]), held_out[1]))(params)
        matrix = fs.curvature.gauss_newton(predict, F.cross_entropy)(params, *data)
        solution = conjugate_gradients(lambda p: plus_damping(matrix @ p, p), v, fs.curvature.vdot, steps)
        of_rank = -jvp(lambda params: losses(predict(params, data[0]), data[1]), (params,), (solution,))[1]
        return fs.collectives.all_gather(of_rank, mesh), solution

    with fs.testing.count_collectives() as seen:
        found, solution = influences(params, mesh.split(data), mesh.split(held_out))
    return found.flatten()[:NUM_TRAIN], solution, seen


def on_whole_tensors(model: nn.Module, full: dict[str, Tensor], data: Any, held_out: Any, steps: int) -> Tensor:
    """The same in plain torch."""

    def predict(full: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, full, (x,))

    def product(p: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs, pushed, *_ = jvp(lambda full: predict(full, data[0]), (full,), (p,))
        curved = jvp(torch.func.grad(lambda z: F.cross_entropy(z, data[1])), (outputs,), (pushed,))[1]
        return plus_damping(vjp(lambda full: predict(full, data[0]), full)[1](curved)[0], p)

    v = torch.func.grad(lambda full: F.cross_entropy(predict(full, held_out[0]), held_out[1]))(full)
    solution = conjugate_gradients(product, v, dot, steps)
    return -jvp(lambda full: losses(predict(full, data[0]), data[1]), (full,), (solution,))[1]


def main() -> None:
    args = arguments(__doc__, steps=60)  # of training, and of conjugate gradients
    mesh, (x, y) = ranks(args.ranks), digits()
    wrong = (y[:NUM_TRAIN] == 9) & ((y[:NUM_TRAIN] == 9).cumsum(0) <= NUM_WRONG)  # the first nines
    labels = torch.where(wrong, 4, y[:NUM_TRAIN])
    data, held_out = (x[:NUM_TRAIN], labels), (x[NUM_TRAIN : NUM_TRAIN + 336], y[NUM_TRAIN : NUM_TRAIN + 336])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def loss_fn(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, fs.gather(params), (x,)), y)

    start, parts = fs.shard(model, fs.plan(model, mesh)), args.steps * [mesh.split(data)]
    params, _, _ = train(mesh, start, fs.grad_and_value(loss_fn), parts, lr=1e-2)
    ours, solution, seen = by_shards(mesh, model, params, data, held_out, args.steps)
    full = {name: x.detach() for name, x in fs.gather(params, lazy=False).items()}
    whole = on_whole_tensors(model, full, data, held_out, args.steps)

    def found(scores: Tensor) -> float:
        """How many of as many samples as there are wrong labels, those with the highest scores, have one."""
        return wrong[scores.topk(NUM_WRONG).indices].double().sum().item()

    at_random, of_samples = NUM_WRONG**2 / NUM_TRAIN, losses(functional_call(model, full, (data[0],)), labels)
    rows = [
        Row(f"wrong labels among the {NUM_WRONG} most harmful", found(ours), found(whole), 0.0),
        Row("influences of all samples", ours, whole, 1e-8),
    ]
    costs = {
        "among as many": f"{at_random:.0f} at random, {found(of_samples):.0f} by the largest loss",
        "a rank passes in all": passed(seen),
        "a rank holds of each vector": f"{nbytes(solution, mesh):,} bytes of {sum(x.nbytes for x in full.values()):,}",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
