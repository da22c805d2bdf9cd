"""Simulated ranks that run one after the other have the losses and parameters of gloo ranks, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, slow

STEPS = 3
ADAMW = fs.optimizer(torch.optim.AdamW, lr=1e-2)


class Encoder(nn.Module):
    """As BERT, with a mask that is left out where it hides nothing, and a part that is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 20)
        self.calls: list[int] = []

    def forward(self, ids: Tensor, mask: Tensor, mesh: fs.Mesh | None = None) -> Tensor:
        x = self.layer(self.embed(ids), src_key_padding_mask=None if mask.all() else ~mask)
        if mesh is None:
            return self.head(x + self.block(x))
        self.calls.append(len(x))
        x = x - fs.collectives.pmean(x.mean((0, 1)), mesh)  # as a synchronized BatchNorm
        assert self.calls[-1] == len(x)  # no other rank's
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))


def called(mesh: fs.Mesh, model: nn.Module, params: fs.Sharded, *args: Tensor) -> Tensor:
    return functional_call(model, fs.gather(params), args)


def bound(mesh: fs.Mesh, model: nn.Module, params: fs.Sharded, *args: Tensor) -> Tensor:
    return fs.bind(model, fs.gather(params, lazy=True))(*args, mesh)


def trained(mesh: fs.Mesh, forward: Callable[..., Tensor]) -> Any:
    """The losses of each step and the parameters; of simulated ranks the losses of all as a list."""
    torch.manual_seed(0)
    model, losses = Encoder(), list[Any]()
    params = fs.shard(model, fs.plan(model, mesh))
    state = ADAMW.init(params)

    def loss(params: fs.Sharded, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return F.cross_entropy(forward(mesh, model, params, ids, mask)[mask], ids[mask])

    def step(params: fs.Sharded, state: Any, number: int) -> Any:
        torch.manual_seed(100 * number + mesh.rank)  # ranks draw different numbers, and not equally many
        grads, value = fs.grad_and_value(loss)(params, *batch(number, mesh.rank))
        grads, _ = fs.clip_by_global_norm(grads, 1.0)
        return *ADAMW.step(params, grads=grads, state=state), value.detach()

    for number in range(STEPS):
        params, state, value = mesh.spmd(step)(params, state, number)
        losses.append(value.flatten().tolist() if value.ndim else value.item())
    return losses, dict(params)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ids of a shape of its own, and how many of each row count; on even ranks of the first step all of them do."""
    rows, columns = 2 + (rank + step) % 3, 5 + rank
    ids, full = torch.randint(1, 20, (rows, columns)), rank % 2 == 0 and step == 0
    return ids, torch.full((rows,), columns) if full else torch.randint(1, columns, (rows,))


@pytest.mark.parametrize("ranks", [*sequential(2), *slow(sequential(3, HYBRID))], ids=str)
@pytest.mark.parametrize("forward", [called, bound])
def test_losses_and_parameters_are_those_of_gloo_ranks(forward: Callable[..., Tensor], ranks: Ranks) -> None:
    (of_gloo,) = gloo(ranks.axes)
    here = ranks.run(trained, forward)
    for rank, there in enumerate(of_gloo.run(trained, forward)):
        losses, parameters = here[rank]
        assert [of_step[rank] for of_step in losses] == there[0]
        assert_trees_close(parameters, there[1], rtol=0, atol=0)
