"""The optimizer is the stock class on shards: the same numbers, without writing to its inputs."""

from __future__ import annotations

from itertools import product
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.live_bytes import LiveBytes
from tests.support.steps import (
    CASES,
    assert_equal_stock,
    by_shards,
    by_torch,
    copied,
    optimizer,
    padding_of,
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


@every_case
def test_steps_equal_the_stock_optimizer_stacked_inside_spmd_and_on_a_real_rank(case: str) -> None:
    expected, hybrid = stock(case), fs.simulated_mesh({"replicate": 2, "shard": 3})
    params = run(optimizer(case), planned(fs.simulated_mesh(5)))
    assert_equal_stock(params, expected)
    assert padding_of(params)
    assert not any(map(torch.any, padding_of(params)))  # exactly zero
    assert_equal_stock(run(optimizer(case), planned(hybrid), wrap=hybrid.spmd), expected)
    assert_equal_stock(run(optimizer(case), planned(fs.init_mesh())), expected)


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"whole": True}], ids=["chosen", "foreach", "whole"])
@pytest.mark.parametrize("case", ["sgd_nesterov", "adamw", "rprop", "asgd"])
def test_a_step_never_writes_to_its_inputs_and_the_structure_of_state_never_changes(
    case: str, implementation: dict[str, Any]
) -> None:
    layout, (cls, options) = planned(fs.simulated_mesh(3)), CASES[case]
    opt, params = fs.optimizer(cls, **{**options, **implementation}), fs.shard(whole(), layout)
    state = opt.init(params)
    for i in range(2):
        inputs = params, sharded_grads(layout, i + 1), state
        before, versions = copied(inputs), [x._version for x in tensors(inputs)]
        params, state = stepping(opt)(*inputs)
        assert_trees_close(inputs, before, rtol=0, atol=0)
        assert [x._version for x in tensors(inputs)] == versions
        assert structure(state) == structure(inputs[2])


@pytest.mark.parametrize(("case", "owners"), [*product(CASES, [False]), *product(["sgd_momentum", "adamw"], [True])])
def test_donating_gives_the_same_numbers_in_place(case: str, owners: bool) -> None:
    mesh = fs.simulated_mesh(2)
    layout, opt = planned(mesh), optimizer(case, whole=owners)
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


def _laid(tree: Any) -> Any:
    """The same values, but the rows share the memory of the first: what a reduction over replicas returns."""
    return optree.tree_map(lambda x: x[:1].clone().expand_as(x) if x.ndim == 3 and x.numel() else x, tree)


@pytest.mark.parametrize("case", ["sgd_nesterov", "adamw", "rmsprop"])
def test_strides_of_tensors_change_nothing(case: str) -> None:
    layout, opt = planned(fs.simulated_mesh({"replicate": 2, "shard": 3})), optimizer(case)
    as_it_is: Any = lambda tree: tree  # noqa: E731
    for of_grads, donate in product((False, True), (False, True)):
        ours, theirs = (as_it_is, _laid) if of_grads else (_laid, as_it_is)  # among leaves that are contiguous
        params = fs.shard(whole(), layout)
        expected = params, opt.init(params)
        actual = copied(expected)
        for i in range(3):
            grads = sharded_grads(layout, i + 1)
            expected = opt.step(expected[0], grads=grads, state=expected[1])
            actual = opt.step(ours(actual[0]), grads=theirs(grads), state=ours(actual[1]), donate=donate)
            # a vectorized kernel fuses a product and a sum where an odd element at the end is not: an ulp
            assert_trees_close(actual, expected, rtol=1e-13, atol=1e-14)


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


@pytest.mark.parametrize("owners", [False, True])
@pytest.mark.parametrize("case", ["sgd_momentum", "adamw"])
def test_none_for_a_gradient_leaves_a_buffer_and_its_state_unchanged(case: str, owners: bool) -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer(case, whole=owners)
    params = fs.shard(whole(), layout)
    start, first = opt.init(params), next(iter(params))
    partly = fs.Sharded({**sharded_grads(layout, 1), first: None}, layout)
    once, state = opt.step(params, grads=partly, state=start)
    twice, state = opt.step(once, grads=sharded_grads(layout, 2), state=state)
    assert torch.equal(once[first], params[first])
    alone, _ = opt.step(params, grads=sharded_grads(layout, 2), state=start)
    assert torch.equal(twice[first], alone[first])


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
BY_LOOP: dict[str, Any] = {"momentum": 0.9, "foreach": False}


