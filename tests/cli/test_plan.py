"""``python -m functorch_shard plan``: its numbers are those of ``fs.estimate``, and its errors name the option."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.cli.main import main

HERE = "tests.cli.test_plan:"


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(1000, 256), *(nn.Sequential(nn.Linear(256, 256)) for _ in range(4)))


def devices() -> nn.Module:
    model = build()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    return model


def broken() -> nn.Module:
    raise RuntimeError("no weights\nhere")


def number() -> int:
    return 3


whole = nn.Linear(3, 3)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """An error, in one line."""
    assert main(["plan", *argv]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    return " ".join(said.err.split())


def test_a_row_for_each_number_of_ranks_has_what_estimate_says(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", "8,64,512", "--shards", "4", "--optimizer", "AdamW", "--precision", "bfloat16"]
    header, _, *rows, _ = output(capsys, HERE + "build", *given)
    assert header.split()[0] == "mesh"
    opt, bf16 = fs.optimizer(torch.optim.AdamW), fs.MixedPrecision(torch.bfloat16)
    for row, ranks in zip(rows, (8, 64, 512), strict=True):
        mesh = fs.simulated_mesh({"replicate": ranks // 4, "shard": 4})
        expected = fs.estimate(fs.plan(build(), mesh, precision=bf16), opt)
        memory = [expected.parameters, expected.gradients, expected.optimizer, expected.gathered, expected.reducing]
        assert row.startswith(f"replicate={ranks // 4} x shard=4 ")
        assert row.split()[-6:] == [f"{nbytes:,}" for nbytes in [*memory, expected.peak]]


@pytest.mark.parametrize("name", ["devices", "whole"])
def test_models_are_built_on_the_meta_device_or_there_already(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert output(capsys, HERE + name)[2].startswith("shard=8 ")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("build --ranks 8,x", "invalid literal for int"),
        ("build --shards 3", "--shards: 3 does not divide 8 ranks"),
        ("build --optimizer adamv", "module 'torch.optim' has no attribute 'adamv'"),
        ("broken", "no weights here"),
        ("number", "got int, expected an nn.Module"),
        ("nothing:build", "No module named 'nothing'"),
    ],
)
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], argv: str, named: str) -> None:
    model, *options = argv.split()
    assert named in refused(capsys, model if ":" in model else HERE + model, *options)
