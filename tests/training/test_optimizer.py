"""The optimizer is the stock class on shards: the same numbers, without writing to its inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.live_bytes import LiveBytes
from tests.support.steps import (
    CASES,
    FROZEN,
    assert_equal_stock,
    copied,
    optimizer,
    planned,
    run,
    sharded_grads,
    stepping,
    stock,
    structure,
    tensors,
    values,
    whole,
)

every_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@every_case
def test_steps_on_stacked_shards_equal_the_stock_optimizer(case: str, ranks: int) -> None:
    assert_equal_stock(run(optimizer(case), planned(fs.simulated_mesh(ranks))), stock(case))


@pytest.mark.parametrize("axes", [2, 5, {"replicate": 2, "shard": 3}], ids=str)
@every_case
def test_steps_inside_spmd_equal_the_stock_optimizer(case: str, axes: Any) -> None:
    mesh = fs.simulated_mesh(axes)
    assert_equal_stock(run(optimizer(case), planned(mesh), wrap=mesh.spmd), stock(case))


@every_case
def test_steps_on_one_real_rank_equal_the_stock_optimizer(case: str) -> None:
    assert_equal_stock(run(optimizer(case), planned(fs.init_mesh())), stock(case))


@every_case
def test_a_step_never_writes_to_its_inputs(case: str) -> None:
    layout = planned(fs.simulated_mesh(3))
    opt, params = optimizer(case), fs.shard(whole(), layout)
    state = opt.init(params)
    for i in range(2):
        inputs = params, sharded_grads(layout, i + 1), state
        before = copied(inputs)
        seen = [x._version for x in tensors(inputs)]
        params, state = stepping(opt)(*inputs)
        assert_trees_close(inputs, before, rtol=0, atol=0)
        assert [x._version for x in tensors(inputs)] == seen


@every_case
def test_donating_gives_the_same_numbers_in_place(case: str) -> None:
    mesh = fs.simulated_mesh(2)
    layout, opt = planned(mesh), optimizer(case)
    params = fs.shard(whole(), layout)
    params, state = opt.step(
        params, grads=sharded_grads(layout, 1), state=opt.init(params)
    )  # SGD's momentum comes with this one
    before = [x.data_ptr() for x in tensors((params, state)) if x.ndim > 1]
    for i, wrap in enumerate([lambda step: step, mesh.spmd]):
        step = wrap(lambda params, grads, state: opt.step(params, grads=grads, state=state, donate=True))
        params, state = step(params, sharded_grads(layout, i + 2), state)
        assert [x.data_ptr() for x in tensors((params, state)) if x.ndim > 1] == before
    assert_equal_stock(params, stock(case, 3))


def _one_for_all(x: Tensor) -> Tensor:
    """The same values, but the rows share the memory of the first: what a reduction over replicas returns."""
    return x[:1].clone().expand_as(x)


def _inside_out(x: Tensor) -> Tensor:
    """The same values, the last dim outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def _laid(lay: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return optree.tree_map(lambda x: lay(x) if x.ndim == 3 and x.numel() else x, tree)


# Leaves that are not contiguous, among contiguous ones.
MEMORY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gradients once for all replicas": (lambda x: x, _one_for_all),
    "gradients inside out": (lambda x: x, _inside_out),
    "parameters and state once for all replicas": (_one_for_all, lambda x: x),
    "parameters and state inside out": (_inside_out, lambda x: x),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("donate", [False, True])
@every_case
def test_strides_of_tensors_change_nothing(case: str, donate: bool, memory: str) -> None:
    layout, opt = planned(fs.simulated_mesh({"replicate": 2, "shard": 3})), optimizer(case)
    ours, theirs = (partial(_laid, lay) for lay in MEMORY[memory])
    params = fs.shard(whole(), layout)
    expected = params, opt.init(params)
    actual = copied(expected)
    for i in range(3):
        grads = sharded_grads(layout, i + 1)
        expected = opt.step(expected[0], grads=grads, state=expected[1])
        actual = opt.step(ours(actual[0]), grads=theirs(grads), state=ours(actual[1]), donate=donate)
        # a vectorized kernel fuses a product and a sum where an odd element at the end is not: an ulp
        assert_trees_close(actual, expected, rtol=1e-13, atol=1e-14)


class LargestNew(TorchDispatchMode):
    """The largest tensor that came into being, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        new = [x for x in tensors(result) if x.untyped_storage().data_ptr() not in known]
        self.largest = max([self.largest, *(x.numel() for x in new)])
        return result


@pytest.mark.parametrize("case", ["sgd_momentum", "adam", "adamw"])
def test_donating_allocates_nothing_large(case: str) -> None:
    mesh = fs.simulated_mesh(2)
    layout = fs.plan({"w": torch.zeros(1000)}, mesh)
    params, grads = fs.shard({"w": torch.ones(1000)}, layout), fs.shard({"w": torch.rand(1000)}, layout)
    opt = optimizer(case)
    params, state = opt.step(params, grads=grads, state=opt.init(params))
    with LargestNew() as copying:
        opt.step(params, grads=grads, state=state)
    with LargestNew() as donating:
        opt.step(params, grads=grads, state=state, donate=True)
    assert copying.largest >= 1000
    assert donating.largest <= 2


@pytest.mark.parametrize("case", ["sgd", "sgd_momentum", "adamw"])
def test_donating_allocates_less_than_a_kilobyte_kernels_included(case: str) -> None:
    layout = fs.plan({f"{unit}.w": torch.zeros(1001, 257) for unit in "ab"}, fs.init_mesh())
    params, grads = (fs.shard({f"{unit}.w": torch.rand(1001, 257) for unit in "ab"}, layout) for _ in range(2))
    opt = optimizer(case)
    with LiveBytes() as live:
        params, state = opt.step(params, grads=grads, state=opt.init(params))
        live.mark("copying")
        params, state = opt.step(params, grads=grads, state=state)
        live.mark("donating")
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        live.mark("end")
    assert sum(live.allocations("copying", "donating")) >= 2 * 4 * 1001 * 257
    assert sum(live.allocations("donating", "end")) < 1000  # counters and step sizes


def test_a_step_makes_one_torch_optimizer_for_each_set_of_options_however_many_buffers() -> None:
    made: list[int] = []

    class Counted(torch.optim.AdamW):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            made.append(len(self.param_groups))

    given = {f"blocks.{i}.w": torch.ones(3) for i in range(12)}
    layout = fs.plan(given, fs.simulated_mesh(2), labels=lambda name, _: "odd" if int(name[7:-2]) % 2 else None)
    opt = fs.optimizer(Counted, lr=0.1, labels={"odd": {"lr": 0.2}})
    params = fs.shard(given, layout)
    state = opt.init(params)
    made.clear()
    params, _ = opt.step(params, grads=params, state=state)
    assert made == [1, 1]
    whole = fs.gather(params)
    assert len({x.unique().item() for name, x in whole.items() if int(name[7:-2]) % 2}) == 1


@every_case
def test_the_structure_of_state_never_changes(case: str) -> None:
    layout = planned(fs.simulated_mesh(2))
    opt, params = optimizer(case), fs.shard(whole(), layout)
    state = opt.init(params)
    for i in range(2):
        _, new = opt.step(params, grads=sharded_grads(layout, i + 1), state=state)
        assert structure(new) == structure(state)
        state = new


@pytest.mark.parametrize("case", [case for case in CASES if case != "asgd"])
def test_padding_stays_exactly_zero(case: str) -> None:
    layout = planned(fs.simulated_mesh(5))
    params = run(optimizer(case), layout, 3)
    for key, buffer in layout.buffers.items():
        gaps = params[key].flatten().split(buffer.split_sizes)[1::2]
        assert not any(gap.any() for gap in gaps)
    assert any(sum(buffer.split_sizes[1::2]) for buffer in layout.buffers.values())


def test_frozen_and_integer_buffers_pass_through_without_state() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    layout = fs.plan(model, fs.simulated_mesh(2))
    opt, params = fs.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5), fs.shard(model, layout)
    frozen = next(key for key, buffer in layout.buffers.items() if not buffer.trainable)
    state = opt.init(params)
    assert all(frozen not in tree for tree in state.values())
    new, _ = opt.step(params, grads=params, state=state)
    assert new[frozen] is params[frozen]
    assert not torch.equal(fs.gather(new)["weight"], model.weight)


@pytest.mark.parametrize("case", ["sgd_momentum", "adamw"])
def test_none_for_a_gradient_leaves_a_buffer_and_its_state_unchanged(case: str) -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer(case)
    params = fs.shard(whole(), layout)
    start, first = opt.init(params), next(iter(params))
    partly = fs.Sharded({**sharded_grads(layout, 1), first: None}, layout)
    once, state = opt.step(params, grads=partly, state=start)
    twice, state = opt.step(once, grads=sharded_grads(layout, 2), state=state)
    assert torch.equal(once[first], params[first])
    alone, _ = opt.step(params, grads=sharded_grads(layout, 2), state=start)
    assert torch.equal(twice[first], alone[first])


def test_bfloat16_and_empty_buffers_step_as_torch_does() -> None:
    given = {"h": torch.randn(5).bfloat16(), "no.w": torch.zeros(0, 3), "f": torch.randn(3)}
    layout = fs.plan(given, fs.simulated_mesh(2), units=[["h"], ["no.w"], ["f"]])
    opt, params = fs.optimizer(torch.optim.AdamW, lr=0.1), fs.shard(given, layout)
    new, state = opt.step(params, grads=params, state=opt.init(params))
    plain = [x.clone().requires_grad_() for x in given.values()]
    for x in plain:
        x.grad = x.detach().clone()
    torch.optim.AdamW(plain, lr=0.1, fused=True).step()
    assert_trees_close(dict(fs.gather(new)), dict(zip(given, (x.detach() for x in plain), strict=True)))
    assert {x.dtype for x in state["exp_avg"].values()} == {torch.bfloat16, torch.float32}


def test_a_tree_without_trainable_buffers_has_nothing_to_step() -> None:
    layout = fs.plan(FROZEN, fs.simulated_mesh(2))
    opt, params = optimizer("adamw"), fs.shard(FROZEN, layout)
    new, state = opt.step(params, grads=params, state=opt.init(params))
    assert state == {}
    assert_trees_close(new, params)


def test_a_moving_average_is_one_tree_map() -> None:
    layout = planned(fs.simulated_mesh(3))
    params: Any = fs.shard(values(1) | FROZEN, layout)
    average: Any = fs.shard(whole(), layout)
    average = optree.tree_map(lambda a, x: a.lerp(x, 0.25) if a.is_floating_point() else x, average, params)
    assert isinstance(average, fs.Sharded)
    expected = {name: x.lerp(values(1)[name], 0.25) for name, x in values().items()}
    assert_trees_close(fs.gather(average), {**expected, **FROZEN}, rtol=1e-14, atol=1e-14)


MISFITS = [
    ("params", lambda p, g, s: (fs.gather(p), g, s), TypeError, "params: got Full, expected a Sharded"),
    (
        "grads_full",
        lambda p, g, s: (p, fs.gather(p), s),
        TypeError,
        "step: grads: got Full, expected a Sharded",
    ),
    (
        "grads_elsewhere",
        lambda p, g, s: (p, fs.shard(whole(), planned(fs.simulated_mesh(2))), s),
        ValueError,
        r"step: grads have a different layout: shard=2, .*; that of the parameters: shard=3, ",
    ),
    (
        "grads_cut",
        lambda p, g, s: (p, fs.Sharded({k: x if x is None else x[:2] for k, x in g.items()}, g.layout), s),
        ValueError,
        r"step: grads: 3 problems\n  'a': got shape \(2, 7\), torch.float64, expected \(3, 7\).*\n.*'b/float64'",
    ),
    ("state_none", lambda p, g, s: (p, g, None), TypeError, "state: got NoneType, expected what opt.init"),
    ("state_params", lambda p, g, s: (p, g, p), TypeError, "state: got Sharded, expected what opt.init"),
    (
        "state_numbers",
        lambda p, g, s: (p, g, s | {"exp_avg": 3}),
        TypeError,
        "state: 'exp_avg': got int, expected what opt.init",
    ),
    (
        "state_missing",
        lambda p, g, s: (p, g, {"step": s["step"], "exp_avg": {"a": s["exp_avg"]["a"]}}),
        ValueError,
        "step: state: 5 problems\n  'a': 'exp_avg_sq' is missing\n  'b/float64': 'exp_avg' is missing\n(?s:.*)Start",
    ),
    (
        "state_elsewhere",  # torch's fused kernels would write past the end of it
        lambda p, g, s: (p, g, optree.tree_map(lambda x: x[..., :2] if x.ndim > 1 else x, s)),
        ValueError,
        r"step: state: 4 problems\n  'a': 'exp_avg': got shape \(3, 2\), expected \(3, 7\) or \(3,\)",
    ),
]


@pytest.mark.parametrize(("change", "kind", "text"), [case[1:] for case in MISFITS], ids=[case[0] for case in MISFITS])
def test_trees_that_do_not_fit_are_refused_with_all_offenders(change: Any, kind: type[Exception], text: str) -> None:
    layout, opt = planned(fs.simulated_mesh(3)), optimizer("adamw")
    params = fs.shard(whole(), layout)
    args = change(params, sharded_grads(layout, 1), opt.init(params))
    before = copied(args)
    with pytest.raises(kind, match=text):
        stepping(opt, donate=True)(*args)
    assert_trees_close(args, before, rtol=0, atol=0)


@pytest.mark.parametrize("num_trees", [1, 2])
def test_trees_that_are_not_named_are_refused_before_anything_is_written(num_trees: int) -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer("adamw")
    params = fs.shard(whole(), layout)
    grads, state = sharded_grads(layout, 1), opt.init(params)
    before = copied((params, grads, state))
    named = {} if num_trees == 2 else {"state": state}
    text = rf"step: got {num_trees} positional arguments .*Call opt.step\(params, grads=grads, state=state\)"
    step: Any = opt.step
    for args in ((params, grads, state), (grads, params, state)):
        with pytest.raises(TypeError, match=text):
            step(*args[: num_trees + 1], **named, donate=True)
    assert_trees_close((params, grads, state), before, rtol=0, atol=0)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'state'"):
        step(params, grads=grads)


def test_init_refuses_what_is_not_sharded() -> None:
    params = fs.shard(whole(), planned(fs.simulated_mesh(2)))
    with pytest.raises(TypeError, match="init: params: got Full, expected a Sharded"):
        optimizer("adamw").init(fs.gather(params))  # pyright: ignore[reportArgumentType]
