"""A sequence divided among ranks: ring attention by ppermute, and Ulysses by all-to-all, beside attention on the whole.

python examples/long_context.py                          # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/long_context.py     # the same program on 4 real gloo ranks

Batches are divided over the axis "shard", each sequence over "context"; parameters over both. A token attends to
all tokens before it, also to those on other ranks. There are two ways:

Ring attention (arxiv.org/abs/2310.01889): keys and values go round, a step at a time, and each rank adds up what its
queries make of the block that it has got, by the online softmax: a running maximum, sum and output.
Ulysses (arxiv.org/abs/2309.14509): an all-to-all gives each rank the whole sequence of some heads, and another one
brings the outputs back. It sends less, and needs as many heads as ranks.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpt import read_text
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

WIDTH, HEADS, DEPTH, LENGTH, LR = 64, 4, 2, 256, 4e-3
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k, v, each (B, H, S, D): causal
Full = dict[str, Tensor]


@fs.remat  # a block's scores, (B, H, S, S), are not kept for backward, but computed again
def attend(state: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    """The online softmax: maximum, sum and output, each (B, H, S, -1), after one more block of keys and values."""
    largest, total, output = state
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf)
    new = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))  # any number gives the same result
    weights, fade = (scores - new).exp(), (largest - new).exp()
    return new, total * fade + weights.sum(-1, keepdim=True), output * fade + weights @ v


def ring(axis: fs.Axis) -> Attention:
    """Attention over the sequence that the ranks of ``axis`` have parts of, in their order."""
    to_next = [(rank, (rank + 1) % axis.size) for rank in range(axis.size)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here, steps = fs.collectives.axis_index(axis), torch.arange(q.shape[-2], device=q.device)
        state = (torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q))
        both = torch.stack([k, v])
        for hop in range(axis.size):
            owner = (here - hop) % axis.size  # the first block is this rank's own, where each token attends to itself
            future = owner * len(steps) + steps > here * len(steps) + steps[:, None]
            state = attend(state, q, both[0], both[1], future)
            if hop < axis.size - 1:
                both = fs.collectives.ppermute(both, axis, to_next)
        _, total, output = state
        return output / total

    return attention


def ulysses(axis: fs.Axis) -> Attention:
    """The same, by the whole sequence of each of ``HEADS / axis.size`` heads."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_heads = fs.collectives.all_to_all(torch.stack([q, k, v]), axis, split_dim=2, concat_dim=3)
        return fs.collectives.all_to_all(on_whole_sequence(*of_heads), axis, split_dim=2, concat_dim=1)

    return attention


def on_whole_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        x = x + self.proj(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor, start: Tensor | int, attention: Attention) -> Tensor:
        """The mean loss of each sequence, over tokens that count from ``start`` in it."""
        x = self.embed(tokens) + self.position(start + torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x, attention)
        return F.cross_entropy(self.head(self.norm(x)).mT, targets, reduction="none").mean(-1)


class Program:
    """The model on a mesh whose axes end with "shard" and "context"."""

    def __init__(self, mesh: fs.Mesh, model: Model, attention: Callable[[fs.Axis], Attention]) -> None:
        self.mesh, self.model, self.attention = mesh, model, attention(mesh["context"])
        self.params = fs.shard(model, fs.plan(model, mesh, shard_axis=("shard", "context")))

    def split(self, batch: Any) -> Any:
        """This rank's part of tokens and targets, (B, LENGTH): some sequences, and of these a part."""
        return self.mesh.split(batch, {name: int(name == "context") for name in self.mesh.axes})

    def of_rank(self, params: fs.Sharded, tokens: Tensor, targets: Tensor) -> Tensor:
        start = fs.collectives.axis_index(self.mesh["context"]) * tokens.shape[-1]
        return functional_call(self.model, fs.gather(params), (tokens, targets, start, self.attention))

    def loss(self, params: fs.Sharded, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.of_rank(params, tokens, targets).mean()  # all ranks have as many tokens: the mean is that of all

    def losses(self, params: fs.Sharded, tokens: Tensor, targets: Tensor) -> Tensor:
        """Of each sequence of all ranks."""
        losses = fs.collectives.pmean(self.of_rank(params, tokens, targets), self.mesh["context"])
        for name in ("shard", "replicate"):
            losses = fs.collectives.all_gather(losses, self.mesh[name]) if name in self.mesh.axes else losses
        return losses


def main() -> None:
    args = arguments(__doc__, steps=30, batch_size=8, replicas=1, text="")
    mesh = ranks(args.ranks, replicate=args.replicas, shard=-1, context=2)
    text, generator = read_text(args.text)[0], torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH - 1, (args.steps, args.batch_size, 1), generator=generator)
    windows = [text[each + torch.arange(LENGTH + 1)].long() for each in starts]
    batches = [(each[:, :-1], each[:, 1:]) for each in windows]
    torch.manual_seed(0)
    model = Model().double()
    found = {}
    for way in (ring, ulysses):
        program = Program(mesh, model, way)
        parts = [program.split(batch) for batch in batches]
        found[way.__name__] = train(mesh, program.params, fs.grad_and_value(program.loss), parts, LR)
    # by scaled_dot_product_attention of the whole sequence
    loss_of = lambda batch: model(*batch, 0, on_whole_sequence).mean()  # noqa: E731
    whole, expected = train_unsharded(model, loss_of, batches, LR)

    size = mesh.axes["context"]
    part = args.batch_size * LENGTH // mesh.size * WIDTH  # elements of a rank of keys, of values, of queries
    by_formula = {  # what a rank passes in a step, and as much in backward as in forward
        "ring": {"ppermute": 2 * DEPTH * (size - 1) * 2 * part, "all_to_all": 0},
        "ulysses": {"ppermute": 0, "all_to_all": 2 * DEPTH * (3 + 1) * part},
    }
    rows, costs = [], {}
    for way, (params, losses, seen) in found.items():
        rows += [
            Row(f"losses of all steps, by {way}", losses, expected, 1e-8),
            Row(f"parameters, by {way}", fs.curvature.to_vector(params), flat(whole), 1e-8),
        ]
        for kind, number in by_formula[way].items():
            rows += [Row(f"bytes to {kind}, and by formula", seen.nbytes(kind), 8 * number, 0)] if number else []
        costs[f"a rank passes in a step, by {way}"] = passed(seen)
    scores = 8 * args.batch_size * HEADS * LENGTH**2
    costs["loss"] = f"{expected[0]:.3f} at first, {expected[-1]:.3f} at last"
    costs["a rank holds"] = f"{nbytes(found['ring'][0], mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters"
    costs["scores of a layer at a time"] = (
        f"{scores // mesh.size // size:,} bytes by ring, {scores // mesh.size:,} by ulysses, {scores:,} of all"
    )
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
