"""Run a program on ranks, and its twin, and compare."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import RankError
from tests.fuzz.programs import OPTIMIZERS, Program, Whole
from tests.fuzz.sides import Rank, Results, Tree, Twin
from tests.support.ranks import Ranks

MAX_NORM, SCALE = 0.5, 8.0
TOLERANCE = 1e-9
PACKAGE = str(Path(fs.__file__).parent)
OURS = (ValueError, TypeError, RuntimeError, NotImplementedError, KeyError)
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
    """What each rank gets."""
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
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    if program.meta:
        model.to("meta")
    opt = fs.optimizer(optimizer_of(program)[0], **optimizer_of(program)[1])
    scaling = fs.LossScale.dynamic(initial=SCALE, interval=2)

    def derivative(p: Tree, data: Any, s: Any) -> Results:
        rest, v, delta, x, y = data
        scale = (lambda loss: scaling.scale(loss, s)) if program.scale else None
        return Rank(program, model, rest, delta, scale, mesh=mesh).derivative(p, v, x, y)

    def gradient(p: Tree, data: Any, s: Any) -> Tree:
        rest, v, delta, x, y = data
        halves = zip(x.chunk(2), y.chunk(2), strict=True) if program.accumulate else [(x, y)]
        total = None
        for half in halves:
            grads = next(iter(derivative(p, (rest, v, delta, *half), s).values()))
            total = fs.accumulate(total, grads) if program.accumulate else grads
        return total

    def update(p: Tree, state: Any, s: Any, grads: Tree, i: int) -> Any:
        finite = torch.tensor(True)
        if program.scale:
            grads, finite = scaling.unscale(grads, s)
        if program.clip:
            grads, _ = fs.clip_by_global_norm(grads, MAX_NORM)
        new = opt.step(p, grads=grads, state=state, donate=program.donate, **rate(program, i))
        if program.scale and not program.donate:  # what was donated is no more
            new = scaling.select(finite, new, (p, state))
        return (*new, scaling.update(s, finite) if program.scale else s)

    def train(p: Tree, state: Any, data: Any, s: Any) -> Any:
        for i in range(program.steps):
            p, state, s = update(p, state, s, gradient(p, data, s), i)
        return p

    data, s = (tuple(rest), v, delta, x, y), scaling.init(p)
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
    return {name: value if isinstance(value, fs.Sharded) else value.detach() for name, value in results.items()}


def of_twin(program: Program) -> Results:
    """The same by torch alone: trees are dicts of whole tensors, and values of ranks have them in dim 0."""
    model = program.model()
    every: Whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: every[name] for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: x for name, x in every.items() if name not in trainable}
    x, y = program.batch()
    drawn = trainable if program.partition else every
    v, delta = ({n: t for n, t in program.direction(drawn, *k).items() if n in trainable} for k in ((1.0, 3), (0.1, 4)))
    if not program.partition and program.trees in ("sum", "two gathers"):
        frozen |= {n: x + t for n, t in program.direction(every, 0.1, 4).items() if n in frozen for x in [frozen[n]]}
    side = Twin(program, model, frozen, delta)
    if program.steps:
        return {"trained": _trained(program, side, trainable, v, x, y)}
    return side.derivative(trainable, v, x, y)


def _trained(program: Program, side: Twin, p: Whole, v: Whole, x: Tensor, y: Tensor) -> Whole:
    cls, options = optimizer_of(program)
    tensors = {name: t.clone() for name, t in p.items()}
    opt = cls(tensors.values(), **options)

    def gradient(x: Tensor, y: Tensor) -> Whole:
        now = {name: t.clone() for name, t in tensors.items()}
        return next(iter(side.derivative(now, v, x, y).values()))

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


@dataclass(frozen=True)
class Outcome:
    """``"right"``, ``"refused"`` by an error of this library, ``"WRONG"``, ``"raw"`` error, ``"hang"``, or ``"void"``:
    torch raises for the twin."""

    kind: str
    text: str = ""


def outcome_of(program: Program, kind: str, wrapped: Any = None, timeout: float = 60.0) -> Outcome:
    """Run ``program`` and its twin, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _of_twin(program)
        except Exception as error:
            return Outcome("void", _line(error))
        ranks = Ranks(dict(program.axes), kind)
        try:
            rows = ranks.run(on_ranks, program, wrapped)
        except Exception as error:
            return of_error(error, kind)
    different = [text for rank, row in enumerate(rows) for text in differences(program, rank, row, expected)]
    return Outcome("WRONG", "; ".join(different[:4])) if different else Outcome("right")


@lru_cache(maxsize=1)  # for all kinds of ranks
def _of_twin(program: Program) -> dict[str, Any]:
    return of_twin(program)


def of_error(error: Exception, kind: str) -> Outcome:
    """Batched ranks are refused by torch's vmap too."""
    text = str(error.__cause__) if isinstance(error.__cause__, RankError) else ""
    if isinstance(error, RankError):
        return Outcome("hang" if "no answer" in str(error) else "raw", str(error))
    here = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = re.findall(r'^ *File "([^"]+)", line', text, re.M) or here
    if isinstance(error, AssertionError) and "model was changed" in str(error):
        return Outcome("WRONG", str(error))
    by_vmap = kind == "batched" and re.search("vmap|functorch", str(error))
    refused = by_vmap or (files[-1].startswith(PACKAGE) and type(error) in OURS)
    return Outcome("refused" if refused else "raw", _line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def differences(program: Program, rank: int, row: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if row.keys() != expected.keys():
        return [f"results {[*row]}, expected {[*expected]}"]
    found = []
    for name, value in row.items():
        if isinstance(value, Tensor):
            found += different(f"{name} of rank {rank}", value, expected[name][rank])
        else:
            found += different_shards(f"{name} of rank {rank}", rank, value, expected[name])
    return found


def different_shards(what: str, rank: int, tree: fs.Sharded, whole: dict[str, Tensor]) -> list[str]:
    found, seen = [], set()
    for key, buffer in tree.layout.buffers.items():
        shard, names = tree[key], {slot.name for slot in buffer.slots}
        if shard is None and names & whole.keys():
            found.append(f"{what}: {key} is None")
        if shard is None or not names <= whole.keys():
            continue
        seen |= names
        flat = torch.zeros(buffer.num_shards, buffer.shard_numel, dtype=shard.dtype).flatten()
        for slot in buffer.slots:
            flat[slot.offset : slot.offset + slot.numel] = whole[slot.name].flatten()
        found += different(f"{what}: {key}", shard, flat.view(buffer.num_shards, -1)[rank % buffer.num_shards])
    missing = whole.keys() - seen
    return found + ([f"{what}: nothing for {sorted(missing)}"] if missing else [])


def different(what: str, actual: Tensor, expected: Tensor) -> list[str]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return [f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"]
    if not actual.numel():
        return []
    error, size = (actual - expected).abs().max().item(), expected.abs().max().item()
    if error <= TOLERANCE * max(size, 1e-3):
        return []
    return [f"{what}: differs by {error:.1e} of {size:.1e}"]
