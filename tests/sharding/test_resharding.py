"""The same values in any other layout, bitwise; training goes on as if nothing had happened."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import product
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.communication.backend import DetachedBackend
from functorch_shard.sharding.reshard import copy_plan
from functorch_shard.testing import count_collectives
from tests.support.models import awkward, two_layers
from tests.support.refusals import refused
from tests.support.steps import SHAPES, assert_equal_stock, by_torch, sharded_grads, values, whole

mapped: Any = optree.tree_map  # its type knows no trees of other libraries
STEPS = 3
# The ranks of each phase, and what is frozen, by the beginning of its name: some of it thaws, and other parts freeze.
PHASES = ((1, ("a.", "b.scale")), (3, ("b.scale",)), (8, ("c.",)), (2, ("c.", "b.w")))


def step_in_phases(opt: fs.Optimizer) -> fs.Sharded:
    """The parameters at the end: each phase on its ranks, with the state of the last."""
    params: Any = None
    state: Any = None
    for number, (ranks, frozen) in enumerate(PHASES):
        source = {
            name: nn.Parameter(x, requires_grad=x.is_floating_point() and not name.startswith(frozen))
            for name, x in whole().items()
        }
        # two parameters of one unit freeze at different times
        labels = lambda name, p: "scale" if name == "b.scale" else None  # noqa: E731
        layout = fs.plan(source, fs.simulated_mesh(ranks), labels=labels)
        params = fs.reshard(params, layout) if params else fs.shard(source, layout)
        fresh = opt.init(params)
        state = with_fresh(fresh, fs.reshard(state, layout)) if state else fresh
        for i in range(number * STEPS, (number + 1) * STEPS):
            params, state = opt.step(params, grads=sharded_grads(layout, i + 1), state=state)
    return params


def with_fresh(fresh: Any, moved: Any) -> Any:
    """The state of what is trained now: as it was, where there is one."""
    combine = lambda new, old: fs.Sharded({key: old.get(key, x) for key, x in new.items()}, new.layout)  # noqa: E731
    return optree.tree_map(combine, fresh, moved, is_leaf=lambda x: isinstance(x, fs.Sharded))


def values_of_phases(i: int) -> Any:
    """For ``by_torch``: no gradient of what is frozen at a step."""
    frozen = PHASES[(i - 1) // STEPS][1] if i else ()
    return {name: None if name.startswith(frozen) else x for name, x in values(i).items()}


RANKS = (1, 2, 3, 5, 8)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
AXES: list[dict[str, int]] = [
    *({"shard": n} for n in RANKS),
    {"replicate": 2, "shard": 3},
    {"shard": 3, "replicate": 2},
    {"replicate": 3},
    {"replicate": 1, "shard": 2},
]
UNITS: list[Any] = ["auto", 1, 100, [["a", "c"], ["b"]]]


@st.composite
def trees(draw: Any) -> dict[str, Tensor]:
    """Parameters of three modules, of awkward shapes and any dtype, some frozen, two tied."""
    names = ["a.w", "a.b", "b.0.w", "b.1.w", "b.1.scale", "c.w", "c.d.w"]
    shapes = st.lists(st.integers(0, 5), max_size=3)
    torch.manual_seed(draw(st.integers(0, 2**16)))
    tree = {name: (9 * torch.randn(draw(shapes))).to(draw(st.sampled_from(DTYPES))) for name in names}
    return {**tree, "c.tied": tree["a.w"]}


@st.composite
def layouts(draw: Any, tree: dict[str, Tensor], axes: Any = None) -> fs.Layout:
    """Any layout of these parameters: other ranks, units, labels, alignment, trainability, parameters kept whole."""
    frozen = draw(st.sets(st.sampled_from(list(tree)))) - {"a.w", "c.tied"}
    labelled = draw(st.sets(st.sampled_from(list(tree))))
    source = {name: nn.Parameter(x, requires_grad=False) if name in frozen else x for name, x in tree.items()}
    return fs.plan(
        source,
        fs.simulated_mesh(axes or draw(st.sampled_from(AXES)), kind="sequential" if axes else "batched"),
        units=draw(st.sampled_from(UNITS)),
        labels=lambda name, p: "other" if name in labelled else None,
        align_bytes=draw(st.sampled_from([0, 4, 16, 64])),
        ignored=draw(st.sampled_from([[], ["b"], ["a.w", "c.d"]])),
    )


def places(layout: fs.Layout) -> dict[tuple[int, str, int], tuple[str, int]]:
    """What lies where, by a loop over ranks: (rank, buffer, offset) -> (parameter, element)."""
    result = {}
    for rank, place in enumerate(product(*(range(size) for _, size in layout.axes))):
        shard = dict(zip(dict(layout.axes), place, strict=True)).get(layout.shard_axis, 0)
        for buffer in layout.buffers.values():
            for name, offset, numel, start in buffer.slices(shard):
                for i in range(numel):
                    result[rank, buffer.key, offset + i] = (name, start + i)
    return result


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    tree=trees(),
    axes=st.sampled_from([({"shard": 6}, {"replicate": 2, "shard": 3}), ({"shard": 4}, {"shard": 4})]),
)
def test_a_rank_is_sent_what_it_lacks_and_nothing_else(data: Any, tree: dict[str, Tensor], axes: Any) -> None:
    old, new = (data.draw(layouts(tree, one)) for one in axes)
    home = data.draw(st.permutations(range(new.mesh.size)))
    held = {(rank, what) for (rank, _, _), what in places(old).items()}
    lacking = Counter(rank for (rank, _, _), what in places(new).items() if (home[rank], what) not in held)
    sent: Counter[int] = Counter()
    for copy in copy_plan(old, new, home):
        sent[copy.rank] += copy.numel * (home[copy.rank] != copy.source_rank)
    assert +sent == lacking


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tree=trees())
def test_parameters_keep_every_bit_in_any_other_layout(data: Any, tree: dict[str, Tensor]) -> None:
    old, new = data.draw(layouts(tree)), data.draw(layouts(tree))
    with count_collectives() as seen:
        moved = fs.reshard(fs.shard(tree, old), new)
    assert seen.total == 0
    assert same_bits(moved, fs.shard(tree, new))  # padding too
    assert moved.layout is new
    assert same_bits(fs.reshard(moved, old), fs.shard(tree, old))


def same_bits(a: fs.Sharded, b: fs.Sharded) -> bool:
    alike = list(a) == list(b) and all((a[k].shape, a[k].dtype) == (b[k].shape, b[k].dtype) for k in a)
    return alike and all(torch.equal(bits(a[key]), bits(b[key])) for key in a)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def test_ranks_that_lack_a_shard_take_it_from_different_copies() -> None:
    old = fs.plan(awkward(), fs.simulated_mesh({"replicate": 3, "shard": 1}, kind="sequential"))
    new = fs.plan(awkward(), fs.simulated_mesh(9))
    assert {copy.source_rank for copy in copy_plan(old, new, [3] * 9)} == {0, 1, 2}


def test_of_batched_copies_which_round_by_themselves_the_first_is_kept() -> None:
    model, mesh = awkward(), fs.simulated_mesh({"replicate": 2, "shard": 2})
    params = fs.shard(model, fs.plan(model, mesh))
    for x in params.values():
        x[1].zero_()
    assert same_bits(fs.reshard(params, layout := fs.plan(model, fs.simulated_mesh(3))), fs.shard(model, layout))


def test_nothing_is_shared_with_the_tree_and_nothing_in_it_changes() -> None:
    model = two_layers()
    layout = fs.plan(model, fs.simulated_mesh(2))
    params = fs.shard(model, layout)
    moved = fs.reshard(params, layout)
    for x in moved.values():
        x.add_(1)
    assert same_bits(params, fs.shard(model, layout))
    assert not any(x.requires_grad for x in fs.reshard(mapped(lambda x: x.requires_grad_(), params), layout).values())


def test_trees_go_together_and_what_is_not_sharded_stays() -> None:
    model = two_layers()
    old, new = fs.plan(model, fs.simulated_mesh(2)), fs.plan(model, fs.simulated_mesh(3))
    params = fs.shard(model, old)
    average = mapped(lambda x: x.bfloat16() / 2, params)  # another dtype than the parameters
    average = fs.reshard(average, fs.plan(model, fs.simulated_mesh(5)))  # and another layout
    moved = fs.reshard({"trees": (params, average), "step": 7, "name": None}, new)
    assert (moved["step"], moved["name"]) == (7, None)
    assert same_bits(moved["trees"][0], fs.shard(model, new))
    assert same_bits(moved["trees"][1], mapped(lambda x: x.bfloat16() / 2, fs.shard(model, new)))


def states_of(first_frozen: bool, labels: Any = None) -> tuple[Any, fs.Layout]:
    """State after one step, in which the first parameter may be frozen, and a layout in which nothing is."""
    model, opt, mesh = two_layers(), fs.optimizer(torch.optim.Adam, lr=0.1), fs.simulated_mesh(2)
    new = fs.plan(model, mesh, labels=labels)
    model[0].weight.requires_grad_(not first_frozen)
    old = fs.plan(model, mesh, labels=labels)
    params = fs.shard(model, old)
    return opt.step(params, grads=params, state=opt.init(params))[1], new


def test_all_disagreements_of_the_layouts_are_named_at_once() -> None:
    tree = {"a.w": torch.zeros(3), "a.b": torch.zeros(2), "c": torch.zeros(2)}
    tied = torch.zeros(2)
    other = {"a.w": torch.zeros(3, 1), "a.b": torch.zeros(2).int(), "c": tied, "c_tied": tied}
    mesh = fs.simulated_mesh(2)
    text = refused(fs.reshard, fs.shard(tree, fs.plan(tree, mesh)), fs.plan(other, mesh))
    assert "ValueError: reshard: 3 problems" in text
    for line in (
        "'c_tied': None in the tree; tied to 'c' in the layout",
        "'a.w': (3,), torch.float32 in the tree; (3, 1), torch.float32 in the layout",
        "'a.b': (2,), torch.float32 in the tree; (2,), torch.int32 in the layout",
    ):
        assert line in text


def test_what_is_no_tree_of_shards_is_refused() -> None:
    model, mesh = two_layers(), fs.simulated_mesh(2)
    layout = fs.plan(model, mesh)
    params = fs.shard(model, layout)
    assert refused(fs.reshard, params, mesh).startswith("TypeError: reshard: layout: got Mesh, expected a Layout")
    text = refused(fs.reshard, fs.Sharded({**params, "0": torch.zeros(2, 3)}, layout), layout)
    assert "'0': got (2, 3), expected [(2, 22), (2,)]" in text


def test_ranks_that_count_steps_differently_are_refused() -> None:
    state, _ = states_of(False)
    layout = state["step"].layout
    state["step"]["0"][1] += 1
    text = refused(fs.reshard, state, layout)
    assert "['step']: '0': 1.0 (torch.float32) or 2.0 (torch.float32) for '0.weight'" in text


def test_a_buffer_whose_parameters_have_other_histories_is_refused_and_labels_keep_them_apart() -> None:
    state, layout = states_of(True)
    text = refused(fs.reshard, state, layout)
    assert "['exp_avg']: '0': nothing for '0.weight'; a shard of torch.float32 for '0.bias'" in text
    assert "plan(labels=" in text

    def late(name: str, p: Any) -> Any:
        return "late" if name == "0.weight" else None

    moved = fs.reshard(*states_of(True, labels=late))
    assert {key: x[0].item() for key, x in moved["step"].items()} == {"0": 1.0, "2": 1.0}


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_parameters_freeze_and_thaw_between_steps_as_in_plain_torch(name: str) -> None:
    cls = getattr(torch.optim, name)
    expected = by_torch(values_of_phases, STEPS * len(PHASES), (cls, SHAPES, {"lr": 0.02}))
    assert_equal_stock(step_in_phases(fs.optimizer(cls, lr=0.02)), expected)


def test_one_rank_takes_all_and_one_of_many_is_refused() -> None:
    model = awkward()
    many, alone = fs.plan(model, fs.simulated_mesh(5)), fs.plan(model, fs.init_mesh())
    params = fs.shard(model, many)
    single = fs.reshard(params, alone)
    assert same_bits(single, fs.shard(model, alone))
    assert same_bits(fs.reshard(single, many), params)
    axes = tuple(fs.Axis(name, size, DetachedBackend(4)) for name, size in many.axes)
    last = fs.reshard(single, many.on(pickle.loads(pickle.dumps(fs.Mesh(axes, torch.device("cpu"))))))
    assert same_bits(last, fs.Sharded({key: x[-1] for key, x in params.items()}, many))
    assert "tree.on(mesh)" in refused(fs.reshard, last, alone)
    assert "its ranks are not here" in refused(fs.gather, last)
