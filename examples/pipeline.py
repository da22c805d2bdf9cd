"""Layers divided among stages, and microbatches that pass them one after the other: a loss, with every derivative.

python examples/pipeline.py                              # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/pipeline.py         # the same program on 4 real gloo ranks

Sequences are divided over "shard"; layers over "stage", and each layer's parameters over "shard": a rank makes those of
its stage whole, once in a step. In a tick a stage runs one microbatch, or none, and passes the result on. This is the
forward half of GPipe (arxiv.org/abs/1811.06965), and the derivative of the loss is the way back.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpt import CONTEXT, GPT, batches, losses_of, read_text
from side_by_side import Row, arguments, beside, finish, ranks, train, train_unsharded
from stacks import with_stacks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

import functorch_shard as fs

WIDTH, DEPTH, LR, NONE = 64, 4, 4e-3, -1


class Layers(nn.Module):  # the blocks, or those of a stage: a row has all parameters of a block
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.block = [blocks[0]]  # in a list: it runs with rows, and is no submodule
        self.rows = nn.Parameter(torch.stack([parameters_to_vector(block.parameters()) for block in blocks]).detach())

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.block[0].named_parameters())
        for row in self.rows:
            parts = zip(named.items(), row.split([p.numel() for p in named.values()]), strict=True)
            x = functional_call(self.block[0], {name: part.view(p.shape) for (name, p), part in parts}, (x,))
        return x


def new_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(width=WIDTH, depth=DEPTH)
    model.blocks = nn.ModuleList([Layers(model.blocks)])
    return model.double()


class Program:
    """The model on a mesh whose axes end with "stage" and "shard", for a number of microbatches of each rank."""

    def __init__(self, mesh: fs.Mesh, model: GPT, microbatches: int) -> None:
        self.mesh, self.model, self.axis, self.microbatches = mesh, model, mesh["stage"], microbatches
        self.params, self.local = with_stacks(mesh, "stage", dict(model.named_parameters()), ["blocks.0.rows"])

    def split(self, batch: Any) -> Any:
        """This rank's sequences, the same on all stages."""
        return self.mesh.split(batch, {name: 0 for name in self.mesh.axes if name != "stage"})

    def parts(self, *batch: Tensor) -> list[Tensor]:
        return [x.unflatten(0, (self.microbatches, -1)) for x in batch]

    def stage(self, full: dict[str, Tensor], arrived: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What this stage makes of a microbatch, and the losses of its sequences, which only the last stage has."""
        here, bound = fs.collectives.axis_index(self.axis), fs.bind(self.model, full)
        made = bound.blocks[0](torch.where(here == 0, bound.first(x), arrived))
        return made, losses_of(bound.last(made), y).where(here == self.axis.size - 1, 0)

    def number(self, row: list[int]) -> Tensor:
        """The entry of this stage."""
        return torch.tensor(row).index_select(0, fs.collectives.axis_index(self.axis)[None])[0].to(self.mesh.device)

    def pick(self, each: Tensor, row: list[int]) -> Tensor:
        """What ``each``, in which microbatches have places in turns, has of this stage's one; idle stages get any."""
        return each.index_select(0, (self.number(row) % len(each))[None])[0]

    def pass_on(self, x: Tensor, running: list[int], by: int) -> Tensor:
        """What the stage before (by=1) or behind (by=-1) has sent of the microbatch that it ran, if it did."""
        pairs = [(s, s + by) for s, m in enumerate(running) if m != NONE and 0 <= s + by < self.axis.size]
        return fs.collectives.ppermute(x, self.axis, pairs) if pairs else torch.zeros_like(x)

    def of_rank(self, params: fs.Sharded, *batch: Tensor) -> Tensor:
        """The loss of each sequence of this rank."""
        full, parts, stages, found = self.local(params), self.parts(*batch), range(self.axis.size), []
        arrived = full["position"].new_zeros(*parts[0].shape[1:], WIDTH)
        for tick in range(len(stages) + self.microbatches - 1):
            running = [tick - s if 0 <= tick - s < self.microbatches else NONE for s in stages]
            made, losses = self.stage(full, arrived, *(self.pick(each, running) for each in parts))
            found += [losses] if running[-1] != NONE else []
            arrived = self.pass_on(made, running, by=1)
        return fs.collectives.psum(torch.cat(found), self.axis)

    def loss(self, params: fs.Sharded, *batch: Tensor) -> Tensor:
        return self.of_rank(params, *batch).mean()


def main(doc: str | None, ways: Callable[[Program], tuple[dict[str, Any], dict[str, str]]]) -> None:
    """Train by each gradient, beside the whole model in plain torch."""
    args = arguments(doc, steps=15, batch_size=16, microbatches=4, replicas=1, text="")
    mesh, model = ranks(args.ranks, replicate=args.replicas, stage=2, shard=-1), new_model()
    data, program = (
        batches(read_text(args.text)[0], args.steps, args.batch_size),
        Program(mesh, model, args.microbatches),
    )
    whole = train_unsharded(model, lambda batch: losses_of(model(batch[0]), batch[1]).mean(), data, LR)
    sent = args.batch_size // mesh.size * CONTEXT * WIDTH  # by all ranks but those of the last stage; on average
    gathers = len(program.params.layout.units) - (mesh["shard"].size == 1)  # once, for all microbatches
    rows, (gradients, costs) = list[Row](), ways(program)
    for way, gradient in gradients.items():
        found = train(mesh, program.params, gradient, [program.split(batch) for batch in data], LR)
        more, of_way = beside(mesh, found, whole, f", by {way}")
        rows += [*more, Row(f"bytes to ppermute, and by formula, {way}", found[2].nbytes("ppermute"), 8 * 2 * sent, 0)]
        rows += [Row(f"gathers, and by formula, {way}", found[2]["all_gather"], gathers, 0)]
        costs |= of_way
    costs["loss"] = f"{whole[1][0]:.3f} at first, {whole[1][-1]:.3f} at last"
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main(__doc__, lambda program: ({"the loss": fs.grad_and_value(program.loss)}, {}))
