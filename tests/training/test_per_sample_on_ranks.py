"""docs/guides/per_sample.md on gloo ranks: what it prints, and the gradients that each of its ways holds."""

from __future__ import annotations

import gc
import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.support.live_bytes import LiveBytes, settle
from tests.support.pages import ROOT, blocks

PAGE, HERE = "docs/guides/per_sample.md", 'fs.simulated_mesh(2, kind="sequential")'
WAYS = ("direct", "in_two_passes", "in_chunks")
SAMPLES, CHUNK, UNITS = 8, 2, 4


def on_this_rank() -> tuple[str, dict[str, float]]:
    """What the page prints, and the most that each way holds at once, in bytes of the parameters."""
    program = "\n".join(blocks(PAGE))
    assert HERE in program
    page, printed = dict[str, Any](__name__=PAGE), io.StringIO()
    with redirect_stdout(printed):
        exec(compile(program.replace(HERE, "fs.init_mesh()"), PAGE, "exec"), page)
    settle()
    gc.disable()
    gc.collect()
    gc.freeze()
    return printed.getvalue(), {way: held(page, way) for way in WAYS}


def held(page: dict[str, Any], way: str) -> float:
    model, layout, batch = page["model"], page["layout"], page["batch"]
    with LiveBytes() as live:
        params = fs.shard(dict(model.named_parameters()), layout)
        live.mark("start")
        page[way](params, *batch)
        live.mark("end")
    return live.growth("start", "end") / sum(p.nbytes for p in model.parameters())


def test_real_ranks_print_and_hold_what_the_page_says_a_chunk_or_the_gradients_of_all_samples() -> None:
    beside = 2 / UNITS + 1  # two whole units, and activations
    prints = re.findall(r"# > ?(.*)", "\n".join(blocks(PAGE)))
    says = {way: float(re.findall(rf"\| `{way}` .* (\d+\.\d) \|", (ROOT / PAGE).read_text())[0]) for way in WAYS}
    for printed, held in run_ranks(on_this_rank, 2):
        assert printed.splitlines() == prints
        assert held == pytest.approx(says, abs=0.1)
        assert held["direct"] > SAMPLES
        assert CHUNK < held["in_two_passes"] < CHUNK + beside
        assert CHUNK + 1 < held["in_chunks"] < CHUNK + 2 + beside  # the sum, and that of the chunk
