"""The state of whole parameters is with their owners; it is saved, loaded and resharded as any other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import functorch_shard as fs
from functorch_shard.layout.layout import select_buffers
from functorch_shard.testing import assert_trees_close
from tests.support.matrix import CASES, REST, assert_unsharded, is_whole, optimizer, planned, trained, values
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
AXES: list[Any] = [3, HYBRID]
MOVED = ["adafactor", "soap", "counts_in_groups"]


def halfway(mesh: fs.Mesh, case: str) -> tuple[fs.Sharded, Any]:
    opt, params = optimizer(case), fs.shard(values(), planned(mesh))
    return trained(params, opt.init(params), opt, range(2))


def finished(params: fs.Sharded, state: Any, case: str) -> fs.Full:
    params, _ = trained(params, state, optimizer(case), range(2, 5))
    return fs.gather(params, lazy=False)


def test_every_parameter_has_its_state_in_its_own_shape_at_one_rank() -> None:
    params, state = halfway(fs.simulated_mesh(3), "adafactor")
    rows, columns = state["row_var"].layout, state["col_var"].layout
    for name, slot in rows.slots.items():
        shape = params.layout.slots[name].shape
        assert (slot.shape, columns.slots[name].shape) == ((shape[0], 1), (1, shape[1]))
        assert len([rank for rank in range(3) for part in rows.slices(rank) if part.name == name]) == 1
    for name, x in fs.gather(state["row_var"]).items():
        assert x.shape == rows.slots[name].shape


def test_state_is_gathered_whole_where_the_first_owner_has_none_of_it() -> None:
    mesh, start = fs.simulated_mesh(2), {"a.w": torch.ones(5, 7), "b.w": torch.ones(7, 3), "b.b": torch.ones(3)}
    params, opt = fs.shard(start, fs.plan(start, mesh)), fs.optimizer(torch.optim.Adafactor, whole=True)
    _, state = mesh.spmd(lambda p, state: opt.step(p, grads=p, state=state))(params, opt.init(params))
    assert [b.slots[0].offset > 0 for b in state["variance"].layout.buffers.values()] == [True]
    assert fs.gather(state["variance"])["b.b"].shape == (3,)
    assert fs.debug.digests({"optim": state})["optim.state.b.b.variance"]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("case", MOVED)
def test_training_goes_on_after_a_move_to_other_ranks_and_units(case: str, axes: Any) -> None:
    params, state = halfway(fs.simulated_mesh(2), case)
    layout = planned(fs.simulated_mesh(axes), units=40)
    moved = fs.reshard(params, layout)
    state = {name: fs.reshard(state[name], like.layout) for name, like in optimizer(case).init(moved).items()}
    assert_unsharded(finished(moved, state, case), case)


def saved(mesh: fs.Mesh, case: str, path: str) -> None:
    params, state = halfway(mesh, case)
    fs.checkpoint.save(path, {"model": params, "optim": optimizer(case).state_dict(state, params)})


def loaded(mesh: fs.Mesh, case: str, path: str) -> fs.Full:
    like = fs.shard(values(9), planned(mesh, units=40))
    tree = fs.checkpoint.load(path, {"model": like, "optim": {"state": optimizer(case).init(like)}})
    return finished(tree["model"], tree["optim"]["state"], case)


BETWEEN = [*zip([*simulated(2), *gloo(HYBRID)], [*gloo(2), *simulated(3)], strict=True)]


@pytest.mark.parametrize(("first", "then"), BETWEEN, ids=str)
@pytest.mark.parametrize("case", ["adafactor", "soap"])
def test_what_some_ranks_saved_is_loaded_by_any_others(case: str, first: Ranks, then: Ranks, tmp_path: Path) -> None:
    first.run(saved, case, str(tmp_path / "halfway"))
    for full in then.run(loaded, case, str(tmp_path / "halfway")):
        assert_unsharded(full, case)


class _Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, x in values().items():
            unit, _, own = name.partition(".")
            if not hasattr(self, unit):
                self.add_module(unit, torch.nn.Module())
            self.get_submodule(unit).register_parameter(own, torch.nn.Parameter(x))


@pytest.mark.parametrize("case", ["adafactor"])
def test_the_checkpoint_of_a_plain_program_is_loaded_by_owners(case: str, tmp_path: Path) -> None:
    model, (cls, options) = _Plain(), CASES[case]
    both = [[x for name, x in model.named_parameters() if is_whole(name) == whole] for whole in (True, False)]
    optimizers: list[Any] = [cls(both[0], **options), torch.optim.AdamW(both[1], **REST)]
    for i in range(2):
        for name, x in model.named_parameters():
            x.grad = values(i + 1)[name]
        for each in optimizers:
            each.step()
    state = get_optimizer_state_dict(model, optimizers)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert_unsharded(loaded(fs.simulated_mesh(3), case, str(tmp_path / "plain")), case)


@pytest.mark.parametrize("case", ["muon"])
def test_a_plain_program_reads_the_state_of_owners(case: str, tmp_path: Path) -> None:
    params, state = halfway(fs.simulated_mesh(3), case)
    fs.checkpoint.save(tmp_path / "ours", {"model": params, "optim": optimizer(case).state_dict(state, params)})
    names = [name for name in state if "(owners)" in state[name]]
    whole = {name: fs.gather(_of_owners(state[name])) for name in names}
    like = {slot: {name: torch.zeros_like(whole[name][slot]) for name in names} for slot in values() if is_whole(slot)}
    dcp.load({"optim": {"state": like}}, checkpoint_id=tmp_path / "ours", no_dist=True)
    for slot, of_slot in like.items():
        assert_trees_close(of_slot, {name: whole[name][slot] for name in names}, rtol=0, atol=0)


def _of_owners(tree: fs.Sharded) -> fs.Sharded:
    layout = select_buffers(tree.layout, {key: key == "(owners)" for key in tree.layout.buffers})
    return fs.Sharded({"(owners)": tree["(owners)"]}, layout)


def test_state_and_optimizer_are_pickled() -> None:
    params, state = halfway(fs.simulated_mesh(2), "soap")
    opt = optimizer("soap")
    opt.init(params)
    opt, params, state = pickle.loads(pickle.dumps((opt, params, state)))
    mesh = fs.simulated_mesh(2)
    params, state = params.on(mesh), {name: tree.on(mesh) for name, tree in state.items()}
    assert_unsharded(finished(params, state, "soap"), "soap")


def with_frozen(mesh: fs.Mesh) -> tuple[fs.Sharded, Any]:
    """A step while ``c.w`` is frozen."""
    source = {name: torch.nn.Parameter(x, requires_grad=name != "c.w") for name, x in values().items()}
    layout = fs.plan(source, mesh, labels=lambda name, x: None if is_whole(name) else "rest")
    params, shards, opt = fs.shard(source, layout), fs.shard(values(1), layout), optimizer("muon")
    grads = {key: x if layout.buffers[key].trainable else None for key, x in shards.items()}
    return opt.step(params, grads=fs.Sharded(grads, layout), state=opt.init(params))


def test_state_of_other_owners_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    params, opt = fs.shard(values(), planned(mesh)), optimizer("muon")
    state, (_, other) = opt.init(params), with_frozen(mesh)
    text = r"'momentum_buffer' was sharded for other owners(?s:.*)fs.reshard\(state\[name\]"
    with pytest.raises(ValueError, match=text):
        opt.step(params, grads=params, state={**state, "momentum_buffer": other["momentum_buffer"]})
    adams = {name: tree for name, tree in state.items() if name != "momentum_buffer"}
    with pytest.raises(ValueError, match="'momentum_buffer' is missing"):
        opt.step(params, grads=params, state=adams)
