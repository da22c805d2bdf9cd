"""The repr of every public object is short, with names, shapes or sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs

MESH = fs.simulated_mesh({"replicate": 2, "shard": 4})
MODEL = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), "head": nn.Linear(32, 64)})
MODEL["head"].requires_grad_(False)
PRECISION = fs.MixedPrecision(torch.bfloat16, torch.float32)
LAYOUT = fs.plan(MODEL, MESH, precision=PRECISION, units="blocks")
PARAMS = fs.shard(MODEL, LAYOUT)
UNIT = next(unit for unit in LAYOUT.units if unit.name == "blocks.11")
ADAMW = fs.optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
EXPECTED: list[tuple[Any, str]] = [
    (LAYOUT, "Layout(13 units, 26 parameters, 14,784 elements, replicate=2 x shard=4)"),
    (UNIT, "Unit(name='blocks.11', precision=MixedPrecision("),
    (UNIT.buffers[0], "Buffer(key='blocks.11', label='', trainable=True, numel=1056, num_shards=4)"),
    (MESH, "Mesh(replicate=2 x shard=4, simulated, cpu)"),
    (MESH["shard"], "Axis(name='shard', size=4)"),
    (PRECISION, "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep"),
    (ADAMW, "Optimizer(AdamW, lr=0.001, weight_decay=0.1)"),
    (fs.LossScale.dynamic(), "LossScale(initial=65536.0, growth=2.0, "),
    (fs.estimate(LAYOUT, ADAMW), "Estimate(peak "),
    (fs.compile(MESH.spmd(fs.global_norm), backend="replay"), "Compiled(global_norm, backend='replay', 0 recordings)"),
]


@pytest.mark.parametrize(("x", "text"), EXPECTED, ids=[text for _, text in EXPECTED])
def test_a_repr_is_one_short_line(x: Any, text: str) -> None:
    assert text in repr(x)
    assert len(repr(x)) <= 200
    assert "\n" not in repr(x)


@pytest.mark.parametrize(("tree", "row"), [(PARAMS, "blocks.11"), (fs.gather(PARAMS), "blocks.11.bias")])
def test_the_repr_of_a_tree_is_a_table_of_shapes(tree: Any, row: str) -> None:
    title, header, _, *rows = repr(tree).splitlines()
    assert title == f"{type(tree).__name__} of {LAYOUT!r}"
    assert header.split()[1:] == ["shape", "dtype"]
    assert len(rows) == len(tree)
    line = next(line for line in rows if line.startswith(f"{row} "))
    assert line.split() == [row, *str(tuple(tree[row].shape)).split(), str(tree[row].dtype).removeprefix("torch.")]


def test_every_public_class_has_its_repr_shown_here() -> None:
    shown = {type(x) for x, _ in EXPECTED} | {fs.Sharded, fs.Full}
    assert {cls for name in fs.__all__ if isinstance(cls := getattr(fs, name), type)} - shown == set()
