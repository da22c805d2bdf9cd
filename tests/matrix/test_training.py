"""What a step by owners sends, and a skipped first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.matrix import plan
from functorch_shard.testing import count_collectives
from tests.support.matrix import assert_unsharded, optimizer, planned, trained, values
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated


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


def skipping(mesh: fs.Mesh, case: str) -> fs.Full:
    """The first of four steps overflows and is skipped."""
    opt, params = optimizer(case), fs.shard(values(), planned(mesh))
    loss_scale = fs.LossScale.dynamic(initial=4.0)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, scale: Any, grads: fs.Sharded) -> Any:
        grads, finite = loss_scale.unscale(grads, scale)
        new = opt.step(params, grads=grads, state=state)
        params, state = loss_scale.select(finite, new, (params, state))
        return params, state, loss_scale.update(scale, finite)

    state, scale = opt.init(params), loss_scale.init(params)
    for i in range(4):
        factor = torch.inf if i == 0 else 2.0
        whole = {name: x * factor for name, x in values(i).items()}
        params, state, scale = step(params, state, scale, fs.shard(whole, params.layout))
    return fs.gather(params, lazy=False)


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
@pytest.mark.parametrize("case", ["sgd", "first_gradient"])
def test_a_skipped_first_step_leaves_the_state_as_if_there_had_been_none(case: str, ranks: Ranks) -> None:
    for full in ranks.run(skipping, case):
        assert_unsharded(full, case, 3)
