"""DiLoCo (arxiv.org/abs/2311.08105): workers train alone, on data of their own, and now and then take one outer step.

python examples/diloco.py                                         # 2 workers of 2 simulated ranks in this process
torchrun --nproc-per-node 4 examples/diloco.py --codec int8       # on real gloo ranks; workers send each other int8
"""

from typing import Any

import torch
from diloco_unsharded import CODECS, INNER, OUTER, loss_of, train_unsharded
from optree import tree_map
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks
from torch import Tensor, nn

import functorch_shard as fs


def train(mesh: fs.Mesh, model: nn.Module, rounds: list[Tensor], codec: fs.codecs.Codec) -> Any:
    adamw, nesterov = fs.optimizer(torch.optim.AdamW, **INNER), fs.optimizer(torch.optim.SGD, **OUTER)
    params = fs.shard(model, fs.plan(model, mesh, replicate_axis=None))  # along "worker" ranks share no gradients

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
    for batches in rounds:
        state = outer_step(mesh.split(batches, dim=1), *state)
    return state[0]


def main() -> None:
    args = arguments(__doc__, steps=20, inner=10, workers=2, codec="none")
    mesh, codec = ranks(args.ranks, worker=args.workers, shard=-1), CODECS[args.codec]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).double()
    rounds = [*torch.randn(args.steps, args.inner, 48, 8).double()]
    with fs.testing.count_collectives() as seen:
        params = train(mesh, model, rounds, codec)
    whole = flat(train_unsharded(model, rounds, args.workers, codec, mesh.size // args.workers))
    costs = {
        "a rank passes in all": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {whole.nbytes:,}",
    }
    finish(mesh, [Row("parameters", fs.curvature.to_vector(params), whole, 1e-12)], costs)


if __name__ == "__main__":
    main()
