"""Whole parameters are updated by one owner each: bitwise as by the class on unsharded parameters; what it sends."""

from __future__ import annotations

from itertools import product
from typing import Any

import optree
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
from tests.support.steps import copied, structure, tensors


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


@pytest.mark.parametrize("case", ["muon", "soap", "counts_in_groups", "first_gradient"])
def test_a_step_writes_to_its_inputs_only_if_they_are_donated(case: str) -> None:
    opt, params = optimizer(case), fs.shard(values(), planned(fs.simulated_mesh(2)))
    state = opt.init(params)
    inputs, form = (params, fs.shard(values(1), params.layout), state), structure(state)
    before, versions = copied(inputs), [x._version for x in tensors(inputs)]
    params, state = opt.step(params, grads=inputs[1], state=state)
    assert_trees_close(inputs, before, rtol=0, atol=0)
    assert [x._version for x in tensors(inputs)] == versions
    addresses = [x.data_ptr() for x in tensors((params, state)) if x.ndim > 1]
    params, state = trained(params, state, opt, range(1, 5), donate=True)
    assert [x.data_ptr() for x in tensors((params, state)) if x.ndim > 1] == addresses
    assert structure(state) == form
    assert_unsharded(fs.gather(params), case)


def test_padding_stays_exactly_zero() -> None:
    opt, params = optimizer("shampoo"), fs.shard(values(), planned(fs.simulated_mesh(3), align_bytes=64))
    params, state = trained(params, opt.init(params), opt)
    for tree in (params, *state.values()):
        for key, buffer in tree.layout.buffers.items():
            for rank in range(3 if key in tree and tree[key].ndim > 1 else 0):
                row = tree[key][rank].clone()
                for part in buffer.slices(rank):
                    row[part.offset : part.offset + part.numel] = 0
                assert not row.any()


@pytest.mark.parametrize("case", ["muon", "soap"])
def test_none_for_a_gradient_leaves_parameters_and_their_state_unchanged_also_in_the_first_step(case: str) -> None:
    mesh = fs.simulated_mesh(3)
    opt, params = optimizer(case), fs.shard(values(), planned(mesh))
    layout, state = params.layout, opt.init(params)
    for i, idle in enumerate([{"a"}, {"c"}, set[str]()]):
        grads = {key: None if key in idle else x for key, x in fs.shard(values(i + 1), layout).items()}
        params, state = mesh.spmd(opt.step)(params, grads=fs.Sharded(grads, layout), state=state)
    cls, options = CASES[case]
    expected = {name: x for name, x in values().items() if is_whole(name)}
    for name, x in expected.items():
        each: Any = cls([x], **options)
        for i, idle in enumerate([{"a"}, {"c"}, set[str]()]):
            x.grad = None if name[0] in idle else values(i + 1)[name]
            each.step()
    full = fs.gather(params)
    assert_trees_close({name: full[name] for name in expected}, expected, rtol=1e-12, atol=1e-13)


def test_models_of_an_ensemble_are_updated_side_by_side() -> None:
    mesh = fs.simulated_mesh(2)
    layout, opt = planned(mesh), optimizer("muon")

    @mesh.spmd
    def both(params: Any, grads: Any) -> Any:
        return torch.func.vmap(lambda p, g: opt.step(p, grads=g, state=opt.init(p))[0])(params, grads)

    def stacked(*seeds: int) -> Any:
        trees: list[Any] = [fs.shard(values(seed), layout) for seed in seeds]
        return optree.tree_map(lambda *x: torch.stack(x, 1), *trees)

    with count_collectives() as seen:
        result = both(stacked(0, 1), stacked(2, 3))
    assert len(seen.issued) == 2
    for i in range(2):
        params = fs.shard(values(i), layout)
        expected, _ = opt.step(params, grads=fs.shard(values(2 + i), layout), state=opt.init(params))
        assert_trees_close(optree.tree_map(lambda x, i=i: x[:, i], result), expected, rtol=0, atol=0)


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
    source = {f"{i}.w": torch.ones(256, 256) for i in range(16)}
    params = fs.shard(source, fs.plan(source, mesh))
    opt = fs.optimizer(torch.optim.Muon, whole=True)
    state, grads = opt.init(params), fs.shard(source, params.layout)
    opt.step(params, grads=grads, state=state, donate=True)
    with LiveBytes() as live:
        live.mark("before")
        opt.step(params, grads=grads, state=state, donate=True)
        live.mark("after")
    assert live.growth("before", "after") < 8 * 256 * 256 * 4


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
