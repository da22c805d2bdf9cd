"""A damaged checkpoint is reported on every real rank, whichever of them reads the damage; no file is changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.checkpoint import latest, load, save, verify
from tests.support import faults
from tests.support.pool import run_ranks
from tests.support.refusals import refused

OPT = fs.optimizer(torch.optim.AdamW, lr=0.01)


def tree_of(mesh: fs.Mesh, model: nn.Module | None = None) -> dict[str, Any]:
    params = fs.shard(made := model or plain(), fs.plan(made, mesh))
    return {"model": params, "optim": {"state": OPT.init(params)}, "step": 2}


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))


def other_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 4))


def damage_all(runs: Path, outside: Path) -> dict[str, str]:
    """A copy of the good checkpoint for every fault; the file that is to be named, or why it is refused."""
    named: dict[str, str] = {}

    def copy(fault: str, name: str) -> Path:
        named[fault] = name
        return Path(shutil.copytree(runs / "good", runs / fault))

    for name in faults.FILES:
        for length in faults.LENGTHS:
            faults.truncate(copy(f"{name} of length {length}", name) / name, length)
        for seed in range(3):
            faults.flip_a_bit(copy(f"{name} with bit {seed} flipped", name) / name, seed)
        faults.link_out(copy(f"{name} linked", name) / name, outside / name)
        if name != "functorch_shard.json":  # without it, it is the checkpoint of another program
            (copy(f"{name} missing", name) / name).unlink()
    for place in faults.PLACES:
        for i in faults.HOSTILE:
            why = "'step'" if place == "as a value" else "nothing in it was executed"
            faults.poison(copy(f"hostile {i} {place}", why), place, faults.hostile(outside / "executed")[i])
    return named


def try_all(runs: Path, damaged: list[str]) -> dict[str, Any]:
    mesh = fs.init_mesh()
    reported: dict[str, Any] = {fault: refused(load, runs / fault, tree_of(mesh)) for fault in damaged}
    reported["other model"] = refused(load, runs / "good", tree_of(mesh, other_model()))
    reported["other dtype"] = refused(load, runs / "good", tree_of(mesh, plain().double()))
    reported["to overwrite"] = refused(save, runs / "good", tree_of(mesh))
    reported["step"] = load(runs / "good", tree_of(mesh))["step"]  # and all of them are still able to work together
    return reported


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank was reported, and the file to be named for each fault."""
    runs, outside = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("outside")
    save(runs / "good", tree_of(fs.simulated_mesh(2)))
    named = damage_all(runs, outside)
    before = files_of(runs)
    reported = run_ranks(try_all, 3, runs, list(named))  # more than have saved
    assert files_of(runs) == before, "something was written"
    assert not (outside / "executed").exists()
    assert latest(runs, verify=True) == runs / "good"
    damaged = [fault for fault in named if not fault.startswith("hostile")]
    assert [fault for fault in damaged if not any(named[fault] in problem for problem in verify(runs / fault))] == []
    return {"reported": reported, "named": named}


def test_every_damage_is_reported_on_every_rank_with_the_file_and_executes_nothing(tried: Any) -> None:
    for fault, name in tried["named"].items():
        for rank, reported in enumerate(tried["reported"]):
            assert reported[fault].startswith("RuntimeError"), f"{fault}, rank {rank}"
            assert name in reported[fault], f"{fault}, rank {rank}"
            assert fault in reported[fault], f"the directory, rank {rank}"


def test_what_does_not_fit_is_reported_on_every_rank_and_all_work_on_after_it(tried: Any) -> None:
    weight = "'model.1.weight': got shape (4, 7), torch.float32, the checkpoint has shape (5, 7)"
    bias = "'model.0.bias': got shape (7,), torch.float64, the checkpoint has shape (7,), torch.float32"
    for reported in tried["reported"]:
        assert weight in reported["other model"]
        assert bias in reported["other dtype"]
        assert "exists already, and was not overwritten" in reported["to overwrite"]
        assert reported["step"] == 2
