"""A sequence divided among ranks: ring attention by ppermute, and Ulysses by all-to-all, beside attention on the whole.

python examples/long_context.py                          # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/long_context.py     # the same program on 4 real gloo ranks

Batches are divided over the axis "shard", each sequence over "context"; parameters over both. Ring attention
(arxiv.org/abs/2310.01889): keys and values go round, and each rank adds up what its queries make of each block.
Ulysses (arxiv.org/abs/2309.14509): an all-to-all gives each rank the whole sequence of some heads, and another one
brings the outputs back. It sends less, and needs as many heads as ranks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpt import GPT, batches, causal, losses_of, read_text
from side_by_side import Row, arguments, beside, finish, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

WIDTH, DEPTH, LENGTH, LR = 64, 2, 256, 4e-3
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k, v, each (B, H, T, D): causal


@fs.remat  # a block's scores, (B, H, S, S), are not kept for backward, but computed again
def attend(state: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    """The online softmax: maximum, sum and output, each (B, H, S, -1), after one more block of keys and values."""
    largest, total, output = state
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf)
    new = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))  # any number gives the same result
    weights, fade = (scores - new).exp(), (largest - new).exp()
    return new, total * fade + weights.sum(-1, keepdim=True), output * fade + weights @ v


def ring(axis: fs.Axis, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over the sequence that the ranks of ``axis`` have parts of, in their order."""
    to_next = [(rank, (rank + 1) % axis.size) for rank in range(axis.size)]
    here, steps = fs.collectives.axis_index(axis), torch.arange(q.shape[-2], device=q.device)
    state = (torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q))
    both = torch.stack([k, v])
    for hop in range(axis.size):
        owner = (here - hop) % axis.size  # the first block is this rank's own, where each token attends to itself
        future = owner * len(steps) + steps > here * len(steps) + steps[:, None]
        state = attend(state, q, both[0], both[1], future)
        if hop < axis.size - 1:
            both = fs.collectives.ppermute(both, axis, to_next)
    return state[2] / state[1]


def ulysses(axis: fs.Axis, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, by the whole sequence of each of ``4 / axis.size`` heads."""
    of_heads = fs.collectives.all_to_all(torch.stack([q, k, v]), axis, split_dim=2, concat_dim=3)
    return fs.collectives.all_to_all(causal(*of_heads), axis, split_dim=2, concat_dim=1)


class Model(GPT):
    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        del self.before, self.before_that  # of which another rank has the first bytes

    def forward(self, x: Tensor, y: Tensor, start: Tensor | int = 0, attention: Attention = causal) -> Tensor:
        """The mean loss of each sequence, over tokens that count from ``start`` in it."""
        x = self.embed(x) + self.position[start + torch.arange(x.shape[-1], device=x.device)]
        for block in self.blocks:
            x = block(x, attention)
        return losses_of(self.last(x), y)


class Program:
    """The model on a mesh whose axes end with "shard" and "context"."""

    def __init__(self, mesh: fs.Mesh, model: Model, attention: Callable[..., Tensor]) -> None:
        self.mesh, self.model, self.attention = mesh, model, partial(attention, mesh["context"])
        self.params = fs.shard(model, fs.plan(model, mesh, shard_axis=("shard", "context")))

    def split(self, batch: Any) -> Any:
        """This rank's part of inputs and targets, (B, LENGTH): some sequences, and of these a part."""
        return self.mesh.split(batch, {name: int(name == "context") for name in self.mesh.axes})

    def of_rank(self, params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        start = fs.collectives.axis_index(self.mesh["context"]) * x.shape[-1]
        return functional_call(self.model, fs.gather(params), (x, y, start, self.attention))

    def loss(self, params: fs.Sharded, *batch: Tensor) -> Tensor:
        return self.of_rank(params, *batch).mean()  # all ranks have as many tokens: the mean is that of all


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=8, replicas=1, text="")
    mesh = ranks(args.ranks, replicate=args.replicas, shard=-1, context=2)
    data = batches(read_text(args.text)[0], args.steps, args.batch_size, LENGTH)
    torch.manual_seed(0)
    model, found = Model().double(), {}
    for way in (ring, ulysses):
        program = Program(mesh, model, way)
        found[way] = train(mesh, program.params, fs.grad_and_value(program.loss), [*map(program.split, data)], LR)
    whole = train_unsharded(model, lambda batch: model(*batch).mean(), data, LR)

    part = 8 * args.batch_size * LENGTH // mesh.size * WIDTH  # bytes of a rank of keys, of values, of queries
    passes = {ring: ("ppermute", (mesh.axes["context"] - 1) * 2 * part), ulysses: ("all_to_all", (3 + 1) * part)}
    rows, costs = list[Row](), {"loss": f"{whole[1][0]:.3f} at first, {whole[1][-1]:.3f} at last"}
    for way, (kind, sent) in passes.items():
        more, of_way = beside(mesh, found[way], whole, f", by {way.__name__}")
        rows += [*more, Row(f"bytes to {kind}, and by formula", found[way][2].nbytes(kind), 2 * DEPTH * sent, 0)]
        costs |= of_way
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
