"""Accepted optimizers train as without shards; others are refused, with the reason."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support import homemade
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.steps import copied, planned, sharded_grads, structure, tensors, values, whole

ADVICE = r"Pass whole=True: then one rank updates each parameter as a whole\.$"
BY_HAND = r"Gather what it needs, update whole tensors, and shard\(\) the result\.$"
NOT_EVEN_WHOLE = (torch.optim.LBFGS, homemade.HasModes, homemade.ChangesItsRate)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.LBFGS, {}, "its step needs closure, and here a step gets gradients and no loss"),
    (
        torch.optim.Adafactor,
        {},
        r"its state cannot be sharded like its parameter: 'row_var' is a Tensor of shape",
    ),
    (torch.optim.Muon, {}, r"its step fails on dense tensors of some shapes, 1-D included .*only supports 2D"),
    (torch.optim.SparseAdam, {}, "its step fails on dense tensors .*does not support dense gradients"),
    (homemade.HasModes, {}, "it has a train mode and an eval mode with different parameters"),
    (homemade.TrustRatio, {}, r"its update of one element depends on others \(it calls linalg_vector_norm\)"),
    (homemade.Compiled, {}, r"its update of one element depends on others \(it calls linalg_vector_norm\)"),
    (homemade.Cautious, {"caution": True}, r"its update of one element depends on others \(it calls mean\)"),
    (
        homemade.Projected,
        {},
        r"its update of one element depends on others \(it calls sum, .*linalg_vector_norm\)",
    ),
    (homemade.Estimates, {}, r"its update of one element depends on others \(it calls sum\)"),
    (
        homemade.EstimatesByHand,
        {},
        "it keeps 'd' in its parameter groups, and shards compute another value",
    ),
    (
        homemade.CountsParameters,
        {},
        "it keeps 'count' in its parameter groups, and shards compute another value",
    ),
    (
        homemade.ByShape,
        {},
        "its update of one element depends on others, or on the shape or size of the tensor",
    ),
    (
        homemade.FlipsMatrices,
        {},
        "its update of one element depends on others, or on the shape or size of the tensor",
    ),
    (homemade.BySize, {}, "its update of one element depends on others, or on the shape or size of the tensor"),
    (homemade.InBlocks, {}, r"'scales' is a Tensor of shape \(82,\) for a parameter of shape \(160, 130\)"),
    (homemade.Lists, {}, r"'momentums' is a list for a parameter of shape"),
    (homemade.FromTheFirst, {}, "it is not a pure function .*creates its state from the first gradient"),
    (homemade.OnItself, {}, "it is not a pure function .*stores something outside"),
    (homemade.ChangesItsRate, {}, r"it changes its own options \(lr\), and here options are arguments"),
]


@pytest.mark.parametrize("rate", [0.1, 0.0, 1e-6])
@pytest.mark.parametrize(("cls", "options", "text"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_a_class_that_a_shard_is_not_enough_for_is_refused_with_its_reason(
    cls: Any, options: dict[str, Any], text: str, rate: float
) -> None:
    advice = BY_HAND if cls in NOT_EVEN_WHOLE else ADVICE
    with pytest.raises(TypeError, match=rf"optimizer: {cls.__name__} cannot update shards: .*{text}(?s:.*){advice}"):
        fs.optimizer(cls, lr=rate, **options)
    with pytest.raises(TypeError, match=text):
        fs.optimizer(cls, lr=rate, labels={"other": options}, **options)


def test_classes_that_are_not_optimizers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"cls: got <class .*Linear'>, expected a class such as torch.optim.AdamW"):
        fs.optimizer(torch.nn.Linear)  # pyright: ignore[reportArgumentType]


ACCEPTED: list[tuple[Any, dict[str, Any], set[str]]] = [
    (homemade.Averaged, {}, {"step", "mean"}),
    (homemade.CountsSteps, {}, {"mean", "group.step"}),
    (homemade.HalvesItsRate, {}, {"mean", "group.step", "group.scale", "group.warm"}),
    (homemade.Cautious, {}, {"mean"}),
    (homemade.WritesGradients, {}, set()),
    (homemade.WritesData, {}, {"mean"}),
    (homemade.KeepsAnOption, {"maximize": True}, set()),
]
every_accepted = pytest.mark.parametrize(
    ("cls", "options", "names"), ACCEPTED, ids=[case[0].__name__ for case in ACCEPTED]
)


def by_itself(cls: Any, num_steps: int, **options: Any) -> dict[str, Tensor]:
    params = {name: x.requires_grad_() for name, x in values().items()}
    reference = cls(params.values(), **options)
    for i in range(num_steps):
        for name, grad in values(i + 1).items():
            params[name].grad = grad
        reference.step()
    return {name: x.detach() for name, x in params.items()}


def trained(mesh: fs.Mesh, cls: Any, options: dict[str, Any], num_steps: int, donate: bool = False) -> fs.Sharded:
    opt, layout = fs.optimizer(cls, lr=0.1, **options), planned(mesh)
    params = fs.shard(whole(), layout)
    state = mesh.spmd(opt.init)(params)
    step = mesh.spmd(lambda params, grads, state: opt.step(params, grads=grads, state=state, donate=donate))
    for i in range(num_steps):
        params, state = step(params, sharded_grads(layout, i + 1), state)
    return params


def assert_trains_as_by_itself(mesh: fs.Mesh, cls: Any, options: dict[str, Any], donate: bool) -> None:
    params = fs.gather(trained(mesh, cls, options, 7, donate), lazy=False)
    expected = by_itself(cls, 7, lr=0.1, **options)
    assert_trees_close({name: params[name] for name in expected}, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ranks", [*simulated(1, 3, HYBRID), *gloo(3)], ids=str)
@pytest.mark.parametrize("donate", [False, True])
@every_accepted
def test_what_is_accepted_trains_as_it_does_by_itself(
    cls: Any, options: dict[str, Any], names: set[str], donate: bool, ranks: Ranks
) -> None:
    ranks.run(assert_trains_as_by_itself, cls, options, donate)


@pytest.mark.parametrize("ranks", gloo(3), ids=str)
@every_accepted
def test_what_is_accepted_trains_on_gloo_ranks_as_on_simulated_ones(
    cls: Any, options: dict[str, Any], names: set[str], ranks: Ranks
) -> None:
    expected = ranks.simulated.run(trained, cls, options, 4)
    assert_trees_close(ranks.run(trained, cls, options, 4), expected, rtol=1e-13, atol=1e-14)


@every_accepted
def test_what_a_class_keeps_is_state_and_nothing_else_is_written_to(
    cls: Any, options: dict[str, Any], names: set[str]
) -> None:
    layout = planned(fs.simulated_mesh(2))
    opt, params = fs.optimizer(cls, lr=0.1, **options), fs.shard(whole(), layout)
    before = copied(params)
    state = opt.init(params)
    assert_trees_close(params, before, rtol=0, atol=0)
    assert set(state) == names
    for i in range(2):
        inputs = params, sharded_grads(layout, i + 1), state
        before = copied(inputs)
        params, new = opt.step(params, grads=inputs[1], state=state)
        assert_trees_close(inputs, before, rtol=0, atol=0)
        assert i == 0 or structure(new) == structure(state)
        state = new


def test_gradients_are_left_as_they_are_by_a_donated_step_too() -> None:
    layout = planned(fs.simulated_mesh(2))
    opt, params = fs.optimizer(homemade.WritesGradients, lr=0.1), fs.shard(whole(), layout)
    grads = sharded_grads(layout, 1)
    before = copied(grads)
    opt.step(params, grads=grads, state=opt.init(params), donate=True)
    assert_trees_close(grads, before, rtol=0, atol=0)


def test_numbers_of_a_group_are_tensors_that_are_selected_saved_and_moved_like_all_state(tmp_path: Any) -> None:
    mesh = fs.simulated_mesh(2)
    layout, opt = planned(mesh), fs.optimizer(homemade.HalvesItsRate, lr=0.1)
    params = fs.shard(whole(), layout)
    old = opt.step(params, grads=sharded_grads(layout, 1), state=opt.init(params))
    new = opt.step(old[0], grads=sharded_grads(layout, 2), state=old[1])
    kept = fs.LossScale.static(1.0).select(torch.tensor([False, False]), new, old)
    assert_trees_close(kept, old, rtol=0, atol=0)
    assert {int(x[0]) for x in kept[1]["group.step"].values()} == {1}
    described = opt.state_dict(new[1], new[0])
    assert {"step": 2, "scale": 0.25, "warm": False}.items() <= described["param_groups"][0].items()
    fs.checkpoint.save(tmp_path / "there", {"model": new[0], "optim": described})
    other = planned(fs.simulated_mesh(3))
    moved = fs.reshard(new, other)
    template: Any = {"model": moved[0], "optim": {"state": moved[1]}}
    template = optree.tree_map(torch.zeros_like, template)
    loaded = fs.checkpoint.load(tmp_path / "there", template)
    assert_trees_close((loaded["model"], loaded["optim"]["state"]), moved, rtol=0, atol=0)
    third = opt.step(moved[0], grads=sharded_grads(other, 3), state=moved[1])[0]
    expected = by_itself(homemade.HalvesItsRate, 3, lr=0.1)
    assert_trees_close({k: x for k, x in fs.gather(third).items() if k in expected}, expected, rtol=1e-12, atol=1e-13)


def test_an_ensemble_out_of_step_has_numbers_of_its_own() -> None:
    layout, opt = fs.plan(values(), fs.simulated_mesh(2)), fs.optimizer(homemade.CountsSteps, lr=0.1)
    members = []
    for seed, num_steps in enumerate((1, 3)):
        params = fs.shard(values(seed), layout)
        state = opt.init(params)
        for i in range(num_steps):
            params, state = opt.step(params, grads=fs.shard(values(10 * seed + i), layout), state=state)
        members.append((params, fs.shard(values(10 * seed + 9), layout), state))

    def step(params: Any, grads: Any, state: Any) -> Any:
        return opt.step(params, grads=grads, state=state)

    def stacked(*trees: Any) -> Any:
        return optree.tree_map(lambda *xs: torch.stack(xs), *trees)

    expected = stacked(*(step(*one) for one in members))
    assert_trees_close(torch.func.vmap(step)(*stacked(*members)), expected, rtol=1e-12, atol=1e-13)


def test_an_option_of_one_step_is_probed_as_those_of_the_optimizer_are() -> None:
    layout = planned(fs.simulated_mesh(2))
    params = fs.shard(whole(), layout)
    opt = fs.optimizer(homemade.Cautious, lr=0.1)
    state, grads = opt.init(params), sharded_grads(layout, 1)
    with pytest.raises(TypeError, match="Cautious cannot update shards: its update of one element depends on others"):
        opt.step(params, grads=grads, state=state, caution=True)
    opt.step(params, grads=grads, state=state, lr=0.0)


def test_a_probe_draws_no_random_numbers_and_works_wherever_an_optimizer_is_made() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    mesh = fs.simulated_mesh(2)
    with torch.device("meta"), torch.inference_mode():
        fs.optimizer(homemade.CountsSteps, lr=0.25)
    made = []
    mesh.spmd(lambda x: made.append(fs.optimizer(homemade.CountsSteps, lr=0.125)) or x)(torch.ones(2))
    torch.func.grad(lambda x: made.append(fs.optimizer(homemade.CountsSteps, lr=0.0625)) or x)(torch.ones(()))
    assert torch.equal(torch.rand(3), expected)
    assert len(made) == 2
    with pytest.raises(TypeError, match="FlipsMatrices cannot update shards"), torch.device("meta"):
        fs.optimizer(homemade.FlipsMatrices, lr=0.1)


def test_state_that_appears_late_is_there_from_the_start() -> None:
    class Lookahead(homemade.Base):
        def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if not state:
                state["count"] = 0
            state["count"] += 1
            param.sub_(group["lr"] * grad)
            if state["count"] % 6 == 0:
                slow = state.setdefault("slow", torch.zeros_like(param))
                param.copy_(slow.lerp_(param, 0.5))

    params = fs.shard(whole(), planned(fs.simulated_mesh(2)))
    state = fs.optimizer(Lookahead, lr=0.1).init(params)
    assert set(state) == {"count", "slow"}
    assert not tensors(state["slow"])
    assert_trains_as_by_itself(fs.simulated_mesh(3), Lookahead, {}, donate=False)
