"""``verify`` and ``diff`` of checkpoints: what is wrong, or differs, by name; and the exit status."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import functorch_shard as fs
from functorch_shard.cli.main import main

MODEL = {"0.weight": torch.arange(15.0).reshape(5, 3), "0.bias": torch.tensor([float("nan"), 1.0, -0.0])}


def saved(path: Path, ranks: int, step: int = 3, **changes: Any) -> str:
    """On so many ranks, with some parameters in other values or missing."""
    model = {name: x for name, x in (MODEL | changes).items() if x is not None}
    params = fs.shard(model, fs.plan(model, fs.simulated_mesh(ranks)))
    fs.checkpoint.save(path, {"model": params, "step": step})
    return str(path)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_checkpoints_of_other_ranks_with_the_same_values_do_not_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", saved(tmp_path / "two", 2), saved(tmp_path / "three", 3)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_every_name_that_differs_is_listed_with_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = MODEL["0.weight"].clone()
    weight[4, 1], weight[0, 0] = 10.5, 1.0
    changes = {"0.weight": weight, "0.bias": MODEL["0.bias"].double(), "1.bias": torch.zeros(2)}
    assert main(["diff", saved(tmp_path / "one", 2), saved(tmp_path / "other", 3, step=4, **changes)]) == 1
    _, _, bias, weights, new, step = lines_of(capsys)
    assert bias == ["model.0.bias", "float32[3]", "float64[3]"]
    assert " ".join(weights) == "model.0.weight float32[5, 3] float32[5, 3] 2 of 15 elements, by 2.5 at most"
    assert new == ["model.1.bias", "-", "float32[2]"]
    assert step == ["step", "3", "4"]


def test_a_zero_of_another_sign_differs_and_a_nan_with_the_same_bits_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    positive: dict[str, Any] = {"0.bias": torch.tensor([float("nan"), 1.0, 0.0])}
    assert main(["diff", saved(tmp_path / "one", 2), saved(tmp_path / "other", 2, **positive)]) == 1
    *_, row = lines_of(capsys)
    assert row[3:6] == ["1", "of", "3"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_that_are_not_plain_are_not_compared_and_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        dcp.save({"x": torch.ones(4), "args": Namespace(a=1)}, checkpoint_id=folder, no_dist=True)
    assert main(["diff", *folders]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("args")]
    assert row.endswith("not compared")


def test_a_valid_checkpoint_is_said_to_be_and_a_damaged_one_has_each_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "one", 2)
    assert main(["verify", folder]) == 0
    assert "3 names" in capsys.readouterr().out
    for file in sorted(Path(folder).glob("*.distcp")):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert main(["verify", folder]) == 1
    assert capsys.readouterr().err.splitlines() == fs.checkpoint.verify(folder)


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["verify", str(tmp_path)], ["diff", str(tmp_path), str(tmp_path)]):
        assert main(arguments) == 1
        assert str(tmp_path) in capsys.readouterr().err
