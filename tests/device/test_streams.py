"""Streams of the user's, and copies of offloaded shards on a stream of their own."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.device.accelerator import load
from tests.device.programs import gathered_loss, gpt, tokens_of, train
from tests.device.ranks import DEVICE, on_device, on_stream, one_rank, reports, steps, streams

TWO = {"shard": 2}
NUM_BUFFERS = 8  # of the GPT


def gather_that_is_dropped(mesh: fs.Mesh, how: str) -> None:
    """The gather of the next unit is pending when it is dropped, on another stream than the one it was sent on."""
    _, params = gpt(mesh)
    first, second = streams(2)
    torch.accelerator.synchronize()
    with on_stream(first):
        full: Any = fs.gather(params)
        full["blocks.0.up.weight"].sum()  # blocks.1 is gathered ahead
    with on_stream(second):
        if how == "freed":
            del full
            gc.collect()
        else:
            full["blocks.3.up.weight"].sum()  # and evicted, as nothing predicted this
    with on_stream(first):
        torch.zeros(2048, device=DEVICE)
    torch.accelerator.synchronize()


@pytest.mark.parametrize("how", ["freed", "evicted"])
def test_a_pending_gather_is_dropped_behind_the_stream_it_was_sent_on(how: str) -> None:
    for report in reports(partial(gather_that_is_dropped, how=how), axes=TWO):
        assert not report.findings


def pinned_leaves(mesh: fs.Mesh) -> list[bool]:
    model, params = gpt(mesh)
    away, tokens = fs.offload(params, "cpu"), tokens_of(mesh)
    opt, scaling = fs.optimizer(torch.optim.AdamW, lr=1e-2), fs.LossScale.dynamic()
    state = opt.init(away)
    grads = fs.grad(lambda p: gathered_loss(model)(p, tokens))(away)
    clipped, _ = fs.clip_by_global_norm(grads, 1.0)
    unscaled, finite = scaling.unscale(grads, scaling.init(away))
    new, moments = opt.step(away, grads=grads, state=state)
    trees = [
        away,
        state["exp_avg"],
        grads,
        clipped,
        unscaled,
        new,
        moments["exp_avg"],
        scaling.select(finite, new, away),
    ]
    return [all(x.is_pinned() for x in tree.values()) for tree in trees]


def test_what_is_made_from_pinned_shards_is_pinned() -> None:
    for report in reports(pinned_leaves, axes=TWO):
        assert all(report.result)


def host_waits(mesh: fs.Mesh, donate: bool) -> None:
    train(mesh, offload="cpu", donate=donate, around=steps)


@pytest.mark.parametrize("donate", [True, False])
def test_an_offloaded_step_waits_for_no_copy_of_a_unit(donate: bool) -> None:
    """The host waits for gradients when backward ends, for the norm, and before it writes to what is being copied."""
    for report in reports(partial(host_waits, donate=donate), axes=TWO):
        assert not report.findings
        waits = Counter(text.split(" in ")[0] for text in report.syncs)
        assert waits.pop("event") == 2 * NUM_BUFFERS
        once_a_step = {"copy to the device": 2, "copy to the host": 2, **({"device": 2} if donate else {})}
        assert waits == once_a_step  # a norm, the factor by which gradients are clipped, and before writes in place


def copies_that_overlap() -> tuple[int, int]:
    """How many copies to the device are pending when a unit is used, and how many gradients when backward ends."""
    mesh = one_rank()
    _, params = gpt(mesh)
    away = fs.offload(params, "cpu")
    full = fs.gather(away)
    before = load().stream(0)
    full["blocks.0.up.weight"].sum()
    assert load().stream(0) == before
    pending = [load().pending_reads(x) for key, x in away.items() if key in ("blocks.0", "blocks.1")]
    torch.accelerator.synchronize()
    return pending[0], pending[1]


def test_the_copy_of_the_next_unit_is_pending_while_one_is_used() -> None:
    assert on_device(copies_that_overlap) == (1, 1)
