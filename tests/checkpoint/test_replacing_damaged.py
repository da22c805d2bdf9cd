"""A run that resumed before a damaged checkpoint saves under its name again, and nothing else is ever replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import functorch_shard as fs
from functorch_shard.checkpoint import latest, load, save, verify
from tests.support.ranks import Ranks, gloo, simulated

VALUES = {"fc.w": torch.arange(5.0)}


def damage(folder: Path) -> None:
    """Another bit in the middle of a file."""
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


def resumed(mesh: fs.Mesh, folder: str) -> list[int]:
    """Steps 1, 2 and 3, of which 2 and 3 are damaged; then 2 and 3 again."""
    runs = Path(folder)
    params = fs.shard(VALUES, fs.plan(VALUES, mesh))
    for step in (1, 2, 3):
        save(runs / f"step-{step}", {"model": params, "step": step})
    if mesh.rank == 0:
        damage(runs / "step-2")
        damage(runs / "step-3")
    mesh.agree("test", lambda: None, lambda _: [])
    seen = []
    while newest := latest(runs, verify=True):
        seen.append(load(newest, {"step": 0})["step"])
        if seen[-1] == 3:
            break
        save(runs / f"step-{seen[-1] + 1}", {"model": params, "step": seen[-1] + 1}, replace_damaged=True)
    return seen


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
def test_a_resumed_run_saves_again_under_the_names_of_damaged_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run(resumed, str(tmp_path)):
        assert seen == [1, 2, 3]
    assert [verify(tmp_path / f"step-{step}") for step in (1, 2, 3)] == [[], [], []]
    hidden = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".step"))
    assert [name.rpartition("-")[0] for name in hidden] == [".step-2.damaged", ".step-3.damaged"]


def test_a_valid_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"step": 1})
    with pytest.raises(FileExistsError, match="step-1 exists already, and was not overwritten"):
        save(tmp_path / "step-1", {"step": 2}, replace_damaged=True)
    assert load(tmp_path / "step-1", {"step": 0}) == {"step": 1}


def test_what_is_not_a_checkpoint_of_this_library_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="step-1 exists already"):
        save(tmp_path / "step-1", {"step": 2}, replace_damaged=True)
    assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"


def test_without_the_option_a_damaged_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"w": torch.ones(3)})
    damage(tmp_path / "step-1")
    with pytest.raises(FileExistsError, match="step-1 exists already"):
        save(tmp_path / "step-1", {"w": torch.ones(3)})
