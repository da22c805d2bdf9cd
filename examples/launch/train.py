"""The program that every file of this folder starts: a few steps of a small network, with the same losses on any ranks.

torchrun --nproc-per-node 2 examples/launch/train.py     # without torchrun: one rank
"""

import argparse

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs


def task() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, and a global batch: the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 17, dtype=torch.float64), nn.Tanh(), nn.Linear(17, 1, dtype=torch.float64))
    x = torch.randn(64, 5, dtype=torch.float64)
    return model, x, x.sum(1, keepdim=True).sin()


def train(mesh: fs.Mesh, steps: int) -> list[float]:
    """The loss of each step, over the batches of all ranks."""
    model, x, y = task()
    batch = mesh.split((x.to(mesh.device), y.to(mesh.device)))
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.Adam, lr=1e-2)

    @mesh.spmd
    def step(params, state, x, y):
        error = lambda params: (functional_call(model, fs.gather(params), (x,)) - y).square().mean()  # noqa: E731
        grads, loss = fs.grad_and_value(error)(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state, *batch)
        losses.append(loss.flatten()[0].item())
    return losses


def as_rank(steps: int) -> None:
    """What each rank does, whoever started it."""
    mesh = fs.init_mesh()
    print(f"rank {mesh.rank} of {mesh}: {train(mesh, steps)}", flush=True)


def main(steps: int) -> None:
    """As one process of a job, which makes the process group, if there is to be one, and ends it."""
    as_rank(steps)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # exit together
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    main(parser.parse_args().steps)
