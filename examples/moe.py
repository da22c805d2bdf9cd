"""A mixture of experts on ranks that are experts x shards: tokens go to their experts by all-to-all, and back.

python examples/moe.py                                   # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/moe.py              # the same program on 4 real gloo ranks

Every rank has sequences of its own. Experts (mixture.py) are divided among the ranks of the axis "expert", and each
one's parameters among those of "shard": a rank makes its own whole, and no others. Other parameters are divided among
all ranks. The loss that balances the load has a product of two means over all tokens: those are means over ranks
inside the loss.
"""

import math
from typing import Any

import torch
from gpt import CONTEXT, GPT, Attention, batches, losses_of, read_text
from mixture import CHOSEN, EXPERTS, WIDTH, Experts, Mixture, by_all_to_all, on_whole_tensors
from side_by_side import Row, arguments, beside, finish, ranks, train, train_unsharded
from stacks import with_stacks
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

DEPTH, LR = 2, 4e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.experts = Attention(WIDTH), nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor, capacity: int, mixture: Mixture) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x)
        mixed, means = self.experts(self.norm(x), capacity, mixture)
        return x + mixed, means


class Model(GPT):
    """``capacity``: the places of an expert, over the tokens it gets on average."""

    def __init__(self, capacity: float = 1.25, balance: float = 1e-2) -> None:
        super().__init__(width=WIDTH, depth=0)
        self.capacity, self.balance, self.blocks = capacity, balance, nn.ModuleList([Block() for _ in range(DEPTH)])

    def places(self, length: int) -> int:
        return math.ceil(self.capacity * length * CHOSEN / EXPERTS)

    def forward(self, tokens: Tensor, mixture: Mixture = on_whole_tensors) -> tuple[Tensor, Tensor]:
        """Logits, and of each layer the means of ``route``, (DEPTH, 3, E)."""
        x, found = self.first(tokens), []
        for block in self.blocks:
            x, means = block(x, self.places(tokens.shape[-1]), mixture)
            found.append(means)
        return self.last(x), torch.stack(found)

    def loss(self, found: tuple[Tensor, Tensor], y: Tensor, mean: Any = lambda x: x) -> Tensor:
        """The mean loss, and in each layer E times the sum over experts of part of the tokens times probability."""
        (logits, means), balance = found, self.balance * EXPERTS / CHOSEN
        likely, load, _ = mean(means).unbind(1)
        return losses_of(logits, y).mean() + balance * (likely * load).sum()


class Program:
    """The model on a mesh whose axes end with "expert" and "shard"."""

    def __init__(self, mesh: fs.Mesh, model: Model) -> None:
        self.mesh, self.model, self.mixture = mesh, model, by_all_to_all(mesh["expert"])
        named = dict(model.named_parameters())
        stacks = [name for name in named if name.endswith((".up", ".down"))]
        self.params, self.local = with_stacks(mesh, "expert", named, stacks)

    def split(self, batch: Any) -> Any:
        """This rank's sequences."""
        return self.mesh.split(batch)

    def of_rank(self, params: fs.Sharded, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return functional_call(self.model, self.local(params), (tokens, self.mixture))

    def loss(self, params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return self.model.loss(self.of_rank(params, x), y, lambda means: fs.collectives.pmean(means, self.mesh))


def main() -> None:
    args = arguments(__doc__, steps=30, batch_size=16, capacity=1.25, balance=1e-2, replicas=1, text="")
    mesh = ranks(args.ranks, replicate=args.replicas, expert=2, shard=-1)
    data = batches(read_text(args.text)[0], args.steps, args.batch_size)
    torch.manual_seed(0)
    model = Model(args.capacity, args.balance).double()
    program = Program(mesh, model)
    parts = [program.split(batch) for batch in data]
    found = train(mesh, program.params, fs.grad_and_value(program.loss), parts, LR)
    whole = train_unsharded(model, lambda batch: model.loss(model(batch[0]), batch[1]), data, LR)

    sent = args.batch_size // mesh.size * EXPERTS * model.places(CONTEXT) * WIDTH  # by a rank to experts, in a layer
    by_formula = 8 * 4 * DEPTH * sent if mesh.axes["expert"] > 1 else 0  # and back, and as much in backward
    rows, costs = beside(mesh, found, whole)
    rows += [Row("bytes to all_to_all, and by formula", found[2].nbytes("all_to_all"), by_formula, 0)]
    _, load, taken = model(data[-1][0])[1][-1] / CHOSEN
    costs["choices without a place, in the last layer"] = f"{1 - taken.sum().item():.1%}"
    costs["its tokens by expert"] = "".join(f"\n{part:6.1%} {'#' * round(200 * part)}" for part in load.tolist())
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
