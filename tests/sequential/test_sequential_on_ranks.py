"""Simulated ranks that run one after the other have the losses and parameters of gloo ranks, bitwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
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
Loss = Callable[[fs.Sharded, Any], Tensor]


def trained(mesh: fs.Mesh, model: nn.Module, loss: Loss, batches: Sequence[Sequence[Any]], **options: Any) -> Any:
    """The loss of each step and the parameters; ``batches[step][rank]`` may have a shape of its own.

    Simulated ranks return the losses of all ranks as a list for each step.
    """
    params = fs.shard(model, fs.plan(model, mesh, **options))
    state = ADAMW.init(params)
    results = []

    def step(params: fs.Sharded, state: Any, of_ranks: Any, number: int) -> Any:
        torch.manual_seed(100 * number + mesh.rank)  # ranks draw different numbers, and not equally many
        grads, value = fs.grad_and_value(loss)(params, of_ranks[mesh.rank])
        grads, _ = fs.clip_by_global_norm(grads, 1.0)
        return *ADAMW.step(params, grads=grads, state=state), value.detach()

    run = mesh.spmd(step, in_dims=(0, 0, None, None))
    for number, batch in enumerate(batches):
        params, state, value = run(params, state, batch, number)
        results.append(value.flatten().tolist() if value.ndim else value.item())
    return results, dict(params)


def tokens(mesh: fs.Mesh, *, ragged: bool = False) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step and rank ids and how many of them count; on even ranks of the first step all of them do."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(STEPS):
        ranks = []
        for rank in range(mesh.size):
            rows, columns = (2 + (rank + step) % 3, 5 + rank) if ragged else (3, 6)
            ids = torch.randint(1, 20, (rows, columns), generator=generator)
            full = rank % 2 == 0 and step == 0
            lengths = torch.full((rows,), columns) if full else torch.randint(1, columns, (rows,), generator=generator)
            ranks.append((ids, lengths))
        batches.append(ranks)
    return batches


class PaddedEncoder(nn.Module):
    """As BERT: a mask that is left out where it hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = None if mask.all() else ~mask
        return self.head(self.layers(self.embed(ids), src_key_padding_mask=hidden))


def _of_language(model: nn.Module) -> Loss:
    def loss(params: fs.Sharded, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, lengths = batch
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = functional_call(model, fs.gather(params), (ids, mask))
        return F.cross_entropy(logits[mask], ids[mask])

    return loss


def ragged_batches(mesh: fs.Mesh) -> Any:
    model = _seeded(PaddedEncoder)
    return trained(mesh, model, _of_language(model), tokens(mesh, ragged=True))


class AverageOverRanks(nn.Module):
    """A model that communicates between two of its layers, as a synchronized BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.before, self.after = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.calls: list[int] = []

    def forward(self, ids: Tensor, mesh: fs.Mesh) -> Tensor:
        x = self.before(self.embed(ids)).tanh()
        self.calls.append(len(x))
        center = fs.collectives.pmean(x.mean((0, 1)), mesh)
        assert self.calls[-1] == len(x)
        return self.after(x - center)


def collective_in_a_model(mesh: fs.Mesh) -> Any:
    model = _seeded(AverageOverRanks)

    def loss(params: fs.Sharded, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, _ = batch
        logits = fs.bind(model, params)(ids, mesh)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return trained(mesh, model, loss, tokens(mesh, ragged=True))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def checkpointed(mesh: fs.Mesh) -> Any:
    model = _seeded(Checkpointed)

    def loss(params: fs.Sharded, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = fs.bind(model, fs.gather(params, lazy=True))(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())

    return trained(mesh, model, loss, tokens(mesh, ragged=True))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


PROGRAMS = {fn.__name__: fn for fn in (ragged_batches, collective_in_a_model, checkpointed)}


def every_program(mesh: fs.Mesh) -> dict[str, Any]:
    return {name: program(mesh) for name, program in PROGRAMS.items()}


@cache
def on_processes(ranks: Ranks) -> list[dict[str, Any]]:
    """All programs in one call."""
    return ranks.run(every_program)


@pytest.mark.parametrize("ranks", [*sequential(2), *slow(sequential(3, HYBRID))], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_parameters_are_those_of_gloo_ranks(name: str, ranks: Ranks) -> None:
    (of_gloo,) = gloo(ranks.axes)
    here = ranks.run(PROGRAMS[name])
    for rank, there in enumerate(on_processes(of_gloo)):
        losses, parameters = here[rank]
        assert [of_step[rank] for of_step in losses] == there[name][0]
        assert_trees_close(parameters, there[name][1], rtol=0, atol=0)
