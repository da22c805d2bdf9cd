"""DiLoCo: workers train alone, each on data of its own, and now and then agree on one outer step.

python examples/diloco.py                                         # 2 workers of 2 simulated ranks in this process
torchrun --nproc-per-node 4 examples/diloco.py --codec int8       # on real gloo ranks; workers send each other int8

With replicate_axis=None ranks along "worker" share no gradients, and have parameters of their own. Inner steps are
AdamW's. How far a worker went is its outer gradient, and SGD with Nesterov momentum takes their mean
(arxiv.org/abs/2311.08105).
"""

from copy import deepcopy
from typing import Any

import torch
from optree import tree_map
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks
from torch import Tensor, nn

import functorch_shard as fs

INNER: dict[str, Any] = {"lr": 1e-2}
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
CODECS = {"none": fs.codecs.Codec(lambda x: x, lambda x: x), "int8": fs.codecs.int8()}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - (2 * x).sin()).square().mean()


def train(mesh: fs.Mesh, model: nn.Module, rounds: list[Tensor], codec: fs.codecs.Codec) -> Any:
    adamw, nesterov = fs.optimizer(torch.optim.AdamW, **INNER), fs.optimizer(torch.optim.SGD, **OUTER)
    params = fs.shard(model, fs.plan(model, mesh, replicate_axis=None))

    def mean(x: Tensor) -> Tensor:  # of shards, over workers
        codes = fs.collectives.all_gather(tree_map(lambda code: code[None], codec.encode(x)), mesh["worker"])
        each = [tree_map(lambda code, i=i: code[i], codes) for i in range(mesh["worker"].size)]
        return torch.stack([codec.decode(code).to(x.dtype) for code in each]).mean(0)

    @mesh.spmd
    def outer_step(batches: Tensor, params: Any, inner: Any, outer: Any) -> Any:
        local: Any = params
        for x in batches:
            grads = fs.grad(lambda local, x: loss_of(fs.bind(model, fs.gather(local)), x))(local, x)
            local, inner = adamw.step(local, grads=grads, state=inner)
        went: Any = tree_map(lambda a, b: mean(a - b), params, local)
        params, outer = nesterov.step(params, grads=went, state=outer)
        return params, inner, outer

    state: list[Any] = [params, adamw.init(params), nesterov.init(params)]
    with fs.testing.count_collectives() as seen:
        outer_step(mesh.split(rounds[0], dim=1), *state)  # a step is pure: this one is for the count
    for batches in rounds:
        state = outer_step(mesh.split(batches, dim=1), *state)
    return state[0], seen


def train_unsharded(model: nn.Module, rounds: list[Tensor], workers: int, sent: Any) -> Any:
    """The same in plain torch, one worker after the other."""
    copies, outer = [deepcopy(model) for _ in range(workers)], torch.optim.SGD(model.parameters(), **OUTER)
    inner, whole = [torch.optim.AdamW(copy.parameters(), **INNER) for copy in copies], dict(model.named_parameters())
    for batches in rounds:
        for worker, (local, opt) in enumerate(zip(copies, inner, strict=True)):
            local.load_state_dict(model.state_dict())
            for x in batches:
                opt.zero_grad()
                loss_of(local, x.chunk(workers)[worker]).backward()
                opt.step()
        went = [sent({name: (whole[name] - q).detach() for name, q in local.named_parameters()}) for local in copies]
        for name, p in whole.items():
            p.grad = torch.stack([each[name] for each in went]).mean(0)
        outer.step()
    return whole


def main() -> None:
    args = arguments(__doc__, steps=20, inner=10, workers=2, codec="none")
    mesh, codec = ranks(args.ranks, worker=args.workers, shard=-1), CODECS[args.codec]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).double()
    *rounds, unseen = torch.randn(args.steps + 1, args.inner, 48, 8).double()
    params, seen = train(mesh, model, rounds, codec)
    alone, before = fs.plan(model, fs.simulated_mesh(mesh.size // args.workers)), loss_of(model, unseen).item()

    def sent(went: Any) -> Any:  # what a codec makes of each shard
        shards: Any = fs.shard(went, alone)
        coded: Any = tree_map(lambda x: torch.stack([codec.decode(codec.encode(row)).to(x.dtype) for row in x]), shards)
        return fs.gather(coded)

    whole = train_unsharded(model, rounds, args.workers, sent)
    ours, theirs = (loss_of(fs.bind(model, p), unseen).item() for p in (fs.gather(params, lazy=False), whole))
    rows = [Row("loss", ours, theirs, 1e-12), Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-12)]
    costs = {
        "loss before training": f"{before:.3f}",
        f"a rank passes in {args.inner} inner steps and an outer one": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
