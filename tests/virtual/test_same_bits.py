"""One digest on any number of ranks, and what changes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.communication import collective
from functorch_shard.layout import planning
from functorch_shard.virtual import loop
from tests.support.pages import ROOT
from tests.support.ranks import Ranks, gloo, sequential, slow
from tests.virtual.programs import OPTIMIZERS, batch_of, loss_of, planned, step_of, train

ONE = Ranks({"shard": 1}, "gloo")
SEVERAL = [
    *gloo(2, {"replicate": 2, "shard": 3}),
    *sequential(6, {"replicate": 2, "shard": 3}),
    *slow([*gloo(3, 6, {"replicate": 3}), *sequential(2)]),
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


def scaled(mesh: fs.Mesh) -> tuple[str, list[float]]:
    """The digest, and the scale of the loss before each step: the first one overflows, and is skipped."""
    model, params = planned(mesh)
    opt, scaling = OPTIMIZERS["AdamW"](), fs.LossScale.dynamic(initial=2.0**127, interval=1)
    loss = loss_of(model)

    @mesh.spmd(in_dims=(0, 0, 0, None))
    def step(params: fs.Sharded, state: Any, scale: Any, i: int) -> Any:
        key = fs.virtual.key(7, i)
        batches = [batch_of(key, v) for v in fs.virtual.ranks(params.layout)]
        grads = fs.virtual.grad(lambda p, x: scaling.scale(loss(p, x), scale))(params, batches, key=key)
        grads, finite = scaling.unscale(grads, scale)
        new = opt.step(params, grads=grads, state=state)
        return *scaling.select(finite, new, (params, state)), scaling.update(scale, finite)

    state, scale, scales = opt.init(params), scaling.init(params), list[float]()
    for i in range(3):
        scales.append(scale["scale"].flatten()[0].item())
        params, state, scale = step(params, state, scale, i)
    return fs.checkpoint.digest({"params": params, "state": state}), scales


def test_so_it_has_with_a_scaled_loss_of_which_a_step_overflows() -> None:
    runs = [each.run(scaled)[0] for each in (ONE, *gloo(2), *sequential(3, {"replicate": 2, "shard": 3}))]
    assert runs[0][1] == [2.0**127, 2.0**126, 2.0**127]
    assert runs.count(runs[0]) == len(runs)


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


# What would change the digest: each of these is an error that the other tests are to notice.


def in_rank_order(sums: list[Any], new: Any) -> None:
    """Leaves are added up as they come, rank after rank."""
    if sums and sums[-1].start + sums[-1].size == new.start:
        last = sums.pop()
        new = collective.Subtree(last.start, last.size + new.size, last.sum + new.sum)
    sums.append(new)


def test_a_sum_in_rank_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (expected := ONE.once(train, "AdamW")) == sequential(3)[0].run(train, "AdamW")[:1]
    monkeypatch.setattr(loop, "add_in_tree", in_rank_order)
    monkeypatch.setattr(collective, "add_in_tree", in_rank_order)
    assert sequential(3)[0].run(train, "AdamW")[0] != expected[0]


def test_a_shard_of_another_length_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for n in (1, 3):
        monkeypatch.setattr(planning, "_BLOCK", 1 if n == 3 else 64)
        found.append(Ranks({"shard": n}, "sequential").run(train, "AdamW", 8, 6, (("align_bytes", 0),))[0])
    assert found[0] != found[1]


def test_a_seed_by_real_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fs.virtual.Key.fold_in
    monkeypatch.setattr(fs.virtual.Key, "fold_in", lambda key, v: own(key, v % 3 if v < 6 else v))
    assert sequential(3)[0].run(train, "AdamW")[0] != ONE.once(train, "AdamW")[0]
