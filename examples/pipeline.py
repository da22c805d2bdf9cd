"""Layers divided among stages, and microbatches in turns: a pipeline whose schedule is data.

python examples/pipeline.py                              # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/pipeline.py         # the same program on 4 real gloo ranks

Sequences are divided over the axis "shard"; layers over "stage", and each layer's parameters over "shard": a rank makes
those of its own layers whole, once in a step. All ranks run one program: in a tick each stage runs one microbatch,
or none, and passes the result to the next stage.

The loss is the forward half of GPipe (arxiv.org/abs/1811.06965); its derivative, of any order, is the way back.
A gradient by any schedule, such as 1F1B (arxiv.org/abs/2006.09503), is the same number and holds fewer microbatches:
``Program.gradients`` runs a table of ticks, and keeps the inputs of a stage until it runs it again to go back.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt import read_text
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.func import vjp

import functorch_shard as fs

WIDTH, HEADS, DEPTH, LENGTH, LR = 64, 4, 4, 64, 4e-3
Full = dict[str, Tensor]
NONE = -1


class Tick(NamedTuple):
    """The microbatch that each stage runs forward, and the one that it takes the gradient of; NONE for none."""

    forward: list[int]
    backward: list[int]


def table(ahead: list[list[int]], back: list[list[int]]) -> list[Tick]:
    """Ticks in which stage s runs microbatch m at ahead[s][m], and its gradient at back[s][m]."""
    at = lambda rows, t: [row.index(t) if t in row else NONE for row in rows]  # noqa: E731
    return [Tick(at(ahead, t), at(back, t)) for t in range(1 + max(map(max, back)))]


def gpipe(stages: int, microbatches: int) -> list[Tick]:
    """All microbatches forward, then all back."""
    turn = stages + microbatches - 1
    ahead = [[s + m for m in range(microbatches)] for s in range(stages)]
    return table(ahead, [[turn + stages - 1 - s + m for m in range(microbatches)] for s in range(stages)])


def one_f_one_b(stages: int, microbatches: int) -> list[Tick]:
    """One forward and one back in turns, once a stage has as many microbatches as there are stages behind it."""
    ahead = [[s + m if m < stages - s else s + 2 * m for m in range(microbatches)] for s in range(stages)]
    return table(ahead, [[2 * stages - 1 - s + 2 * m for m in range(microbatches)] for s in range(stages)])


def slots(schedule: list[Tick]) -> int:
    """The most microbatches that a stage holds, each from its arrival until its gradient was taken."""
    stages, most = len(schedule[0].forward), 0
    held, before = [set[int]() for _ in range(stages)], [NONE] * stages
    for tick in schedule:
        for s in range(stages):
            held[s] |= {before[s - 1] if s else tick.forward[0]} - {NONE}
            most = max(most, len(held[s]))
            held[s] -= {tick.backward[s]}
        before = tick.forward
    return most


class Layers(nn.Module):
    """The layers of all stages, or the parameters of some: a row of each stack is one layer."""

    def __init__(self) -> None:
        super().__init__()
        draw = lambda *shape: nn.Parameter(torch.randn(DEPTH, *shape) / shape[-1] ** 0.5)  # noqa: E731
        self.qkv, self.proj = draw(3 * WIDTH, WIDTH), draw(WIDTH, WIDTH)
        self.up, self.down = draw(4 * WIDTH, WIDTH), draw(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for qkv, proj, up, down in zip(self.qkv, self.proj, self.up, self.down, strict=True):
            normed = F.layer_norm(x, (WIDTH,))
            q, k, v = F.linear(normed, qkv).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), proj)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), up)), down)
        return x


class Model(nn.Module):
    """A language model of bytes: what comes before the layers, the layers, and what comes behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers, self.norm, self.head = Layers(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def before(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position[: tokens.shape[-1]]

    def losses(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Of each sequence."""
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].mT, tokens[:, 1:], reduction="none").mean(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.losses(self.layers(self.before(tokens)), tokens)


class Program:
    """The model on a mesh whose axes end with "stage" and "shard", for a number of microbatches of each rank."""

    def __init__(self, mesh: fs.Mesh, model: Model, microbatches: int) -> None:
        self.mesh, self.model, self.axis, self.microbatches = mesh, model, mesh["stage"], microbatches
        named = dict(model.named_parameters())
        of_layers = {name: named.pop(name) for name in [*named] if name.startswith("layers.")}
        plan = partial(fs.plan, mesh=mesh, shard_axis=("stage", "shard"))
        self.dense, self.layers = plan(named), plan(of_layers, units=[[name] for name in of_layers])
        self.params = fs.merge(fs.shard(named, self.dense), fs.shard(of_layers, self.layers))

    def split(self, batch: Any) -> Any:
        """This rank's sequences, the same on all stages."""
        return self.mesh.split(batch, {name: 0 for name in self.mesh.axes if name != "stage"})

    def local(self, params: fs.Sharded) -> Full:
        """The dense parameters, and those of this stage's layers: the rows of buffers whose ranks count by "stage"."""
        dense = fs.Sharded({key: params[key] for key in self.dense.buffers}, self.dense)
        full = dict(fs.gather(dense, lazy=False))
        for key, buffer in self.layers.buffers.items():
            rows = fs.collectives.all_gather(params[key], self.mesh["shard"])
            full[buffer.slots[0].name] = rows.view(-1, *buffer.slots[0].shape[1:])
        return full

    def stage(self, full: Full, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What this stage makes of a microbatch, and the losses of its sequences, which only the last stage has."""
        here, bound = fs.collectives.axis_index(self.axis), fs.bind(self.model, full)
        made = bound.layers(torch.where(here == 0, bound.before(tokens), x))
        return made, bound.losses(made, tokens).where(here == self.axis.size - 1, 0)

    def pass_on(self, x: Tensor, running: list[int], by: int) -> Tensor:
        """What the stage before (by=1) or behind (by=-1) has sent of the microbatch that it ran, if it did."""
        pairs = [(s, s + by) for s, m in enumerate(running) if m != NONE and 0 <= s + by < self.axis.size]
        return fs.collectives.ppermute(x, self.axis, pairs) if pairs else torch.zeros_like(x)

    def losses_of_rank(self, params: fs.Sharded, tokens: Tensor) -> Tensor:
        """Of each sequence of this rank: the ticks of GPipe that run forward."""
        full, parts = self.local(params), tokens.unflatten(0, (self.microbatches, -1))
        arrived, found = full["position"].new_zeros(*parts.shape[1:], WIDTH), []
        for tick in gpipe(self.axis.size, len(parts))[: self.axis.size + len(parts) - 1]:
            made, losses = self.stage(full, arrived, self.pick(parts, tick.forward))
            found += [losses] if tick.forward[-1] != NONE else []
            arrived = self.pass_on(made, tick.forward, by=1)
        return fs.collectives.psum(torch.cat(found), self.axis)

    def loss(self, params: fs.Sharded, tokens: Tensor) -> Tensor:
        return self.losses_of_rank(params, tokens).mean()

    def losses(self, params: fs.Sharded, tokens: Tensor) -> Tensor:
        """Of each sequence of all ranks."""
        losses = self.losses_of_rank(params, tokens)
        for name in ("shard", "replicate"):
            losses = fs.collectives.all_gather(losses, self.mesh[name]) if name in self.mesh.axes else losses
        return losses

    def number(self, row: list[int]) -> Tensor:
        """The entry of this stage."""
        return torch.tensor(row).index_select(0, fs.collectives.axis_index(self.axis)[None])[0].to(self.mesh.device)

    def pick(self, each: Tensor, row: list[int]) -> Tensor:
        """What ``each``, in which microbatches have places in turns, has of this stage's one; idle stages get any."""
        return each.index_select(0, (self.number(row) % len(each))[None])[0]

    def put(self, each: Tensor, x: Tensor, row: list[int]) -> Tensor:
        number, places = self.number(row), torch.arange(len(each), device=each.device)
        mine = (places == number % len(each)) & (number != NONE)
        return x.where(mine.view(-1, *[1] * x.ndim), each)

    def gradients(self, schedule: list[Tick], params: fs.Sharded, tokens: Tensor) -> tuple[fs.Sharded, Tensor]:
        """The gradient of the loss, and the loss, by a schedule."""

        def of_local(params: fs.Sharded) -> tuple[Tensor, Tensor]:
            full = self.local(params)
            with torch.no_grad():  # the derivative is taken inside; fs.grad takes that of local
                grads, loss = self.run(schedule, full, tokens.unflatten(0, (self.microbatches, -1)))
            # A mean over ranks counts each stage as one of them, and the loss is a sum over stages.
            products = [(full[name] * grads[name]).sum() for name in full]
            return self.axis.size * torch.stack(products).sum(), loss

        grads, (_, loss) = fs.grad_and_value(of_local, has_aux=True)(params)
        return grads, loss

    def run(self, schedule: list[Tick], full: Full, parts: Tensor) -> tuple[Full, Tensor]:
        """The gradient by this rank's whole parameters of the mean loss of all microbatches, and that loss."""
        arrived = came_back = full["position"].new_zeros(*parts.shape[1:], WIDTH)
        kept = arrived.new_zeros(slots(schedule), *arrived.shape)
        grads, total = {name: torch.zeros_like(x) for name, x in full.items()}, arrived.new_zeros(())
        before = [NONE] * self.axis.size
        for tick in schedule:
            kept = self.put(kept, arrived, [NONE, *before[:-1]])
            before = tick.forward
            if {*tick.forward} != {NONE}:
                made, losses = self.stage(full, self.pick(kept, tick.forward), self.pick(parts, tick.forward))
                total = total + losses.mean().where(self.number(tick.forward) != NONE, 0)
                arrived = self.pass_on(made, tick.forward, by=1)
            if {*tick.backward} != {NONE}:
                tokens, runs = self.pick(parts, tick.backward), self.number(tick.backward) != NONE
                (_, losses), pull, *_ = vjp(partial(self.stage, tokens=tokens), full, self.pick(kept, tick.backward))
                by_full, by_x = pull((came_back, torch.full_like(losses, 1 / losses.numel())))
                grads = {name: grads[name] + x.where(runs, 0) for name, x in by_full.items()}
                came_back = self.pass_on(by_x, tick.backward, by=-1)
        return {name: x / len(parts) for name, x in grads.items()}, fs.collectives.psum(total, self.axis) / len(parts)


def main() -> None:
    args = arguments(__doc__, steps=15, batch_size=16, microbatches=4, replicas=1, text="")
    mesh = ranks(args.ranks, replicate=args.replicas, stage=2, shard=-1)
    text, generator = read_text(args.text)[0], torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (args.steps, args.batch_size, 1), generator=generator)
    batches = [text[each + torch.arange(LENGTH)].long() for each in starts]
    torch.manual_seed(0)
    model = Model().double()
    program, stages, number = Program(mesh, model, args.microbatches), mesh.axes["stage"], args.microbatches
    schedules = {"GPipe": gpipe(stages, number), "1F1B": one_f_one_b(stages, number)}
    by_schedule = {name: partial(program.gradients, schedule) for name, schedule in schedules.items()}
    ways = {"the loss": fs.grad_and_value(program.loss), **by_schedule}
    parts = [(program.split(batch),) for batch in batches]
    found = {way: train(mesh, program.params, gradient, parts, LR) for way, gradient in ways.items()}
    whole, expected = train_unsharded(model, lambda batch: model(batch).mean(), batches, LR)

    part = args.batch_size // (mesh.size // stages) * LENGTH * WIDTH  # elements of all microbatches of a rank
    by_formula = 8 * 2 * part * (stages - 1) // stages  # forward and back, from all stages but one; on average
    units = len(program.dense.units), len(program.layers.units)
    gathers = units[0] + units[1] * (mesh.axes.get("shard", 1) > 1)  # once in a step, for all microbatches
    rows, costs = [], {}
    for way, (params, losses, seen) in found.items():
        full = fs.gather(params, lazy=False)
        rows += [
            Row(f"losses of all steps, by {way}", losses, expected, 1e-8),
            Row(f"parameters, by {way}", flat({name: full[name] for name in whole}), flat(whole), 1e-8),
            Row(f"bytes to ppermute, and by formula, {way}", seen.nbytes("ppermute"), by_formula, 0),
            Row(f"gathers, and by formula, {way}", seen["all_gather"], gathers, 0),
        ]
        costs[f"a rank passes in a step, by {way}"] = passed(seen)
    for (name, schedule), held in zip(schedules.items(), (number, min(stages, number)), strict=True):
        rows += [Row(f"microbatches held, and by formula, {name}", slots(schedule), held, 0)]
        busy = sum(m != NONE for tick in schedule for row in tick for m in row)
        costs[f"stages idle, {name}"] = f"{1 - busy / stages / len(schedule):.0%} of {len(schedule)} ticks"
    costs["loss"] = f"{expected[0]:.3f} at first, {expected[-1]:.3f} at last"
    costs["a rank holds"] = f"{nbytes(program.params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters"
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
