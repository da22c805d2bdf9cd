"""Meta-learning through a gradient step: a sharded network that learns a sine wave from ten points.

python examples/maml.py                                  # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/maml.py             # the same program on 2 real gloo ranks

MAML (Finn et al., arxiv.org/abs/1703.03400): the meta-gradient is that of the loss after one step of gradient descent
on a task, so it has second derivatives. Each rank has tasks of its own: it gathers the parameters once and
differentiates its own steps by the whole tensors; the outermost derivative is fs.grad, by the shards.
"""

import math
from functools import partial
from typing import Any

import torch
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import functorch_shard as fs

INNER_LR, LR, SHOTS, TASKS = 0.05, 1e-2, 10, 32
Tasks = tuple[Tensor, Tensor, Tensor, Tensor]  # points to learn from and points to test, each (tasks, SHOTS, 1)


def sines(generator: torch.Generator, number: int) -> Tasks:
    """Amplitude from 0.1 to 5, phase from 0 to pi, as in the paper."""
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)
    amplitude, phase = 0.1 + 4.9 * draw(number, 1, 1), math.pi * draw(number, 1, 1)
    x = 10 * draw(number, 2 * SHOTS, 1) - 5
    y = amplitude * (x - phase).sin()
    return x[:, :SHOTS], y[:, :SHOTS], x[:, SHOTS:], y[:, SHOTS:]


def error(model: nn.Module, full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (functional_call(model, full, (x,)) - y).square().mean()


def after_a_step(model: nn.Module, full: dict[str, Tensor], task: Tasks) -> Tensor:
    """The error on a task's test points after one step on the points to learn from."""
    x, y, x_test, y_test = task
    grads = grad(lambda full: error(model, full, x, y))(full)
    return error(model, {name: p - INNER_LR * grads[name] for name, p in full.items()}, x_test, y_test)


def meta_loss(model: nn.Module, full: dict[str, Tensor], tasks: Tasks) -> Tensor:
    return vmap(lambda task: after_a_step(model, full, task))(tasks).mean()


def train(mesh: fs.Mesh, model: nn.Module, batches: list[Tasks]) -> Any:
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.Adam, lr=LR)

    @mesh.spmd
    def meta_step(params: fs.Sharded, state: Any, tasks: Tasks) -> Any:
        grads = fs.grad(lambda params: meta_loss(model, dict(fs.gather(params)), tasks))(params)
        return opt.step(params, grads=grads, state=state)

    state = opt.init(params)
    with fs.testing.count_collectives() as seen:
        meta_step(params, state, mesh.split(batches[0]))  # a step is pure: this one is for the count
    for tasks in batches:
        params, state = meta_step(params, state, mesh.split(tasks))
    return params, seen


def train_unsharded(model: nn.Module, batches: list[Tasks]) -> dict[str, Tensor]:
    """The same in plain torch."""
    whole = dict(model.named_parameters())
    opt = torch.optim.Adam(whole.values(), lr=LR)
    for tasks in batches:
        grads = grad(lambda full: meta_loss(model, full, tasks))({name: x.detach() for name, x in whole.items()})  # noqa: B023
        for name, x in whole.items():
            x.grad = grads[name]
        opt.step()
    return {name: x.detach() for name, x in whole.items()}


def main() -> None:
    args = arguments(__doc__, steps=200)
    mesh, generator = ranks(args.ranks), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    batches, unseen = [sines(generator, TASKS) for _ in range(args.steps)], sines(generator, 512)
    start = meta_loss(model, {name: x.detach() for name, x in model.named_parameters()}, unseen).item()
    params, seen = train(mesh, model, batches)
    full, whole = fs.gather(params, lazy=False), train_unsharded(model, batches)

    def new_tasks(full: dict[str, Tensor]) -> float:
        return meta_loss(model, dict(full), unseen).item()

    before_step = torch.stack([error(model, whole, x, y) for x, y in zip(*unseen[2:], strict=True)]).mean()
    rows = [
        Row("error on 512 new sines after one step", new_tasks(full), new_tasks(whole), 1e-8),
        Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-8),
    ]
    costs = {
        "the same error before meta-training": f"{start:.3f}, and without the step: {before_step:.3f}",
        "a rank passes in a step": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
