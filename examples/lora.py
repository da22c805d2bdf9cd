"""Adapt a frozen bfloat16 language model to other text by adapters of low rank, fully sharded.

python examples/lora.py                                # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/lora.py           # the same program on 2 real gloo ranks
python examples/lora.py --text book.txt --rank 16      # your text, adapters of rank 16

The GPT of gpt.py learns Python first; then the weights of its blocks are rounded to bfloat16, all it has is frozen, and
adapters (Hu et al., arxiv.org/abs/2106.09685) learn the prose of Python's manual. Base and adapters of a block are one
unit: gathered together, each in its own buffer. The base is no argument of the derivative: it is gathered, in two bytes
an element, and has no gradient, reduction or optimizer state.
"""

import copy
import sysconfig
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, batches, losses_of, read_text
from side_by_side import Row, arguments, beside, finish, nbytes, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

WIDTH, DEPTH, LR, BASE_LR = 64, 2, 2e-2, 4e-3
PROSE = f"{sysconfig.get_paths()['stdlib']}/pydoc_data/topics.py"


class LoRA(nn.Module):
    """A frozen linear layer and a correction of low rank, ``W x + b + scale * up (down x)``; ``up`` starts as zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = copy.deepcopy(base).bfloat16(), scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        y = F.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype))
        return y + self.scale * F.linear(F.linear(x, self.down), self.up)


def adapted(base: GPT, rank: int) -> GPT:
    """A frozen copy of the model, with adapters around the linear layers of its blocks."""
    model = copy.deepcopy(base).requires_grad_(False)
    for part in [*model.blocks.modules()]:
        for name, layer in [*part.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(part, name, LoRA(layer, rank))
    return model


def shards(mesh: fs.Mesh, model: GPT) -> tuple[fs.Sharded, fs.Sharded]:
    """Adapters, and the base."""
    return fs.partition(fs.shard(model, fs.plan(model, mesh, units="blocks")))


def gradient(model: GPT) -> Any:
    """By the first argument alone, the adapters."""

    def loss_fn(adapters: fs.Sharded, base: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return losses_of(functional_call(model, fs.gather(adapters, base), (x,)), y).mean()

    return fs.grad_and_value(loss_fn)


def main() -> None:
    args = arguments(__doc__, steps=40, pretrain_steps=100, batch_size=16, rank=8, text=PROSE)
    mesh, size = ranks(args.ranks), args.batch_size
    torch.manual_seed(0)
    whole, code = GPT(width=WIDTH, depth=DEPTH).double(), batches(read_text(None)[0], args.pretrain_steps, size)
    loss_of = lambda model, batch: losses_of(model(batch[0]), batch[1]).mean()  # noqa: E731
    _, before = train_unsharded(whole, lambda batch: loss_of(whole, batch), code, BASE_LR)
    model, (text, unseen) = adapted(whole, args.rank), read_text(args.text)
    data, held_out = batches(text, args.steps, size), batches(unseen, 1, 64)[0]
    start = loss_of(model, held_out).item()
    adapters, base = shards(mesh, model)
    found = train(mesh, adapters, gradient(model), [(base, *mesh.split(batch)) for batch in data], LR)
    expected = train_unsharded(model, lambda batch: loss_of(model, batch), data, LR)

    rows, costs = beside(mesh, found, expected)
    of_base = [one for one in found[2].issued if one.nbytes == 2 * one.numel]
    sent = [one for one in of_base if one.kind != "all_gather"]
    rows += [Row("reductions in bfloat16, and of the base", len(sent), 0, 0)]
    state = fs.optimizer(torch.optim.AdamW).init(found[0])
    costs |= {
        "of these in bfloat16": f"{len(of_base)} of {sum(one.nbytes for one in of_base):,} bytes",
        "a rank holds": f"{nbytes(adapters, mesh):,} bytes of adapters, {nbytes(state, mesh):,} of their optimizer's "
        f"state, and {nbytes(base, mesh):,} of the base",
        "loss of the base on Python": f"{before[0]:.3f} at first, {before[-1]:.3f} at last",
        "loss on unseen prose": f"{start:.3f}, and {loss_of(model, held_out).item():.3f} with adapters",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
