"""One digest of the same values on any ranks, another one of any other bits; and two runs are compared by digests."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.checkpoint import digest, save
from functorch_shard.cli.main import main as command
from functorch_shard.debug import digests, first_difference
from tests.support.refusals import refused
from tests.support.scripts import example

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
def test_the_digest_of_a_tree_is_that_of_its_files_and_of_whole_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], axes: Any, options: Any
) -> None:
    tree = tree_of(planned(axes, **options))
    save(tmp_path / "x", tree)
    found = digests(tree)
    assert found == digests(tmp_path / "x")
    assert {name: found[f"model.{name}"] for name in VALUES} == {name: by_hand(x) for name, x in VALUES.items()}
    assert found["model.tied"] == found["model.a.w"]
    assert found["optim.state.a.w.moment"] == by_hand(VALUES["a.w"].double())
    assert digest(tree) == digest(tmp_path / "x") == digest(tree_of(planned(5)))
    assert command(["digest", str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out == f"{digest(tree)}\n"


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
    with pytest.raises(pickle.UnpicklingError):  # the repr of an array has some of its elements
        digest({"w": np.zeros(2000)})
    assert "Call it outside" in refused(layout.mesh.spmd(lambda p: digest(p)), tree["model"])


def test_a_wrong_bit_of_one_rank_is_found_to_its_step_unit_and_parameter() -> None:
    """Of a program whose digests are the same on any number of ranks."""
    program, meshes = example("same_bits"), (fs.simulated_mesh(n, kind="sequential") for n in (1, 2, 2))
    one, two, wrong = (
        program.train(mesh, 3, bug)["records"] for mesh, bug in zip(meshes, (None, None, 1), strict=True)
    )
    lines = [json.dumps(record) for record in wrong]
    assert first_difference(one, two) is None
    found = first_difference(one, map(json.loads, lines), program.layout_of_one_rank())
    assert found is not None
    assert (found.step, found.before, found.unit) == (1, 0, "blocks.1")
    assert found.names[0] == f"grads.{found.parameter}"
    assert str(found).startswith(f"step 1: 'grads.{found.parameter}', parameter '{found.parameter}' of unit 'blocks.1'")
    assert str(found).endswith("equal at step 0")


def test_steps_of_one_run_alone_are_left_out_and_names_of_one_alone_differ() -> None:
    run = [{"step": step, "digests": {"w": str(step)}} for step in range(6)]
    assert first_difference(run, run[1::2]) is None
    found = first_difference(run[::2], [*run[:4], {"step": 4, "digests": {"w": "4", "loss": "0"}}])
    assert found is not None
    assert (found.step, found.before, found.names, found.unit) == (4, 2, ("loss",), None)
    assert "no step is in both runs" in refused(first_difference, run[:2], run[2:])
