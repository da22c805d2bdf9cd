"""Run a program on ranks, and its twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

import functorch_shard as fs
from tests.fuzz.programs import OPTIMIZERS, Program, Whole, sensible
from tests.fuzz.sides import Rank, Results, Tree, Twin

MAX_NORM, SCALE = 0.5, 8.0
tree_map: Any = optree.tree_map


def optimizer_of(program: Program) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return getattr(torch.optim, program.optimizer.split()[0]), OPTIMIZERS[program.optimizer]


def rate(program: Program, i: int) -> dict[str, Any]:
    lr = OPTIMIZERS[program.optimizer]["lr"]
    return {"lr": lr * (0.5 + i)} if program.schedule else {}


def units(program: Program, names: list[str]) -> Any:
    every: dict[str, Any] = {"one": lambda name, module: name == "", "bytes": 256, "each": [[name] for name in names]}
    return every.get(program.units, program.units)


def on_ranks(mesh: fs.Mesh, program: Program, wrapped: Callable[[fs.Mesh], fs.Mesh] | None = None) -> Any:
    """What each rank gets, with ``Sharded`` as plain dicts of their shards and slots."""
    mesh = wrapped(mesh) if wrapped else mesh
    model = program.model()
    layout = fs.plan(
        model,
        mesh,
        units=units(program, [name for name, _ in model.named_parameters()]),
        align_bytes=program.align,
        reshard_after_forward=program.reshard,
        reduction=program.reduction,  # type: ignore[arg-type]
    )
    params, given = fs.shard(model, layout), {name: p.detach() for name, p in model.named_parameters()}
    p, *rest = fs.partition(params) if program.partition else (params,)
    like = {name: given[name] for name in p.layout.slots}
    v, delta = (fs.shard(program.direction(like, s, i), p.layout) for s, i in ((1.0, 3), (0.1, 4)))
    x, y = mesh.split(tuple(t.flatten(0, 1) for t in program.batch()))
    w = mesh.split(program.weights(mesh.size))
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    if program.meta:
        model.to("meta")
    opt = fs.optimizer(optimizer_of(program)[0], **optimizer_of(program)[1])
    scaling = fs.LossScale.dynamic(initial=SCALE, interval=2) if program.scale else fs.LossScale.none()

    def derivative(p: Tree, data: Any, s: Any) -> Results:
        rest, v, delta, x, y, w = data
        scale = (lambda loss: scaling.scale(loss, s)) if program.scale else None
        return Rank(program, model, rest, delta, scale, mesh=mesh).derivative(p, v, x, y, w.squeeze(-1))

    def gradient(p: Tree, data: Any, s: Any) -> Tree:
        rest, v, delta, x, y, w = data
        halves = zip(x.chunk(2), y.chunk(2), strict=True) if program.accumulate else [(x, y)]
        total = None
        for half in halves:
            grads = next(iter(derivative(p, (rest, v, delta, *half, w), s).values()))
            total = fs.accumulate(total, grads) if program.accumulate else grads
        return total

    def update(p: Tree, state: Any, s: Any, grads: Tree, i: int) -> Any:
        grads, finite = scaling.unscale(grads, s)
        if program.clip:
            grads, _ = fs.clip_by_global_norm(grads, MAX_NORM)
        new = opt.step(p, grads=grads, state=state, donate=program.donate, **rate(program, i))
        if not program.donate:  # what was donated is no more
            new = scaling.select(finite, new, (p, state))
        return (*new, scaling.update(s, finite))

    def train(p: Tree, state: Any, data: Any, s: Any) -> Any:
        for i in range(program.steps):
            p, state, s = update(p, state, s, gradient(p, data, s), i)
        return p

    data, s = (tuple(rest), v, delta, x, y, w), scaling.init(p)
    results: Results = {}
    if not program.steps:
        results = dict(mesh.spmd(derivative)(p, data, s))
    elif program.inside:
        results["trained"] = mesh.spmd(train)(p, opt.init(p), data, s)
    else:
        state = opt.init(p)
        for i in range(program.steps):
            grads = mesh.spmd(gradient)(p, data, s)
            p, state, s = update(p, state, s, grads, i)
        results["trained"] = p
    after = {} if program.meta else model.state_dict()
    if any(not torch.equal(before[name], t) for name, t in after.items()):
        raise AssertionError("the model was changed")
    return {name: plain(value) for name, value in results.items()}


def plain(value: Any) -> Any:
    """A ``Sharded`` as its shards, with the slots of each: name, offset, number of elements."""
    if not isinstance(value, fs.Sharded):
        return value.detach()
    slots = {
        key: [(slot.name, slot.offset, slot.numel, slot.shape) for slot in buffer.slots]
        for key, buffer in value.layout.buffers.items()
    }
    sizes = {key: (buffer.num_shards, buffer.shard_numel) for key, buffer in value.layout.buffers.items()}
    shards = {key: None if x is None else x.detach() for key, x in value.items()}
    return {"shards": shards, "slots": slots, "sizes": sizes}


def of_twin(program: Program) -> Results:
    """The same by torch alone: trees are dicts of whole tensors, and values of ranks have them in dim 0."""
    model = program.model()
    every: Whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: every[name] for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: x for name, x in every.items() if name not in trainable}
    x, y = program.batch()
    w = program.weights(program.size)
    drawn = trainable if program.partition else every
    v, delta = ({n: t for n, t in program.direction(drawn, *k).items() if n in trainable} for k in ((1.0, 3), (0.1, 4)))
    if not program.partition and program.trees in ("sum", "two gathers"):
        frozen |= {n: x + t for n, t in program.direction(every, 0.1, 4).items() if n in frozen for x in [frozen[n]]}
    side = Twin(program, model, frozen, delta)
    if program.steps:
        return {"trained": _trained(program, side, trainable, v, x, y, w)}
    return side.derivative(trainable, v, x, y, w)


def _trained(program: Program, side: Twin, p: Whole, v: Whole, x: Tensor, y: Tensor, w: Tensor) -> Whole:
    cls, options = optimizer_of(program)
    tensors = {name: t.clone() for name, t in p.items()}
    opt = cls(tensors.values(), **options)

    def gradient(x: Tensor, y: Tensor) -> Whole:
        now = {name: t.clone() for name, t in tensors.items()}
        return next(iter(side.derivative(now, v, x, y, w).values()))

    for i in range(program.steps):
        halves = [*zip(x.chunk(2, 1), y.chunk(2, 1), strict=True)] if program.accumulate else [(x, y)]
        grads = tree_map(lambda *gs: torch.stack(gs).sum(0), *(gradient(a, b) for a, b in halves))
        if program.clip:
            norm = torch.stack([g.abs().square().sum() for g in grads.values()]).sum().sqrt()
            grads = tree_map(lambda g, norm=norm: g * (MAX_NORM / (norm + 1e-6)).clamp(max=1), grads)
        for name, t in tensors.items():
            t.grad = grads[name]
        for group in opt.param_groups:
            group.update(rate(program, i))
        opt.step()
    return {name: t.detach() for name, t in tensors.items()}


def simplest(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program found, one change after another, for which ``fails`` still holds."""
    plainest = Program()
    changes: list[Callable[[Program], Program]] = [
        lambda p: replace(p, parts=(), frozen=()),
        *(lambda p, i=i: replace(p, parts=p.parts[:i] + p.parts[i + 1 :], frozen=()) for i in range(6)),
        *(lambda p, n=n: replace(p, axes=(("shard", n),)) for n in (1, 2, 3)),
        *(lambda p, n=n: replace(p, **{n: getattr(plainest, n)}) for n in Program.__dataclass_fields__ if n != "seed"),
        *(lambda p, n=n: replace(p, steps=n) for n in (1, 2)),
    ]
    again, tried = True, {program}
    while again:
        again = False
        for change in changes:
            smaller = sensible(change(program))
            if smaller not in tried and fails(smaller):
                program, again = smaller, True
            tried.add(smaller)
    return program
