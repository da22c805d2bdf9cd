"""One digest on any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.support.pages import ROOT
from tests.support.ranks import Ranks, gloo, sequential
from tests.virtual.programs import OPTIMIZERS, loss_of, planned, step_of, train

ONE = Ranks({"shard": 1}, "gloo")
SEVERAL = [
    *gloo(2, 3, 6, {"replicate": 2, "shard": 3}, {"replicate": 3}),
    *sequential(2, 6, {"replicate": 2, "shard": 3}),
]
WHOLE = (("ignored", ("head",)), ("reduction", "sum"))


@pytest.mark.parametrize("ranks", SEVERAL, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_has_the_same_bits_on_any_number_of_ranks(ranks: Ranks, optimizer: str) -> None:
    assert {*ranks.once(train, optimizer)} == {*ONE.once(train, optimizer)}


@pytest.mark.parametrize("ranks", SEVERAL, ids=str)
def test_so_it_has_with_parameters_that_are_whole_on_every_rank(ranks: Ranks) -> None:
    assert {*ranks.once(train, "AdamW", 2, 6, WHOLE)} == {*ONE.once(train, "AdamW", 2, 6, WHOLE)}


@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float16])
def test_so_it_has_where_gradients_are_reduced_in_low_precision(reduced: torch.dtype) -> None:
    options = ("AdamW", 2, 12, (("precision", fs.MixedPrecision(torch.bfloat16, reduced)),))
    assert len({Ranks({"shard": n}, "sequential").run(train, *options)[0] for n in (1, 3, 4)}) == 1


def resized(mesh: fs.Mesh, folder: str, steps: int) -> str:
    """Two steps more than ``folder`` has, saved there; where one of ``steps`` is left, that after a ``reshard``."""
    model, params = planned(mesh)
    opt = OPTIMIZERS["AdamW"]()
    tree: Any = {"params": params, "state": opt.init(params), "done": 0}
    if path := fs.checkpoint.latest(folder):
        tree = fs.checkpoint.load(path, tree)
    step = mesh.spmd(step_of(loss_of(model), opt), in_dims=(0, 0, None))
    params, state, done = tree["params"], tree["state"], tree["done"] + 2
    for i in (done - 2, done - 1):
        params, state, _ = step(params, state, i)
    fs.checkpoint.save(f"{folder}/{done}", {"params": params, "state": state, "done": done})
    if done < steps - 1:
        return ""
    _, like = planned(fs.simulated_mesh({"replicate": 2, "shard": 3}, kind="sequential"))
    other = like.layout
    params, state = fs.reshard((params, state), other)
    params, _, _ = other.mesh.spmd(step_of(loss_of(model), opt), in_dims=(0, 0, None))(params, state, done)
    return fs.checkpoint.digest({"params": params})


def test_ranks_change_by_checkpoint_and_by_reshard(tmp_path: Path) -> None:
    assert gloo(2)[0].run(resized, str(tmp_path), 5) == ["", ""]
    (found,) = {*sequential(3)[0].run(resized, str(tmp_path), 5)}
    model, params = planned(fs.init_mesh())
    state = OPTIMIZERS["AdamW"]().init(params)
    for i in range(5):
        params, state, _ = step_of(loss_of(model), OPTIMIZERS["AdamW"]())(params, state, i)
    assert fs.checkpoint.digest({"params": params}) == found


@pytest.mark.slow  # five processes import torch
def test_a_wrong_bit_of_one_rank_is_found_among_runs_of_the_same_bits() -> None:
    command = [
        sys.executable,
        str(ROOT / "examples/same_bits.py"),
        *["--ranks", "1,2", "--steps", "3", "--bug", "1", "--json"],
    ]
    (line,) = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    found = json.loads(line)
    assert found["digests"]["1"] != found["digests"]["2"]
    (difference,) = found["first differences"]
    assert difference.startswith("step 1: 'grads.blocks.1.")
    assert "of unit 'blocks.1'" in difference
    assert difference.endswith("equal at step 0")
