"""Units that are used on several streams of the user's, with no wait of the user's between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import functorch_shard as fs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

UNITS, WIDTH, REPEATS = 6, 1024, 20


def slowed_params(source: dict[str, Tensor]) -> fs.Sharded:
    """Shards in pinned memory: a unit is on its way to the device for a while."""
    params = fs.shard(source, fs.plan(source, fs.init_mesh(device="cuda")))
    return fs.Sharded(fs.offload(dict(params), "cpu"), params.layout)


def test_memory_that_is_let_go_is_not_given_away_while_another_stream_reads_it() -> None:
    source = {f"{i}.w": torch.full((WIDTH, WIDTH), float(i + 1), device="cuda") for i in range(UNITS)}
    params, side = slowed_params(source), torch.cuda.Stream()
    for _ in range(REPEATS):
        full, sums = fs.gather(params, lazy=True), []
        for i in range(UNITS):
            full[f"{i}.w"].sum()  # lands here
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                sums.append(full[f"{i}.w"].sum())  # read when others have long taken its place
        del full
        scratch = [torch.full((WIDTH, WIDTH), -1.0, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert [float(total) for total in sums] == [float(i + 1) * WIDTH * WIDTH for i in range(UNITS)]
        del scratch


def test_the_step_of_a_model_that_computes_on_two_streams_is_that_on_one() -> None:
    torch.manual_seed(0)
    source = {f"{i}.w": torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5 for i in range(UNITS)}
    x, side = torch.randn(8, WIDTH, device="cuda"), torch.cuda.Stream()
    params = slowed_params(source)

    def loss(params: fs.Sharded, second: torch.cuda.Stream) -> Tensor:
        full, main, y = fs.gather(params, lazy=True), torch.cuda.current_stream(), x
        for i in range(UNITS):
            stream = second if i % 2 else main
            stream.wait_stream(main if i % 2 else second)
            with torch.cuda.stream(stream):
                y.record_stream(stream)
                y = (y @ full[f"{i}.w"]).tanh()
        main.wait_stream(second)
        return y.square().mean()

    expected = fs.grad_and_value(loss)(params, torch.cuda.current_stream())
    for _ in range(REPEATS):
        fs.testing.assert_trees_close(fs.grad_and_value(loss)(params, side), expected, rtol=0, atol=0)
