"""A lazy gather on real ranks computes, bitwise, what a gather of everything does, at a known price in messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.lazy_uses import (
    USES,
    blocks,
    delayed_training_on_this_rank,
    exceptions_on_this_rank,
    input_of,
    leaves_of,
    use_on_this_rank,
)
from tests.support.pool import run_ranks


@pytest.mark.parametrize("name", USES)
def test_every_use_of_autograd_is_bitwise_that_of_a_gather_at_once(name: str) -> None:
    run_ranks(use_on_this_rank, 2, name, True)


def test_after_an_exception_nothing_stays_and_the_next_call_is_right() -> None:
    run_ranks(exceptions_on_this_rank, 2)


NUM_UNITS = 5


def traffic_on_this_rank(reshard: bool) -> dict[str, list[tuple[str, str]]]:
    """Collectives as they were issued, with the units they were for."""
    mesh, model = fs.init_mesh(), blocks(NUM_UNITS)
    layout = fs.plan(model, mesh, reshard_after_forward=reshard)
    params, x = fs.shard(model, layout), input_of(mesh.rank)

    def loss(p: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(p), (x,)).square().sum()

    leaves = leaves_of(params)
    ways: dict[str, tuple[Any, Callable[[], Any]]] = {
        "grad": (nullcontext(), lambda: fs.grad(loss)(params)),
        "backward": (nullcontext(), lambda: loss(leaves).backward()),
        "no_grad": (torch.no_grad(), lambda: loss(leaves)),
        "inference": (torch.inference_mode(), lambda: loss(params)),
        "offload": (save_on_cpu(), lambda: fs.grad(loss)(params)),
    }
    found = {}
    for name, (context, run) in ways.items():
        with count_collectives() as seen, context:
            run()
        found[name] = _by_unit(seen.issued, layout)
    return found


def _by_unit(issued: Sequence[Any], layout: fs.Layout) -> list[tuple[str, str]]:
    """Operands are whole buffers, or shards of them."""
    units = {b.shard_numel: b.key for b in layout.buffers.values()}
    units |= {b.numel: b.key for b in layout.buffers.values()}
    assert len(units) == 2 * len(layout.buffers)
    return [(collective.kind, units[collective.numel]) for collective in issued]


def _units(issued: list[tuple[str, str]], kind: str) -> list[int]:
    return [int(key.partition("/")[0]) for name, key in issued if name == kind]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_costs_no_more_messages_than_the_last_two_units_allow(reshard: bool) -> None:
    forward = list(range(NUM_UNITS))
    again = [2, 1, 0] if reshard else []
    first, second = run_ranks(traffic_on_this_rank, 2, reshard)
    assert first == second
    for name in ("grad", "backward", "offload"):
        assert _units(first[name], "all_gather") == forward + again
        assert _units(first[name], "psum_scatter") == forward[::-1]
        assert len(first[name]) == len(forward + again + forward)
    for name in ("no_grad", "inference"):
        assert first[name] == [("all_gather", str(unit)) for unit in forward]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_sends_in_the_same_order_whatever_holds_it_up(num_ranks: int) -> None:
    results = run_ranks(delayed_training_on_this_rank, num_ranks)
    assert len(results[0]) > 6 * 4
    assert all(result == results[0] for result in results)
