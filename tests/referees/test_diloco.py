"""examples/diloco.py beside the DiLoCo of torchft, whose own code runs on plain models over the same gloo ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from tests.support.pool import run_ranks
from tests.support.scripts import example


def model_and_rounds() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, [*torch.randn(4, 3, 8, 3, dtype=torch.float64)]  # outer steps, inner steps, samples


def reduced(x: Tensor, should_quantize: bool) -> Any:
    """The manager's all-reduce: the mean over those that take part."""
    assert not should_quantize
    dist.all_reduce(x)
    x /= dist.get_world_size()
    return MagicMock()  # nothing to wait for


def by_torchft(worker: int) -> dict[str, Tensor]:
    """Each rank trains the whole model on the data of its worker; two ranks of one worker do the same."""
    diloco, (model, rounds) = example("diloco"), model_and_rounds()
    manager = MagicMock(_use_async_quorum=False, allreduce=reduced, current_step=lambda: 0, should_commit=lambda: True)
    inner = torch.optim.AdamW(model.parameters(), **diloco.INNER)
    outer = torch.optim.SGD(model.parameters(), **diloco.OUTER)
    with import_module("torchft.local_sgd").DiLoCo(manager, [model], inner, outer, sync_every=len(rounds[0])):
        for x in torch.cat(rounds):
            inner.zero_grad()
            diloco.loss_of(model, x.chunk(2)[worker]).backward()
            inner.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    diloco, mesh = example("diloco"), fs.init_mesh({"worker": 2, "shard": -1})
    params = diloco.train(mesh, *model_and_rounds(), diloco.CODECS["none"])
    return dict(fs.gather(params, lazy=False)), by_torchft(mesh.rank // (mesh.size // 2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_are_those_of_torchft(ranks: int) -> None:
    pytest.importorskip("torchft.local_sgd")
    before = dict(model_and_rounds()[0].named_parameters())
    for ours, theirs in run_ranks(both, ranks):
        fs.testing.assert_trees_close(ours, theirs, rtol=0, atol=1e-12)
        assert all((ours[name] - p).abs().min() > 1e-4 for name, p in before.items())
