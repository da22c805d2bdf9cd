"""One digest of the same values on any ranks, another one of any other bits; and two runs are compared by digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.checkpoint import digest, save
from functorch_shard.cli.main import main as command
from functorch_shard.debug import digests, first_difference
from tests.support.pool import run_ranks
from tests.support.refusals import refused

NAN = torch.tensor([0x7FC00001, 0x7FC00000], dtype=torch.int32).view(torch.float32)  # two NaNs, of other bits
VALUES = {
    "a.w": torch.arange(15.0).view(3, 5),
    "a.b": NAN,
    "b.half": torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "b.bytes": torch.tensor([[1.5, -0.0]]).to(torch.float8_e5m2),
    "b.complex": torch.tensor(1 + 2j),
    "b.mask": torch.tensor([True, False, True]),
    "b.none": torch.zeros(0, 3),
}


def planned(axes: Any, **options: Any) -> fs.Layout:
    return fs.plan(VALUES | {"tied": VALUES["a.w"]}, fs.simulated_mesh(axes), **options)


def tree_of(layout: fs.Layout, values: dict[str, Tensor] | None = None, **more: Any) -> dict[str, Any]:
    params, grads = (fs.shard({**(values or VALUES)}, layout) for _ in range(2))
    low = fs.Sharded({key: x.double() if x.dtype == torch.float32 else x for key, x in grads.items()}, layout)
    plain = {"step": 7, "sets": [{"b", "a", "c"}, None], "rng": torch.get_rng_state(), **more}
    return {"model": params, "optim": {"state": {"moment": low}}, **plain}


def by_hand(x: Tensor) -> str:
    elements = bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}\n".encode() + elements).hexdigest()


LAYOUTS = [(1, {}), (3, {"align_bytes": 0}), ({"replicate": 2, "shard": 2}, {"units": 8, "ignored": ["a.b", "b.none"]})]


@pytest.mark.parametrize(("axes", "options"), LAYOUTS)
def test_the_digest_of_a_tree_is_that_of_its_files_and_of_whole_values(tmp_path: Path, axes: Any, options: Any) -> None:
    tree = tree_of(planned(axes, **options))
    save(tmp_path / "x", tree)
    found = digests(tree)
    assert found == digests(tmp_path / "x")
    assert {name: found[f"model.{name}"] for name in VALUES} == {name: by_hand(x) for name, x in VALUES.items()}
    assert found["model.tied"] == found["model.a.w"]
    assert found["optim.state.a.w.moment"] == by_hand(VALUES["a.w"].double())
    assert digest(tree) == digest(tmp_path / "x") == digest(tree_of(planned(5)))


def test_padding_has_no_digest_and_any_other_bit_has() -> None:
    layout = planned(4)
    tree = tree_of(layout)
    expected, key = digest(tree), layout.key_of["b.half"]
    assert layout.buffers[key].numel > layout.buffers[key].parameter_numel
    tree["model"][key][-1, -1] = 3.0
    assert digest(tree) == expected
    zero, nan = VALUES["a.w"].clone(), VALUES["a.b"].flip(0)
    zero[0, 0] = -0.0
    others = [{**VALUES, "a.w": zero}, {**VALUES, "a.b": nan}]
    plain: list[dict[str, Any]] = [{}, {"step": 7.0}, {"step": "7"}, {"x": None}, {"x": (1, [2])}, {"x": [1, [2]]}]
    made = [digest(tree_of(layout, values)) for values in others] + [digest(tree_of(layout, **more)) for more in plain]
    assert len({*made}) == len(made)
    assert digest({"w": torch.zeros(2, 3)}) != digest({"w": torch.zeros(3, 2)})
    assert digest({"w": torch.zeros(2)}) != digest({"w": torch.zeros(2, dtype=torch.int32)})
    assert digest({"w": torch.ones(2)}) != digest({"v": torch.ones(2)})
    assert "w: got a ndarray, which save does not take" in refused(digest, {"w": np.zeros(2000)})


def test_the_command_prints_one_line_or_one_for_each_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tree_of(planned(3))
    save(tmp_path / "x", tree)
    assert command(["digest", str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out == f"{digest(tree)}\n"
    assert command(["digest", str(tmp_path / "x"), "--leaves"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{made}  {name}" for name, made in sorted(digests(tree).items())]
    assert command(["digest", str(tmp_path)]) == 1
    assert "Call it outside" in refused(planned(2).mesh.spmd(lambda p: digest(p)), tree_of(planned(2))["model"])


BUG = (3, 1, "2", "2.weight")  # at this step on this rank, in the gradient of a parameter of a unit


def trained(bug: bool) -> tuple[list[str], list[Any]]:
    """Lines of JSON, one for each step, and what one record sends."""
    mesh, lines, sent = fs.init_mesh(), [], []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    layout, opt = fs.plan(model, mesh), fs.optimizer(torch.optim.AdamW, lr=0.1)
    params = fs.shard(model, layout)
    state, data = opt.init(params), torch.Generator().manual_seed(mesh.rank)
    for step in range(6):
        x = torch.randn(7, 5, generator=data)
        grads = fs.grad(lambda p, x: F.mse_loss(fs.bind(model, fs.gather(p))(x), x))(params, x)
        if bug and (step, mesh.rank) == BUG[:2]:
            (part,) = [part for part in layout.slices(mesh.rank) if part.name == BUG[3]]
            grads[BUG[2]][part.offset] *= 1 + 2**-20
        params, state = opt.step(params, grads=grads, state=state)
        with fs.testing.count_collectives() as issued:
            made = digests({"grads": grads, "model": params, "optim": {"state": state}})
        lines.append(json.dumps({"step": step, "digests": made}))
        sent = [issued.by_kind, issued.nbytes("all_gather"), sum(x.nbytes for x in params.values())]
    return lines, sent


def test_a_bug_on_one_rank_is_found_to_its_step_unit_and_parameter() -> None:
    good, bad = (run_ranks(trained, 2, bug) for bug in (False, True))
    layout = fs.plan(nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))), fs.simulated_mesh(3))
    for (right, [kinds, sent, held]), (wrong, _) in zip(good, bad, strict=True):
        assert (right, wrong) == (good[0][0], bad[0][0]), "ranks record the same"
        assert first_difference(map(json.loads, right), map(json.loads, right)) is None
        found = first_difference(map(json.loads, right), map(json.loads, wrong), layout)
        assert found is not None
        assert (found.step, found.unit, found.parameter) == (BUG[0], *BUG[2:])
        names = "grads.2.weight", "model.2.weight", "optim.state.2.weight.exp_avg", "optim.state.2.weight.exp_avg_sq"
        assert {*found.names} <= {*names}
        assert str(found).startswith("step 3: 'grads.2.weight', parameter '2.weight' of unit '2', and ")
        assert str(found).endswith("equal at step 2")
        assert (dict(kinds), sent) == ({"all_gather": 4 * len(layout.units)}, 4 * held), "each tree is gathered once"


def test_steps_of_one_run_alone_are_left_out_and_names_of_one_alone_differ() -> None:
    run = [{"step": step, "digests": {"w": str(step)}} for step in range(6)]
    assert first_difference(run, run[1::2]) is None
    found = first_difference(run[::2], [*run[:4], {"step": 4, "digests": {"w": "4", "loss": "0"}}])
    assert found is not None
    assert (found.step, found.before, found.names, found.unit) == (4, 2, ("loss",), None)
    assert "no step is in both runs" in refused(first_difference, run[:2], run[2:])
