"""Whole parameters are updated by one owner each: bitwise as by the class on unsharded parameters; what it sends."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.matrix import plan
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.live_bytes import LiveBytes
from tests.support.matrix import CASES, SHAPES, assert_unsharded, is_whole, optimizer, planned, trained, values
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated
from tests.support.steps import padding_of


def after_steps(mesh: fs.Mesh, case: str, dtype: torch.dtype) -> fs.Full:
    opt, params = optimizer(case), fs.shard(values(dtype=dtype), planned(mesh, dtype))
    params, _ = trained(params, mesh.spmd(opt.init)(params), opt, donate=dtype != torch.float64, dtype=dtype)
    return fs.gather(params, lazy=False)


# Every case on three ranks, and a few on others, and in other dtypes.
PAIRS: list[Any] = [*product(CASES, simulated(3), [torch.float64])]
PAIRS += [*product(["muon", "soap"], [*simulated(1, HYBRID), *gloo(2)], [torch.float64])]
PAIRS += [("muon", *simulated(3), torch.float32), *product(["adafactor", "wide"], simulated(3), [torch.bfloat16])]


@pytest.mark.parametrize(("case", "ranks", "dtype"), PAIRS, ids=str)
def test_steps_are_bitwise_those_of_the_class_on_unsharded_parameters(
    case: str, ranks: Ranks, dtype: torch.dtype
) -> None:
    """Their state is in the dtype that the class chooses."""
    for full in ranks.run(after_steps, case, dtype):
        assert_unsharded(full, case, dtype=dtype)


def test_padding_stays_exactly_zero() -> None:
    opt, params = optimizer("shampoo"), fs.shard(values(), planned(fs.simulated_mesh(3), align_bytes=64))
    params, state = trained(params, opt.init(params), opt)
    gaps = [padding_of(tree) for tree in (params, state["rows"], *state.values())]
    assert all(gaps[:2])
    assert not any(gap.any() for each in gaps for gap in each)


def test_parameters_that_are_frozen_integers_or_whole_on_every_rank() -> None:
    frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    tree: dict[str, Any] = {**values(), "d.frozen": frozen, "d.count": torch.tensor([3])}
    mesh, label = fs.simulated_mesh(3), lambda name, x: None if name in SHAPES and is_whole(name) else "rest"
    layout = fs.plan(tree, mesh, ignored=["b.w"], labels=label)
    params, opt = fs.shard(tree, layout), optimizer("muon")
    state = opt.init(params)
    for i in range(5):
        shards = fs.shard({**tree, **values(i + 1)}, layout)
        grads = {key: x if layout.buffers[key].trainable else None for key, x in shards.items()}
        params, state = mesh.spmd(opt.step)(params, grads=fs.Sharded(grads, layout), state=state)
    full = fs.gather(params)
    assert_unsharded({name: full[name] for name in SHAPES}, "muon")
    assert torch.equal(full["d.frozen"], torch.ones(4, 4))
    assert full["d.count"].item() == 3
    assert list(state["momentum_buffer"]) == ["(owners)", "(owners)/every rank"]


def test_an_owner_has_two_rounds_whole_and_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on one real rank, where nothing is sent: a parameter and its gradient, and what Muon needs for one."""
    monkeypatch.setattr(plan, "ROUND", 1)
    mesh = fs.init_mesh()
    source = {f"{i}.w": torch.ones(128, 128) for i in range(16)}
    params = fs.shard(source, fs.plan(source, mesh))
    opt = fs.optimizer(torch.optim.Muon, whole=True)
    state, grads = opt.init(params), fs.shard(source, params.layout)
    opt.step(params, grads=grads, state=state, donate=True)
    with LiveBytes() as live:
        live.mark("before")
        opt.step(params, grads=grads, state=state, donate=True)
        live.mark("after")
    assert live.growth("before", "after") < 8 * 128 * 128 * 4


def test_options_of_a_step_are_those_of_this_class_and_labels_reach_the_other_one() -> None:
    layout = planned(fs.simulated_mesh(2))
    params, opt = fs.shard(values(), layout), optimizer("muon")
    grads, state = fs.shard(values(1), layout), opt.init(params)
    still, _ = opt.step(params, grads=grads, state=state, lr=0.0, labels={"rest": {"lr": 0.0}})
    assert_trees_close(still, params, rtol=0, atol=0)
    some, _ = opt.step(params, grads=grads, state=state, lr=0.0)
    moved = {key for key in layout.buffers if not torch.equal(some[key], params[key])}
    assert moved == {key for key, buffer in layout.buffers.items() if buffer.label and buffer.parameter_numel}


@on_each([*simulated(5, HYBRID), *gloo(2)])
def test_parameters_and_gradients_are_sent_to_owners_once_and_new_parts_back_once_and_nothing_else(
    mesh: fs.Mesh,
) -> None:
    counter = Counter()
    opt, params = optimizer("muon"), fs.shard(values(), planned(mesh.with_backend(counter)))
    with count_collectives() as seen:
        state = params.layout.mesh.spmd(opt.init)(params)
    assert not seen.issued
    counter.clear()
    trained(params, state, opt, range(1))
    layout, momentum = params.layout, state["momentum_buffer"].layout
    owner = {name: slot.offset // momentum.buffers["(owners)"].shard_numel for name, slot in momentum.slots.items()}
    parts = [(rank, part) for rank in range(layout.num_shards) for part in layout.slices(rank)]
    away = sum(part.numel for rank, part in parts if owner.get(part.name, rank) != rank)
    mean = [-(-numel // layout.num_shards) for numel in (2 * away, away)]  # parameters and gradients, and back
    sent = [(kind, traffic.number, traffic.sent) for (_, kind), traffic in counter.traffic.items()]
    assert sent == [("ragged_all_to_all", 2, 8 * sum(mean))]


def test_many_rounds_send_as_much_as_one_and_have_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen_by(mesh: fs.Mesh) -> list[int]:
        with count_collectives() as seen:
            opt, params = optimizer("muon"), fs.shard(values(), planned(mesh))
            params, _ = trained(params, opt.init(params), opt)
        assert_unsharded(fs.gather(params), "muon")
        return [op.numel for op in seen.issued]

    once = seen_by(fs.simulated_mesh(2))
    monkeypatch.setattr(plan, "ROUND", 1)  # a round for each parameter of an owner
    often = seen_by(fs.simulated_mesh(2))
    assert len(once) == 5 * 2
    assert len(often) > 2 * len(once) - 1
    assert sum(once) <= sum(often) <= sum(once) + len(often)  # each mean is rounded up
