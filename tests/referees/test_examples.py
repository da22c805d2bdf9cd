"""Examples that need other packages, at toy size: each fails unless its results are those of the unsharded program."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from tests.support.pool import run_ranks
from tests.support.scripts import printed_by, printed_by_a_process

FOLDER = Path(__file__).parents[2] / "examples"
TOY = {
    "dp_sgd.py": ("sklearn", ["--steps", "3"]),
    "hf_llama.py": ("transformers", ["--steps", "2", "--layers", "1"]),
    "influence.py": ("sklearn", ["--steps", "5"]),
}


def printed(script: str, *arguments: str) -> tuple[str, str]:
    """As a function of this package, which other processes import with it: see torchvision_schemas.py."""
    return printed_by(script, *arguments)


@pytest.mark.parametrize("ranks", ["simulated", "gloo"])
@pytest.mark.parametrize("name", TOY)
def test_results_are_those_of_the_unsharded_program(name: str, ranks: str) -> None:
    package, options = TOY[name]
    pytest.importorskip(package)
    script = str(FOLDER / name)
    if ranks == "simulated":
        output, _ = printed_by_a_process(script, *options, "--ranks", "2", run=printed)  # hf_llama.py sets a dtype
    else:
        output, _ = run_ranks(printed, 2, script, *options)[0]
    assert "a rank passes" in output


class Energy(nn.Module):
    """One number for each sample, as torchebm calls it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:  # (B, 2) -> (B,)
        return self.net(x).squeeze(-1)


def test_the_score_matching_of_the_example_is_torchebms_and_so_is_its_sharded_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torchebm")
    monkeypatch.syspath_prepend(FOLDER)
    example = import_module("score_matching")
    torch.manual_seed(0)
    model = Energy(nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))).double()
    batch = example.samples(12, torch.Generator().manual_seed(0))
    loss = import_module("torchebm.losses").ScoreMatching(model=model, hessian_method="exact", dtype=torch.float64)
    theirs = loss(batch)
    theirs.backward()

    mesh = fs.simulated_mesh(3)
    params = fs.shard(model, fs.plan(model, mesh))

    @mesh.spmd
    def gradient(params: fs.Sharded, x: Tensor) -> fs.Sharded:
        return fs.grad(lambda params: example.loss_of(model, fs.gather(params), x))(params)

    ours = fs.gather(gradient(params, mesh.split(batch)), lazy=False)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(example.loss_of(model, whole, batch), theirs.detach(), rtol=0, atol=1e-10)
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    fs.testing.assert_trees_close(dict(ours), expected, rtol=0, atol=1e-10)
