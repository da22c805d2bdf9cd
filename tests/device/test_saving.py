"""An asynchronous save has the values of its call, without waiting for the device and whatever is donated later."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import functorch_shard as fs
from tests.device.ranks import on_stream, one_rank, reports, steps, streams


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


def test_it_is_ordered_with_the_streams_around_it() -> None:
    [report] = reports(saved_on_another_stream)
    found, expected = report.result
    assert torch.equal(found, expected)
    assert report.findings == ()
    assert [text for text in report.syncs if "saving.py" not in text] == []  # its thread waits, and may do so here
