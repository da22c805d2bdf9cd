"""examples/lora.py: nothing is spent on the frozen base; test_example_results.py compares the training."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.support.pool import run_ranks

EXAMPLES = str(Path(__file__).parents[2] / "examples")
RANKS = 2


def model_and_example() -> tuple[Any, Any]:
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    lora, gpt = import_module("lora"), import_module("gpt")
    torch.manual_seed(0)
    return lora.adapted(gpt.GPT(width=16, depth=3).double(), rank=2), lora


def taken(mesh: fs.Mesh) -> dict[str, Any]:
    """What a rank passes in a step and holds, in bytes by dtype, and whether the base is unchanged."""
    model, lora = model_and_example()
    adapters, base = lora.shards(mesh, model)
    before = {key: x.clone() for key, x in base.items()}
    tokens = torch.randint(256, (4, 10), generator=torch.Generator().manual_seed(0))
    batch = mesh.split((tokens[:, :-1], tokens[:, 1:]))
    _, losses, seen = import_module("side_by_side").train(
        mesh, adapters, lora.gradient(model), 20 * [(base, *batch)], 0.01
    )
    traffic: dict[str, int] = {}
    for one in seen.issued:
        if one.numel > 1:  # except for the mean of the loss
            key = f"{8 * one.nbytes // one.numel} bits: {one.kind}"
            traffic[key] = traffic.get(key, 0) + one.nbytes
    return {
        "traffic": traffic,
        "state": sum(
            x.nbytes for tree in fs.optimizer(torch.optim.AdamW).init(adapters).values() for x in tree.values()
        ),
        "unchanged": all(torch.equal(x, before[key]) for key, x in base.items()),
        "learned": (losses[0] - losses[-1]).item(),
    }


def on_this_rank() -> dict[str, Any]:
    return taken(fs.init_mesh())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention under vmap
def test_the_base_is_gathered_in_its_own_bytes_never_reduced_and_has_no_state() -> None:
    model, _ = model_and_example()
    layout = fs.plan(model, fs.simulated_mesh(RANKS), units="blocks")

    def shard_bytes(bits: int, trainable: tuple[bool, ...] = (True, False), *units: str) -> int:
        of_units = [b for b in layout.buffers.values() if b.trainable in trainable and b.key.startswith(units or "")]
        return sum(b.shard_numel * b.dtype.itemsize for b in of_units if 8 * b.dtype.itemsize == bits)

    adapters = shard_bytes(64, (True,))
    assert 0 < shard_bytes(16) < shard_bytes(64)
    # Real ranks gather again in backward: the tied head, and down to the first adapter; the last block is still there.
    again = ("blocks.0", "blocks.1", "embed")
    simulated, gloo = taken(fs.simulated_mesh(RANKS)), run_ranks(on_this_rank, RANKS)[0]
    for found, more in ((simulated, [0, 0]), (gloo, [shard_bytes(bits, (True, False), *again) for bits in (16, 64)])):
        assert found["traffic"] == {
            "16 bits: all_gather": shard_bytes(16) + more[0],
            "64 bits: all_gather": shard_bytes(64) + more[1],
            "64 bits: psum_scatter": RANKS * adapters,
        }
        assert found["unchanged"]
        assert found["learned"] > 0.1
    assert gloo["state"] == 2 * adapters + 4 * 3  # one float32 step count for each block's adapters
    assert simulated["state"] == RANKS * gloo["state"]