@pytest.mark.parametrize(
    ("cls", "options", "dtype"),
    [(SGD, BY_LOOP, torch.bfloat16), (SGD, BY_LOOP, torch.float16), (ADAMW, {"fused": True}, torch.bfloat16)],
)
def test_steps_in_half_precision_are_torchs_without_its_fused_kernel_of_sgd(
    cls: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        return {"w": torch.randn(37, generator=torch.Generator().manual_seed(seed)).to(dtype)}

    chosen = {name: x for name, x in options.items() if name == "momentum"}
    found = by_shards(fs.optimizer(cls, lr=0.1, **chosen), fs.init_mesh(), drawn, 3)
    assert_trees_close(found, by_torch(drawn, 3, (cls, ["w"], {"lr": 0.1, **options})), rtol=0, atol=0)


MISFITS: dict[str, tuple[Any, str]] = {
    "grads_elsewhere": (
        lambda p, g, s: (p, fs.shard(whole(), planned(fs.simulated_mesh(2))), s),
        r"step: grads have a different layout: Layout\(.*shard=2\); that of the parameters: Layout\(.*shard=3\)",
    ),
    "state_missing": (
        lambda p, g, s: (p, g, {"step": s["step"], "exp_avg": fs.Sharded({"a": s["exp_avg"]["a"]}, p.layout)}),
        "step: state: 5 problems\n  'a': 'exp_avg_sq' is missing\n(?s:.*)'b/float64': 'exp_avg' is missing",
    ),
    "state_elsewhere": (  # torch's fused kernels would write past the end of it
        lambda p, g, s: (p, g, optree.tree_map(lambda x: x[..., :2] if x.ndim > 1 else x, s)),
        r"step: state: 4 problems\n  'a': 'exp_avg': got shape \(3, 2\), expected \(3, 7\) or \(3,\)",
    ),
}


@pytest.mark.parametrize(("change", "text"), MISFITS.values(), ids=MISFITS)
def test_trees_that_do_not_fit_are_refused_with_all_offenders(change: Any, text: str) -> None:
    layout, opt = planned(fs.simulated_mesh(3)), optimizer("adamw")
    params = fs.shard(whole(), layout)
    args = change(params, sharded_grads(layout, 1), opt.init(params))
    before = copied(args)
    with pytest.raises(ValueError, match=text):
        stepping(opt, donate=True)(*args)
    assert_trees_close(args, before, rtol=0, atol=0)


def test_the_derivative_of_a_step_is_refused_and_never_zero() -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer("adamw")
    params, grads = fs.shard(whole(), layout), sharded_grads(layout, 1)

    def after(x: Tensor) -> Tensor:
        new, _ = opt.step(fs.Sharded({**params, "a": x}, layout), grads=grads, state=opt.init(params))
        return new["a"].sum()

    tracked = params["a"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"updates have no derivative.*torchopt"):
        torch.func.grad(after)(params["a"])
    with pytest.raises(NotImplementedError, match="updates have no derivative"):
        after(tracked).backward()
    with pytest.raises(NotImplementedError, match="updates have no derivative"):
        torch.func.jvp(after, (params["a"],), (params["a"],))
    assert not after(tracked.detach()).requires_grad


def stacked(*trees: Any) -> Any:
    return optree.tree_map(lambda *xs: torch.stack(xs), *trees)


def member(opt: fs.Optimizer, layout: fs.Layout, seed: int) -> tuple[fs.Sharded, fs.Sharded, Any]:
    """One of an ensemble, after some steps: parameters, the next gradients, state."""
    params = fs.shard(values(seed), layout)
    state = opt.init(params)
    for i in range(2):
        params, state = opt.step(params, grads=fs.shard(values(10 * seed + i), layout), state=state)
    return params, fs.shard(values(10 * seed + 9), layout), state


@pytest.mark.parametrize(
    ("case", "where"), [("adamw", "stacked"), ("asgd", "inside_spmd"), ("sgd_momentum", "owners_inside_spmd")]
)
def test_vmap_over_an_ensemble_equals_a_loop(case: str, where: str) -> None:
    mesh = fs.simulated_mesh(2)
    layout, opt = fs.plan(values(), mesh), optimizer(case, whole="owners" in where)
    members = [member(opt, layout, seed) for seed in (1, 2, 3)]
    step: Any = torch.func.vmap(stepping(opt))
    if "inside_spmd" in where:
        step = mesh.spmd(torch.func.vmap(stepping(opt)), in_dims=1, out_dims=1)
    expected = stacked(*(stepping(opt)(*one) for one in members))
    with count_collectives() as seen:
        assert_trees_close(step(*stacked(*members)), expected, rtol=1e-12, atol=1e-13)
    assert seen.total == (2 if "owners" in where else 0)  # one message there, and one back


@pytest.mark.parametrize("donate", [False, True])
def test_what_has_no_batch_dim_is_not_shared_by_the_rows(donate: bool) -> None:
    layout, opt = fs.plan(values(), fs.simulated_mesh(2)), optimizer("adamw")
    params, grads = fs.shard(values(), layout), [fs.shard(values(i), layout) for i in (1, 2)]
    state = opt.init(params)
    expected = stacked(*(opt.step(params, grads=one, state=state) for one in grads))
    both = torch.func.vmap(lambda grads: opt.step(params, grads=grads, state=state, donate=donate))(stacked(*grads))
    assert_trees_close(both, expected, rtol=1e-12, atol=1e-13)
