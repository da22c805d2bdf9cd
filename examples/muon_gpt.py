"""Muon on a sharded GPT: each matrix has one owner among the ranks, which steps it whole.

python examples/muon_gpt.py                              # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/muon_gpt.py         # the same program on 2 real gloo ranks

Muon orthogonalizes the momentum of a matrix, so a rank cannot step its part of it alone. The ranks send the owner their
parts of the gradient and of the parameter, and get back their parts of the result; the momentum stays with the owner.
torch.optim.Muon itself does the step. Embeddings and vectors are AdamW's, step by step on their shards.
"""

from typing import Any

import torch
from gpt import GPT, batches, losses_of, read_text
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs

WIDTH, DEPTH, MUON_LR, ADAMW_LR = 64, 2, 0.02, 4e-3
Batches = list[tuple[Tensor, Tensor]]


def label(name: str, p: Tensor) -> str | None:
    """The matrices of the blocks are Muon's."""
    return None if "blocks" in name and p.ndim == 2 else "rest"


def new_model() -> GPT:
    torch.manual_seed(0)
    # Muon rounds to bfloat16: in float32 another order of summation is another training.
    return GPT(width=WIDTH, depth=DEPTH).double()


def loss_of(model: GPT, full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return losses_of(functional_call(model, full, (x,)), y).mean()


def train(mesh: fs.Mesh, opt: fs.Optimizer, data: Batches) -> Any:
    model = new_model()
    params = fs.shard(model, fs.plan(model, mesh, labels=label))

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda params: loss_of(model, fs.gather(params), x, y))(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    with fs.testing.count_collectives() as seen:
        train_step(params, state, *mesh.split(data[0]))  # a step is pure: this one is for the count
    for batch in data:
        params, state, loss = train_step(params, state, *mesh.split(batch))
        losses.append(loss)
    return params, state, torch.stack(losses), seen


def train_unsharded(data: Batches) -> tuple[dict[str, Tensor], Tensor]:
    """The same in plain torch."""
    model, losses = new_model(), []
    by_label: dict[str | None, list[Tensor]] = {}
    for name, p in model.named_parameters():
        by_label.setdefault(label(name, p), []).append(p)
    opts = [torch.optim.Muon(by_label[None], lr=MUON_LR), torch.optim.AdamW(by_label["rest"], lr=ADAMW_LR)]
    for x, y in data:
        loss = loss_of(model, dict(model.named_parameters()), x, y)
        model.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        losses.append(loss.detach())
    return {name: p.detach() for name, p in model.named_parameters()}, torch.stack(losses)


def main() -> None:
    args = arguments(__doc__, steps=50, batch_size=16, text="")  # sequences on all ranks together
    mesh, data = ranks(args.ranks), batches(read_text(args.text)[0], args.steps, args.batch_size)

    adamw = fs.optimizer(torch.optim.AdamW, lr=ADAMW_LR)
    muon = fs.optimizer(torch.optim.Muon, lr=MUON_LR, whole=True, labels={"rest": adamw})
    params, state, losses, seen = train(mesh, muon, data)
    (_, other_state, by_adamw, _), (whole, expected) = train(mesh, adamw, data), train_unsharded(data)
    rows = [
        Row("last loss by Muon", losses[-1].item(), expected[-1].item(), 1e-8),
        Row("losses of all steps", losses, expected, 1e-8),
        Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-8),
    ]
    costs = {
        "last loss by AdamW alone": f"{by_adamw[-1]:.3f}",
        "a rank passes in a step": passed(seen),
        "a rank holds of optimizer state": f"{nbytes(state, mesh):,} bytes, by AdamW {nbytes(other_state, mesh):,}",
        "a rank holds of parameters": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,}",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
