"""The pictures of the documentation: ``python docs/pictures.py`` writes them again, the same on every machine."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.pictures import svg

PLACE = Path(__file__).parent / "_static"
PACKAGE = Path(fs.__file__).parent
# The core, which a step goes through, and what each satellite around it is for.
CORE = {
    "training": "grad, bind, optimizer, norms",
    "sharding": "shard, gather, scatter_grads",
    "collectives": "psum ... psum_scatter and their derivatives",
    "tensor_parallel": "DTensors",
    "storage": "where memory is",
    "layout": "which element is on which rank",
    "mesh": "the ranks",
    "communication": "how bytes move on one axis",
    "torch_internals": "private names of torch",
}
SATELLITES = {
    "checkpoint": "save, load, two formats",
    "cli": "the command line",
    "codecs": "encoded communication",
    "curvature": "Hessian products, flat vectors",
    "gloo": "shared memory between ranks of a host",
    "graph": "record and replay a step",
    "initialization": "fill a model from the meta device",
    "matrix": "optimizers of whole matrices",
    "pictures": "layouts and steps as pictures",
    "recompute": "remat: run again in backward",
    "sequential": "ranks that take turns",
    "tensor_parallel": "DTensor parameters",
    "testing": "run_ranks, count_collectives",
    "virtual": "same bits on any number of ranks",
}


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 80), nn.GELU(), nn.Linear(80, 32)) for _ in range(2)]
        self.embed, self.blocks, self.head = nn.Embedding(99, 32), nn.ModuleList(blocks), nn.Linear(32, 99)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def model() -> nn.Module:
    with torch.device("meta"):
        return Model()


def layout() -> str:
    """Which rank holds how much of which parameter, on four ranks."""
    return fs.visualize(fs.plan(model(), fs.simulated_mesh(4), units="blocks")).svg(460)  # legible on a phone


class OneOfFour(fs.communication.Backend):
    """Rank 0 of four that are not there, and say what it says when ranks compare their programs."""

    def index(self) -> int:
        return 0

    def issue(self, op: fs.communication.Collective, x: Tensor, /) -> fs.communication.Work:
        return fs.communication.Finished(torch.cat([x] * 4, op.dim))


def schedule() -> Any:
    """What one of four ranks starts, waits for and computes in a gradient."""
    whole, mesh = Model(), fs.Mesh((fs.Axis("shard", 4, OneOfFour()),), torch.device("cpu"))
    on_cpu: Any = fs.shard(whole, fs.plan(whole, mesh, units="blocks"))
    params: Any = optree.tree_map(lambda x: x.to("meta"), on_cpu)

    def loss(params: fs.Sharded, tokens: Tensor) -> Tensor:
        return functional_call(whole, dict(fs.gather(params)), (tokens,)).square().mean()

    return fs.compile(fs.grad(loss)).trace(params, torch.zeros(8, dtype=torch.int64, device="meta"))


def step() -> str:
    """Starts, waits, computation and bytes alive, over the number of operations: a recording has no times."""
    traced = schedule()
    events, (left, right, top, chart) = traced.events, (150, 884, 56, 150)
    ends = [*accumulate(event.operations or 1 for event in events)]
    x = lambda operation: left + (right - left) * operation / ends[-1]  # noqa: E731
    blocks, busy = list[tuple[str, int, int, Any]](), dict[str, int]()
    for i, (event, end) in enumerate(zip(events, ends, strict=True)):
        if event.what == "compute":
            blocks.append(("computation", end - event.operations, end, None))
        elif event.what == "start":
            waits = [j for j, e in enumerate(events) if j > i and (e.what, e.collective) == ("wait", event.collective)]
            lane = next(lane for lane in ("shard 0", "shard 1", "shard 2") if busy.get(lane, 0) < end)
            busy[lane] = ends[waits[0]]
            blocks.append((lane, end - 1, ends[waits[0]], event.collective))
    rows = [*sorted(busy), "computation"]
    summary, base = str(traced).splitlines()[-1], top + 22 * len(rows) + 24
    body = [
        svg.text(16, 22, summary),
        *(svg.text(16, top + 15 + 22 * i, row, "fs-faint") for i, row in enumerate(rows)),
    ]
    for i, (kind, look) in enumerate({"all_gather": "fs-hue0", "psum_scatter": "fs-hue1"}.items()):
        at = 16 + 110 * i
        body += [svg.rectangle(at, 33, 10, 10, look), svg.text(at + 15, 42, kind, "fs-faint")]
    for lane, start, end, op in blocks:
        look = {"all_gather": "fs-hue0", "psum_scatter": "fs-hue1"}[op.kind] if op else "fs-rest"
        y, wide = top + 22 * rows.index(lane), max(x(end) - x(start), 1)
        body.append(
            svg.rectangle(x(start), y + 2, wide, 18, look, f"{op or 'computation'}; operations {start} to {end}")
        )
        body += [svg.text(x(start) + 4, y + 15, name)] if op and (name := svg.fitting(op.key, wide - 6)) else []
    peak = max(e.alive for e in events)
    points = [(x(end), base + chart * (1 - e.alive / peak)) for e, end in zip(events, ends, strict=True)]
    body += [
        svg.rectangle(left, base, right - left, chart, "fs-rest"),
        svg.text(16, base + 11, "bytes alive", "fs-faint"),
    ]
    body += [_steps([(left, base + chart), *points], "fs-ink-line")]
    note = f"{ends[-1]:,} operations in order, not time; bytes at each event, the most of a computation"
    body.append(svg.text(left, base + chart + 18, note, "fs-faint"))
    return svg.document(900, base + chart + 30, summary, body)


def memory() -> str:
    """Live bytes over a step, as ``python -m tests.benchmarks.memory_curve`` has measured them, here and by FSDP2."""
    curves = json.loads((PLACE / "memory.json").read_text(encoding="utf-8"))["MiB"]
    ours, peer = ([x for phase in curves[name].values() for x in phase] for name in ("functorch_shard", "FSDP2"))
    left, right, top, bottom, most = 56, 884, 64, 304, 350

    def points(values: list[float]) -> list[tuple[float, float]]:
        width = (right - left) / len(values)
        return [(left + width * i, bottom - (bottom - top) * x / most) for i, x in enumerate([*values, values[-1]])]

    area = [corner for (x, y), (end, _) in pairwise(points(ours)) for corner in ((x, y), (end, y))]
    corners = _corners([(left, bottom), *area, (right, bottom)])
    body = [svg.text(16, 22, "MiB of tensors of one of two ranks, over one training step of a 27M GPT")]
    body += [svg.rectangle(16, 34, 12, 12, "fs-hue0"), svg.text(34, 44, f"functorch_shard, peak {max(ours):.0f}")]
    body += [svg.rectangle(240, 39, 12, 2, "fs-mark"), svg.text(258, 44, f"FSDP2, peak {max(peer):.0f}")]
    for level in range(0, most, 100):
        y = bottom - (bottom - top) * level / most
        body += [svg.line(left, y, right, y, "fs-rest-line"), svg.text(left - 8, y + 4, str(level), "fs-faint", "end")]
    body += [f'<polygon class="fs-hue0" points="{corners}"/>', _steps(points(ours), "fs-edge-line")]
    body += [_steps(points(peer), "fs-mark-line")]
    for number, phase in enumerate(curves["FSDP2"]):
        x = left + (right - left) * number / 3
        body += [svg.line(x, top, x, bottom + 8, "fs-faint-line"), svg.text(x + 6, bottom + 18, phase, "fs-faint")]
    note = "allocations and frees in order, not time; each phase has the same width"
    return svg.document(900, 350, "Memory over a step", [*body, svg.text(left, bottom + 36, note, "fs-faint")])


def _steps(points: Iterable[tuple[float, float]], look: str) -> str:
    """A line through ``points``, first to the side and then up or down."""
    (x, y), *rest = points
    moves = "".join(f"H{svg.number(a)}V{svg.number(b)}" for a, b in rest)
    return f'<path class="{look}" d="M{svg.number(x)} {svg.number(y)}{moves}"/>'


def imports() -> dict[str, set[str]]:
    """The packages that each package imports; the core imports satellites inside of functions, which is no arrow."""
    names = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in (path for name in names for path in (PACKAGE / name).rglob("*.py")):
        here, tree = ["functorch_shard", *path.relative_to(PACKAGE).parent.parts], ast.parse(path.read_text("utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {node for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            for target in _targets(node, here):
                names_here = names - {here[1]} - (SATELLITES.keys() if node in inside else set())
                found[here[1]] |= {target[1]} & names_here if target[0] == here[0] and target[1:] else set()
    return found


def _targets(node: ast.AST, here: list[str]) -> Iterator[list[str]]:
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = here[: len(here) + 1 - node.level] if node.level else []
        origin = [*start, *(node.module or "").split(".")] if node.module else start
        yield from ([*origin, alias.name] for alias in node.names)


def packages() -> str:
    """Draw the core on levels, each above all that it imports, and satellites around it."""
    every = imports()
    below = {name: every[name] & CORE.keys() for name in CORE}
    width, height, gap = 400, 40, 24
    level = {name: _level(name, below) for name in below}
    rows = [sorted(name for name in below if level[name] == i) for i in range(max(level.values()), -1, -1)]
    at = {
        name: (500 + (i - (len(row) - 1) / 2) * (width / len(row) + 10), width / len(row), 16 + (height + gap) * number)
        for number, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    body: list[str] = []
    for name, imported in sorted(below.items()):
        implied = {other for target in imported for other in _all_below(target, below)}
        for target in sorted(imported - implied):
            (x, _, y), (end, _, bottom) = at[name], at[target]
            body += [svg.line(x, y + height, end, bottom - 5), _tip(end, bottom)]
        x, wide, y = at[name]
        body += _box(name, CORE[name], x - wide / 2, y, wide, "fs-hue0", every)
    around = sorted(every.keys() - CORE.keys())
    for i, name in enumerate(around):
        side, row = i % 2, i // 2
        body += _box(name, SATELLITES[name], 16 if side == 0 else 724, 16 + row * (height + gap), 260, "fs-rest", every)
    bottom = 16 + (height + gap) * max(len(rows), (len(around) + 1) // 2)
    body += [svg.rectangle(20, bottom - 10, 12, 12, "fs-hue0"), svg.text(38, bottom, LEGEND)]
    return svg.document(1000, bottom + 16, "The core, and satellites around it", body)


def _box(name: str, about: str, x: float, y: float, width: float, style: str, every: dict[str, set[str]]) -> list[str]:
    tip = f"{name} imports {', '.join(sorted(every[name])) or 'no other package'}"
    lines = [
        svg.text(x + 10, y + 16, name),
        svg.text(x + 10, y + 32, about, "fs-ink" if style == "fs-hue0" else "fs-faint"),
    ]
    return [svg.rectangle(x, y, width, 40, style, tip), *lines]


LEGEND = "the core, which a training step goes through; the others are imported where they are asked for"


def _tip(x: float, y: float) -> str:
    corners = ((x - 4, y - 7), (x + 4, y - 7), (x, y))
    return f'<polygon class="fs-edge" points="{_corners(corners)}"/>'


def _corners(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{svg.number(x)},{svg.number(y)}" for x, y in points)


def _level(name: str, below: dict[str, set[str]]) -> int:
    return 1 + max((_level(other, below) for other in below[name]), default=-1)


def _all_below(name: str, below: dict[str, set[str]]) -> set[str]:
    return below[name].union(*(_all_below(other, below) for other in below[name]))


def moe() -> str:
    """Where tokens go over training, with and without a loss for the load, as ``expert_loads.py`` has measured it."""
    runs = json.loads((PLACE / "moe.json").read_text(encoding="utf-8"))
    titles = {"0.0": "no loss for the load", "0.01": "with the loss for the load, a hundredth of its weight"}
    body = [svg.text(16, 22, "Part of tokens that goes to each of 8 experts, over training of examples/moe.py")]
    top, high, strip, width = 62, 200, 60, 372
    for panel, (name, steps) in enumerate(runs.items()):
        left, last = 48 + panel * (width + 76), len(steps) - 1
        x = [left + width * i / last for i in range(len(steps))]
        body += [svg.text(left, top - 10, titles[name])]
        below = [0.0] * len(steps)
        for expert in range(len(steps[0]["load"])):
            above = [y + step["load"][expert] for y, step in zip(below, steps, strict=True)]
            edge = [*zip(x, above, strict=True), *reversed([*zip(x, below, strict=True)])]
            corners = _corners((a, top + high * (1 - min(b, 1.0))) for a, b in edge)
            tip = f"expert {expert}: {steps[0]['load'][expert]:.0%} at first, {steps[-1]['load'][expert]:.0%} at last"
            body += [f'<polygon class="fs-hue{expert}" points="{corners}"><title>{tip}</title></polygon>']
            at = top + high * (1 - (above[-1] + below[-1]) / 2) + 4
            body += [svg.text(x[-1] + 4, at, f"{steps[-1]['load'][expert]:.0%}", "fs-faint")]
            below = above
        floor = top + high + 34 + strip
        body += [svg.rectangle(left, floor - strip, width, strip, "fs-rest")]
        body += [
            svg.text(left, floor - strip - 6, "choices without a place: experts have 125 % of the mean", "fs-faint")
        ]
        line = "L".join(
            f"{svg.number(a)} {svg.number(floor - strip * s['dropped'] / 0.4)}" for a, s in zip(x, steps, strict=True)
        )
        body += [f'<path class="fs-mark-line" d="M{line}"/>']
        body += [
            svg.text(
                x[-1] + 4, floor - strip * steps[-1]["dropped"] / 0.4 + 4, f"{steps[-1]['dropped']:.0%}", "fs-faint"
            )
        ]
        body += [
            svg.text(left - 6, floor - strip + 8, "40%", "fs-faint", "end"),
            svg.text(left - 6, floor, "0", "fs-faint", "end"),
        ]
        body += [
            svg.text(left - 6, top + 8, "100%", "fs-faint", "end"),
            svg.text(left - 6, top + high, "0", "fs-faint", "end"),
        ]
        body += [
            svg.text(left, floor + 16, "step 1", "fs-faint"),
            svg.text(x[-1], floor + 16, str(last + 1), "fs-faint", "end"),
        ]
    return svg.document(920, top + high + strip + 64, "Load of experts over training", body)


def long_context() -> str:
    """Which rank attends to what and when, by ring and by Ulysses, and what each sends."""
    ranks, cell, top = 4, 44, 92
    body = [
        svg.text(
            16,
            22,
            "Two ways of attention to a sequence that is divided among 4 ranks",
        )
    ]
    body += [
        svg.text(16, 44, "Ring: keys and values travel"),
        svg.text(16, 60, "queries stay, grey is masked", "fs-faint"),
    ]
    for i, j in product(range(ranks), range(ranks)):
        hop = (i - j) % ranks
        x, y = 70 + cell * j, top + cell * i
        tip = f"queries of rank {i}, keys of rank {j}: at hop {hop}" + (", all of them later: masked" if j > i else "")
        body += [svg.rectangle(x + 1, y + 1, cell - 2, cell - 2, f"fs-hue{hop}" if j <= i else "fs-rest", tip)]
        body += [svg.text(x + cell / 2, y + cell / 2 + 4, f"hop {hop}", "fs-ink" if j <= i else "fs-faint", "middle")]
    for i in range(ranks):
        body += [svg.text(62, top + cell * i + cell / 2 + 4, f"rank {i}", "fs-faint", "end")]
        body += [svg.text(70 + cell * (i + 0.5), top + cell * ranks + 16, f"k,v {i}", "fs-faint", "middle")]

    start = 300
    body += [
        svg.text(start, 44, "Ulysses: heads are exchanged"),
        svg.text(start, 60, "before, and at attention", "fs-faint"),
    ]
    for panel in range(2):
        left = start + panel * 152
        for head, part in product(range(ranks), range(ranks)):
            owner = head if panel else part
            tip = f"head {head}, part {part} of the sequence: on rank {owner}"
            body += [svg.rectangle(left + 32 * part + 1, top + cell * head + 1, 30, cell - 2, f"fs-hue{owner}", tip)]
            body += [svg.text(left + 32 * part + 16, top + cell * head + cell / 2 + 4, str(owner), "fs-ink", "middle")]
        body += [svg.text(left + 64, top + cell * ranks + 16, "parts of the sequence", "fs-faint", "middle")]
    body += [svg.text(start, top + cell * ranks + 32, "number: the rank; rows: heads", "fs-faint")]

    left, right, high, most = 650, 884, cell * ranks, 2.0
    body += [
        svg.text(left, 44, "Sent by a rank, for one layer"),
        svg.text(left, 60, "1: queries of the whole sequence", "fs-faint"),
    ]
    sizes = range(1, 17)
    curves = {"ring": [2 * (n - 1) / n for n in sizes], "ulysses": [4 * (n - 1) / n**2 for n in sizes]}
    for level in (0, 1, 2):
        y = top + high * (1 - level / most)
        body += [svg.line(left, y, right, y, "fs-rest-line"), svg.text(left - 6, y + 4, str(level), "fs-faint", "end")]
    for (name, values), look in zip(curves.items(), ("fs-edge-line", "fs-mark-line"), strict=True):
        points = [
            (left + (right - left) * (n - 1) / 15, top + high * (1 - v / most))
            for n, v in zip(sizes, values, strict=True)
        ]
        body += [f'<path class="{look}" d="M{"L".join(f"{svg.number(x)} {svg.number(y)}" for x, y in points)}"/>']
        body += [svg.text(right, points[-1][1] - 8 if name == "ulysses" else points[-1][1] + 18, name, anchor="end")]
    for n in (1, 4, 8, 16):
        body += [svg.text(left + (right - left) * (n - 1) / 15, top + high + 16, str(n), "fs-faint", "middle")]
    body += [svg.text((left + right) / 2, top + high + 32, "ranks of the axis", "fs-faint", "middle")]
    return svg.document(920, top + high + 48, "Attention over a sequence on several ranks", body)


def pipeline() -> str:
    """The ticks of two schedules of examples/schedules.py, and how many microbatches each stage holds."""
    sys.path.append(str(PLACE.parents[1] / "examples"))
    program: Any = import_module("schedules")
    stages, number, cell, left, top = 4, 6, 40, 76, 70
    body = [svg.text(16, 22, f"{number} microbatches through {stages} stages: each tick, what a stage runs")]
    for panel, (name, schedule) in enumerate((("GPipe", program.gpipe), ("1F1B", program.one_f_one_b))):
        ticks, y0 = schedule(stages, number), top + panel * (cell * stages + 66)
        held = f"holds the inputs of {program.slots(ticks)} microbatches at most"
        body += [svg.text(16, y0 - 12, f"{name}: a stage {held}")]
        for stage in range(stages):
            y = y0 + cell * stage
            body += [svg.text(left - 8, y + cell / 2 + 4, f"stage {stage}", "fs-faint", "end")]
            for t, tick in enumerate(ticks):
                x, ahead, back = left + cell * t, tick.forward[stage], tick.backward[stage]
                look = f"fs-hue{max(ahead, back)}" if max(ahead, back) >= 0 else "fs-rest"
                what = f"microbatch {ahead} forward" if ahead >= 0 else f"the gradient of microbatch {back}"
                tip = f"tick {t}, stage {stage}: {what if look != 'fs-rest' else 'idle'}"
                body += [svg.rectangle(x + 1, y + 1, cell - 2, cell - 2, look, tip)]
                if look != "fs-rest":
                    mark = str(ahead) if ahead >= 0 else f"{back}'"
                    body += [svg.text(x + cell / 2, y + cell / 2 + 4, mark, "fs-ink", "middle")]
                if back >= 0:  # the way back has a line below it
                    body += [svg.line(x + 5, y + cell - 6, x + cell - 5, y + cell - 6)]
    end = top + 2 * (cell * stages + 66) - 40
    body += [svg.text(16, end, "3: microbatch 3 forward; 3', underlined: its gradient; gray: idle", "fs-faint")]
    return svg.document(left + cell * len(ticks) + 24, end + 16, "Two schedules of a pipeline", body)


PICTURES = {
    "layout.svg": layout,
    "step.svg": step,
    "memory.svg": memory,
    "packages.svg": packages,
    "moe.svg": moe,
    "long_context.svg": long_context,
    "pipeline.svg": pipeline,
}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (PLACE / name).write_text(picture(), encoding="utf-8")
