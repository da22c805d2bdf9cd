"""The repr of every public object is short, with names, shapes or sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs

LENGTH = 200
WIDTH = 32


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Those of a model of 12 blocks on 2 x 4 ranks."""
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 4})
    widths = {"norm": WIDTH, "attention": 3 * WIDTH, "project": WIDTH, "expand": 4 * WIDTH, "contract": WIDTH}
    block = lambda: nn.ModuleDict({name: nn.Linear(WIDTH, out) for name, out in widths.items()})  # noqa: E731
    blocks = nn.ModuleList(block() for _ in range(12))
    model = nn.ModuleDict({"embed": nn.Embedding(64, WIDTH), "blocks": blocks, "head": nn.Linear(WIDTH, 64)})
    model["head"].requires_grad_(False)
    layout = fs.plan(model, mesh, precision=fs.MixedPrecision(torch.bfloat16, torch.float32))
    params = fs.shard(model, layout)
    opt = fs.optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    unit = next(unit for unit in layout.units if unit.name == "blocks.11")
    counter = fs.communication.Counter()
    mesh.spmd(lambda params: fs.gather(params))(params.on(mesh.with_backend(counter)))
    compiled = fs.compile(mesh.spmd(fs.global_norm), backend="replay")
    compiled(params)
    return {
        "Layout": layout,
        "Unit": unit,
        "Buffer": unit.buffers[0],
        "frozen Buffer": layout.buffers["head/frozen"],
        "Slot": unit.buffers[0].slots[-1],
        "Mesh": mesh,
        "Axis": mesh["shard"],
        "MixedPrecision": unit.precision,
        "Optimizer": opt,
        "LossScale": fs.LossScale.dynamic(),
        "NoLossScale": fs.LossScale.none(),
        "Estimate": fs.estimate(layout, opt),
        "Compiled": compiled,
        "Counter": counter,
        "Traffic": counter["shard", "all_gather"],
        "Sharded": params,
        "Full": fs.gather(params),
    }


EXPECTED = {
    "Compiled": "Compiled(global_norm, backend='replay', 1 recording)",
    "Layout": "Layout(14 units, 123 parameters, 130,880 elements, replicate=2 x shard=4)",
    "Unit": "Unit('blocks.11', 1 buffer, 10,560 elements, MixedPrecision(",
    "Buffer": "Buffer('blocks.11', 10 parameters, 4 shards of 2,640 elements, torch.float32)",
    "frozen Buffer": ", torch.float32, frozen)",
    "Slot": "Slot('blocks.11.contract.bias', shape (32,), torch.float32, at ",
    "Mesh": "Mesh(replicate=2 x shard=4, simulated, cpu)",
    "Axis": "Axis(name='shard', size=4)",
    "MixedPrecision": "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
    "Optimizer": "Optimizer(AdamW, lr=0.001, weight_decay=0.1)",
    "LossScale": "LossScale(initial=65536.0, growth=2.0, ",
    "NoLossScale": "LossScale(",
    "Estimate": "Estimate(peak ",
    "Counter": "Counter",
    "Traffic": "Traffic(number=14, nbytes=",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_repr_is_one_short_line(name: str, objects: dict[str, Any]) -> None:
    text = repr(objects[name])
    assert EXPECTED[name] in text
    assert len(text) <= LENGTH
    assert "\n" not in text


@pytest.mark.parametrize(("name", "row"), [("Sharded", "blocks.11"), ("Full", "blocks.11.contract.bias")])
def test_the_repr_of_a_tree_is_a_table_of_shapes(name: str, row: str, objects: dict[str, Any]) -> None:
    tree = objects[name]
    title, header, _, *rows = repr(tree).splitlines()
    assert title == f"{name} of {tree.layout!r}"
    assert header.split()[1:] == ["shape", "dtype"]
    assert len(rows) == len(tree)
    dtype = str(tree[row].dtype).removeprefix("torch.")
    assert " ".join(next(line for line in rows if line.startswith(f"{row} ")).split()) == (
        f"{row} {tuple(tree[row].shape)} {dtype}"
    )


def test_every_public_class_has_its_repr_shown_here() -> None:
    shown = {name.split()[-1] for name in (*EXPECTED, "Sharded", "Full")}
    assert {name for name in fs.__all__ if isinstance(getattr(fs, name), type)} - shown == set()
