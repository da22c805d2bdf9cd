"""Parameters, gradients and optimizer state over axes of their own: ZeRO-1, ZeRO-2, the optimizer over all ranks."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication.counter import bytes_sent
from functorch_shard.replicas import across_replicas, copies_of, parts_of, reduce_to_parts, within_replicas
from functorch_shard.testing import assert_trees_close
from tests.support.models import two_layers
from tests.support.ranks import Ranks, gloo, simulated
from tests.support.refusals import refused

OPT = fs.optimizer(torch.optim.AdamW, lr=0.01)
NODES = {"replicate": 2, "shard": 2}
BLOCK: dict[str, Any] = {"units": 10**9, "align_bytes": 0}  # one buffer, whose shards are cut inside of rows


class Placement(NamedTuple):
    """The layout of the state and the one of the parameters."""

    states: fs.Layout
    params: fs.Layout


def over_all(mesh: fs.Mesh, **options: Any) -> Placement:
    """The state over all ranks, parameters over the axis ``shard`` if there are nodes, and otherwise over none."""
    model = two_layers()
    nodes = "replicate" in mesh.axes
    states = fs.plan(model, mesh, shard_axis=("shard", "replicate") if nodes else "shard", **options)
    return Placement(states, states.with_copies("replicate" if nodes else "shard"))


def batch(mesh: fs.Mesh, step: int, integers: bool = False) -> Any:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3 * mesh.size, 5, generator=generator)
    x = x.mul(3).round() if integers else x
    return mesh.split((x, x[:, :3]))


def gradients(mesh: fs.Mesh, params: fs.Sharded, step: int) -> fs.Sharded:
    """Of a function of single elements: what a rank adds does not depend on how simulated ranks are batched."""

    def loss(params: fs.Sharded, x: Tensor, _: Tensor) -> Tensor:
        full = fs.gather(params)
        terms = [(p.square() * x.mean().to(p.dtype)).sum() * (i + x[0, 0]) for i, p in enumerate(full.values())]
        return torch.stack(terms).sum()

    return mesh.spmd(fs.grad(loss))(params, *batch(mesh, step))


def step(mesh: fs.Mesh, place: Placement, stage: int, params: fs.Sharded, state: Any, i: int) -> Any:
    """Parameters, reduced gradients and state after step ``i`` of ZeRO-1 or ZeRO-2."""
    grads = gradients(mesh, within_replicas(params), i)
    if stage == 2:
        grads = reduce_to_parts(grads, place.states)
    else:
        grads = parts_of(across_replicas(grads, place.params), place.states)
    mine, state = OPT.step(parts_of(params, place.states), grads=grads, state=state)
    return copies_of(mine, place.params), grads, state


def by_stage(mesh: fs.Mesh, place: Placement, stage: int) -> tuple[fs.Sharded, fs.Sharded]:
    """Parameters after three steps, and the last reduced gradients, in the layout of the state."""
    params = fs.shard(two_layers(), place.states if stage == 3 else place.params)
    state, grads = OPT.init(params if stage == 3 else parts_of(params, place.states)), None
    for i in range(3):
        if stage == 3:
            grads = gradients(mesh, params, i)
            params, state = OPT.step(params, grads=grads, state=state)
            continue
        params, grads, state = step(mesh, place, stage, params, state, i)
    assert grads is not None
    return params, grads


def stages(mesh: fs.Mesh, options: dict[str, Any]) -> Any:
    """What is the same in all stages; checked here, where its layouts are."""
    place = over_all(mesh, **options)
    three, grads3 = by_stage(mesh, place, 3)
    two, grads2 = by_stage(mesh, place, 2)
    one, grads1 = by_stage(mesh, place, 1)
    assert grads1.layout == grads2.layout == grads3.layout == place.states
    return grads1, grads2, grads3, parts_of(one, place.states), parts_of(two, place.states), three


OPTIONS: list[dict[str, Any]] = [
    {},
    BLOCK,
    {"reduction": "sum"},
    {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)},
    {"ignored": ["0.bias"], "granularity": "rows"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [*simulated(1, 2, 3, 8), *gloo(2, 3)], ids=str)
def test_zero_1_and_2_have_the_gradients_and_parameters_of_zero_3_bitwise(ranks: Ranks, options: Any) -> None:
    for grads1, grads2, grads3, one, two, three in ranks.run(stages, options):
        for x in (grads1, grads2):
            assert_trees_close(x, grads3, rtol=0, atol=0)
        for x in (one, two):
            assert_trees_close(x, three, rtol=0, atol=0)


def node_by_node(mesh: fs.Mesh, options: dict[str, Any]) -> Any:
    """Gradients and parameters: of replicas that each have all of the state, and of the optimizer over all ranks."""
    place, hybrid = over_all(mesh, **options), fs.plan(two_layers(), mesh, **options)
    params, state = fs.shard(two_layers(), hybrid), None
    grads: Any = None
    state = OPT.init(params)
    for i in range(3):
        grads = gradients(mesh, params, i)
        params, state = OPT.step(params, grads=grads, state=state)
    found = [by_stage(mesh, place, stage) for stage in (1, 2)]
    whole = [fs.gather(tree, lazy=False) for tree in (grads, params)]
    return whole, [[fs.gather(tree, lazy=False) for tree in (grads, params)] for params, grads in found]


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
@pytest.mark.parametrize("ranks", [*simulated(NODES), *gloo(NODES)], ids=str)
def test_the_optimizer_over_all_ranks_has_the_numbers_of_replicated_state_bitwise(ranks: Ranks, options: Any) -> None:
    for expected, found in ranks.run(node_by_node, options):
        for grads_and_params in found:
            assert_trees_close(grads_and_params, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("ranks", simulated({"shard": 3, "replicate": 2}, NODES), ids=str)
def test_in_another_order_of_sums_it_differs_in_the_last_bits(ranks: Ranks, options: Any) -> None:
    # A third is rounded in each half of the mean, and what is whole on every rank is added up over nodes first.
    for expected, found in ranks.run(node_by_node, options):
        for grads_and_params in found:
            assert_trees_close(grads_and_params, expected, rtol=1e-5, atol=1e-6)


def exact(mesh: fs.Mesh) -> Any:
    """Gradients of sums of integers, whose order does not matter: in the layout of the state, both ways."""
    place = over_all(mesh)
    loss = lambda p, x: sum((fs.gather(p)[name] * x[0, 0]).sum() for name in ("0.weight", "2.bias"))  # noqa: E731
    x, _ = batch(mesh, 0, integers=True)
    three = mesh.spmd(fs.grad(loss))(fs.shard(two_layers(), place.states), x)
    copied = mesh.spmd(fs.grad(loss))(within_replicas(fs.shard(two_layers(), place.params)), x)
    return reduce_to_parts(copied, place.states), three


@pytest.mark.parametrize("ranks", [*simulated(NODES), *gloo(NODES)], ids=str)
def test_gradients_over_all_ranks_are_those_of_zero_3_over_all_ranks(ranks: Ranks) -> None:
    for parts, three in ranks.run(exact):
        assert_trees_close(parts, three, rtol=0, atol=0)


def counted(mesh: fs.Mesh, stage: int) -> Any:
    """Collectives of one step by axis and kind, with bytes sent, and the bytes that a rank holds between steps."""
    counter = fs.communication.Counter()
    mesh = mesh.with_backend(counter)
    place = over_all(mesh, **BLOCK)
    params = fs.shard({name: x.detach() for name, x in two_layers().named_parameters()}, place.params)
    state = OPT.init(parts_of(params, place.states))
    counter.clear()
    params, grads, state = step(mesh, place, stage, params, state, 0)
    held = [sum(x.nbytes for x in tree.values()) for tree in (params, grads, state["exp_avg"], state["exp_avg_sq"])]
    each = 1 if not mesh.is_simulated else mesh.size
    seen = {key: (traffic.number, traffic.sent) for key, traffic in counter.traffic.items()}
    return seen, [x // each for x in held]


WHOLE = 4 * (5 * 7 + 7 + 7 * 3 + 3)  # bytes of the model: 66 elements


@pytest.mark.parametrize("ranks", [*simulated(2, 3), *gloo(2, 3)], ids=str)
def test_zero_1_and_2_send_and_hold_what_they_have_to(ranks: Ranks) -> None:
    size, shard = ranks.size, WHOLE // ranks.size
    gathered = (1, bytes_sent("all_gather", shard, size))
    for stage, kind in ((1, "psum"), (2, "psum_scatter")):
        seen, held = ranks.run(counted, stage)[0]
        reduced = (1, bytes_sent(kind, WHOLE, size))
        assert seen == {("shard", kind): reduced, ("shard", "all_gather"): gathered}
        assert held == [WHOLE, shard, shard, shard]


@pytest.mark.parametrize("ranks", gloo(NODES), ids=str)
def test_the_optimizer_over_all_ranks_sends_and_holds_what_it_has_to(ranks: Ranks) -> None:
    nodes, inside = NODES["replicate"], NODES["shard"]
    in_node, part = 4 * (WHOLE // 4 + 2) // inside, 4 * (WHOLE // 4 + 2) // 4  # 68 elements, with padding
    seen, held = ranks.run(counted, 2)[0]
    gathers, _ = seen.pop(("shard", "all_gather"))
    assert gathers >= 1
    assert seen == {
        ("shard", "psum_scatter"): (1, bytes_sent("psum_scatter", inside * in_node, inside)),
        ("replicate", "psum_scatter"): (1, bytes_sent("psum_scatter", in_node, nodes)),
        ("replicate", "all_gather"): (1, bytes_sent("all_gather", part, nodes)),
    }
    assert held == [in_node, part, part, part]


PLACEMENTS: dict[str, tuple[Any, tuple[str, ...] | str, tuple[str, ...]]] = {
    "zero 3": (3, "shard", ()),
    "zero 1 and 2": (3, "shard", ("shard",)),
    "nodes": ({"replicate": 2, "shard": 3}, ("shard", "replicate"), ("replicate",)),
    "all copies": ({"replicate": 2, "shard": 2}, ("shard", "replicate"), ("shard", "replicate")),
    "replicas of zero 1": ({"replicate": 2, "shard": 2}, "shard", ("shard",)),
}


def placed(case: str) -> Placement:
    axes, shard_axis, copies = PLACEMENTS[case]
    states = fs.plan(two_layers(), fs.simulated_mesh(axes), shard_axis=shard_axis)
    return Placement(states, states.with_copies(*copies) if copies else states)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("to", PLACEMENTS)
@pytest.mark.parametrize("case", PLACEMENTS)
def test_checkpoints_and_reshard_move_between_placements(tmp_path: Path, case: str, to: str) -> None:
    old, new = placed(case), placed(to)
    params, grads = (fs.shard(two_layers(seed=seed), old.states) for seed in (0, 1))
    mine, state = OPT.step(params, grads=grads, state=OPT.init(params))
    params = copies_of(mine, old.params) if old.params != old.states else mine
    fs.checkpoint.save(tmp_path / "one", {"model": params, "optim": {"state": state}})
    blank = fs.shard(two_layers(seed=2), new.params)
    fresh = OPT.init(fs.shard(two_layers(seed=2), new.states))
    loaded = fs.checkpoint.load(tmp_path / "one", {"model": blank, "optim": {"state": fresh}})
    assert loaded["model"].layout == new.params
    assert_trees_close(dict(fs.gather(loaded["model"])), dict(fs.gather(mine)), rtol=0, atol=0)
    for name, tree in loaded["optim"]["state"].items():
        assert tree.layout == new.states
        if name != "step":
            assert_trees_close(dict(fs.gather(tree)), dict(fs.gather(state[name])), rtol=0, atol=0)
    assert_trees_close(fs.reshard(params, new.params), loaded["model"], rtol=0, atol=0)
    if old.params != old.states:
        assert_trees_close(fs.reshard(params, old.states), parts_of(params, old.states), rtol=0, atol=0)


@pytest.mark.parametrize("case", PLACEMENTS)
def test_layouts_with_copies_hold_whole_values(case: str) -> None:
    layout = placed(case).params
    assert str(layout)
    params = fs.shard(two_layers(), layout)
    assert_trees_close(dict(fs.gather(params)), dict(two_layers().named_parameters()), rtol=0, atol=0)


def replicated_zero(mesh: fs.Mesh) -> Any:
    """ZeRO over an axis inside of replicas: gradients are added up over both."""
    states = fs.plan(two_layers(), mesh)
    place = Placement(states, states.with_copies("shard"))
    return by_stage(mesh, place, 3)[1], by_stage(mesh, place, 2)[1], by_stage(mesh, place, 1)[1]


@pytest.mark.parametrize("ranks", [*simulated(NODES), *gloo(NODES)], ids=str)
def test_copies_may_be_inside_of_replicas(ranks: Ranks) -> None:
    for three, two, one in ranks.run(replicated_zero):
        assert_trees_close(two, three, rtol=0, atol=0)
        assert_trees_close(one, three, rtol=0, atol=0)


def test_trees_of_other_layouts_are_refused() -> None:
    place, other = over_all(fs.simulated_mesh(NODES)), fs.plan(two_layers(), fs.simulated_mesh(NODES), units=1)
    params = fs.shard(two_layers(), place.params)
    parts = parts_of(params, place.states)
    grads = within_replicas(params)
    assert "TypeError: parts_of: tree: got dict" in refused(parts_of, {}, place.states)
    assert "TypeError: parts_of: tree: layout: got Mesh" in refused(parts_of, params, place.states.mesh)
    for fn, tree, layout in (
        (parts_of, parts, place.states),
        (parts_of, params, place.params),
        (parts_of, params, other),
        (copies_of, params, place.params),
        (copies_of, parts, other),
        (reduce_to_parts, params, place.states),
        (reduce_to_parts, grads, other),
        (parts_of, grads, place.states),
    ):
        text = refused(fn, tree, layout)
        assert f"ValueError: {fn.__name__}: " in text
        assert "One layout has to be with_copies(...) of the other." in text


def test_copies_are_those_along_the_last_shard_axes() -> None:
    states = over_all(fs.simulated_mesh(NODES)).states
    for axes in ((), ("shard",), ("replicate", "shard"), ("tensor",)):
        text = refused(states.with_copies, *axes)
        assert "expected the last of 'shard', 'replicate'" in text
    whole = states.with_copies("shard", "replicate")
    assert whole.num_shards == 1
    assert whole.num_ranks == states.num_ranks == prod(NODES.values())


def test_a_layout_that_was_planned_alone_is_the_one_with_copies_if_its_padding_is_the_same() -> None:
    mesh = fs.simulated_mesh(NODES)
    states = fs.plan({"w": torch.zeros(8)}, mesh, shard_axis=("shard", "replicate"))
    hybrid = fs.plan({"w": torch.zeros(8)}, fs.simulated_mesh(NODES))
    assert states.with_copies("replicate") == hybrid
    values = {"w": torch.arange(8.0)}
    assert_trees_close(copies_of(fs.shard(values, states), hybrid), fs.shard(values, hybrid), rtol=0, atol=0)


def test_none_and_numbers_stay() -> None:
    place = over_all(fs.simulated_mesh(2))
    params = fs.shard(two_layers(), place.params)
    tree = fs.Sharded({**params, "0": None, "2": torch.tensor([3.0, 3.0])}, place.params)
    parts: Any = parts_of(tree, place.states)
    assert parts["0"] is None
    assert torch.equal(parts["2"], torch.tensor([3.0, 3.0]))
    assert isinstance(parts["2"], Tensor)
