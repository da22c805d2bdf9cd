"""Streams of the user's, copies of offloaded shards on a stream of their own, and saves behind both."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from tests.device.accelerator import load
from tests.device.programs import BUFFERS, loss_of, stack, train
from tests.device.ranks import DEVICE, on_device, on_stream, one_rank, reports, steps, streams

TWO = {"shard": 2}


def gather_that_is_dropped(mesh: fs.Mesh, how: str) -> None:
    """The gather of the next unit is pending when it is dropped, on another stream than the one it was sent on."""
    _, params, _ = stack(mesh)
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
    model, params, x = stack(mesh)
    away = fs.offload(params, "cpu")
    opt, scaling = fs.optimizer(torch.optim.AdamW, lr=1e-2), fs.LossScale.dynamic()
    state = opt.init(away)
    grads = fs.grad(lambda p: loss_of(model, p, x))(away)
    clipped, _ = fs.clip_by_global_norm(grads, 1.0)
    unscaled, finite = scaling.unscale(grads, scaling.init(away))
    new, moments = opt.step(away, grads=grads, state=state)
    made = [away, state["exp_avg"], grads, clipped, unscaled, new, moments["exp_avg"]]
    return [all(x.is_pinned() for x in tree.values()) for tree in (*made, scaling.select(finite, new, away))]


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
        assert waits.pop("event") == 2 * BUFFERS
        once_a_step = {"copy to the device": 2, "copy to the host": 2, **({"device": 2} if donate else {})}
        assert waits == once_a_step  # a norm, the factor by which gradients are clipped, and before writes in place


def copies_that_overlap() -> tuple[int, int]:
    """How many copies to the device are pending when a unit is used, and how many gradients when backward ends."""
    _, params, _ = stack(one_rank())
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


def saved_on_another_stream() -> tuple[Tensor, Tensor]:
    weight = torch.arange(9.0).view(3, 3)
    params = fs.shard({"w": weight}, fs.plan({"w": weight}, one_rank()))
    opt = fs.optimizer(torch.optim.SGD, lr=1.0)
    (stream,) = streams(1)
    stream.wait_event(torch.accelerator.current_stream().record_event())
    with TemporaryDirectory() as folder:
        with on_stream(stream):
            minus = fs.Sharded({key: -x for key, x in params.items()}, params.layout)
            doubled, state = opt.step(params, grads=minus, state=opt.init(params))
            with steps():
                future = fs.checkpoint.save(f"{folder}/a", doubled, async_save=True)
            opt.step(doubled, grads=doubled, state=state, donate=True)  # zeros
        like = fs.shard({"w": torch.zeros(3, 3)}, fs.plan({"w": weight}, fs.simulated_mesh(2)))
        loaded = fs.checkpoint.load(future.result(60), like)
        stream.synchronize()
    return fs.gather(loaded, lazy=False)["w"], 2 * weight


def test_an_asynchronous_save_is_ordered_with_the_streams_around_it() -> None:
    [report] = reports(saved_on_another_stream)
    found, expected = report.result
    assert torch.equal(found, expected)
    assert report.findings == ()
    assert [text for text in report.syncs if "saving.py" not in text] == []  # its thread waits, and may do so here
