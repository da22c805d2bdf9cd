"""A model that is trained by Muon and AdamW on shards: its numbers, what it sends, and skipped steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.matrix import plan
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.matrix import assert_unsharded, optimizer, planned, trained, values
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

# On simulated ranks vmap runs the attention kernel rank by rank, and torch warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def gpt(dtype: torch.dtype) -> nn.Module:
    """The model of the example, smaller."""
    path = Path(__file__).parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", path)
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    vars(example).update(CONTEXT=8, WIDTH=16, HEADS=2, DEPTH=2, VOCABULARY=32)
    torch.manual_seed(0)
    return example.GPT().to(dtype)


def hidden(name: str, x: Tensor) -> str | None:
    """Matrices of blocks are Muon's; embeddings, which are the head as well, vectors and positions are AdamW's."""
    return None if "blocks" in name and x.ndim == 2 else "no_decay" if x.ndim < 2 else "embedding"


ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-2}


def loss_of(model: nn.Module, params: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, params, (tokens[:, :-1],)).flatten(0, 1), tokens[:, 1:].flatten())


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(32, (4, 9), generator=generator) for _ in range(10)]


def muon_and_adamw() -> fs.Optimizer:
    adamw = fs.optimizer(torch.optim.AdamW, **ADAMW, labels={"no_decay": {"weight_decay": 0.0}})
    return fs.optimizer(torch.optim.Muon, **MUON, whole=True, labels={"embedding": adamw, "no_decay": adamw})


def stock(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The same by torch."""
    by_label: dict[str | None, list[Any]] = {}
    for name, x in model.named_parameters():
        by_label.setdefault(hidden(name, x), []).append(x)
    vectors = {"params": by_label["no_decay"], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([{"params": by_label["embedding"], "lr": 2e-3}, vectors], **ADAMW)
    return [torch.optim.Muon(by_label[None], **MUON), adamw]


def train_gpt(mesh: fs.Mesh, dtype: torch.dtype) -> fs.Full:
    """Ten steps."""
    model = gpt(dtype)
    params, opt = fs.shard(model, fs.plan(model, mesh, labels=hidden)), muon_and_adamw()
    state = opt.init(params)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, tokens: Tensor) -> Any:
        grads = fs.grad(lambda p: loss_of(model, fs.gather(p), tokens))(params)
        grads, _ = fs.clip_by_global_norm(grads, 1.0)
        return opt.step(params, grads=grads, state=state, labels={"embedding": {"lr": 2e-3}})

    for tokens in batches():
        params, state = step(params, state, mesh.split(tokens))
    return fs.gather(params, lazy=False)


def train_gpt_unsharded(dtype: torch.dtype) -> dict[str, Tensor]:
    model = gpt(dtype)
    classes = stock(model)
    for tokens in batches():
        model.zero_grad()
        loss_of(model, dict(model.named_parameters()), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in classes:
            each.step()
    return {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize("ranks", [*simulated(HYBRID), *gloo(2)], ids=str)
def test_ten_steps_of_the_gpt_by_muon_and_adamw_are_those_of_one_process(ranks: Ranks) -> None:
    expected = train_gpt_unsharded(torch.float64)
    for full in ranks.run(train_gpt, torch.float64):
        assert_trees_close(dict(full), expected, rtol=0, atol=1e-10)


def counted_step(mesh: fs.Mesh) -> tuple[list[tuple[str, int, int]], int]:
    """What a step issues: kind, number and bytes; and by hand, the bytes of what ranks have and others own."""
    counter = Counter()
    mesh = mesh.with_backend(counter)
    opt, params = optimizer("muon"), fs.shard(values(), planned(mesh))
    with count_collectives() as seen:
        state = mesh.spmd(opt.init)(params)
    assert not seen.issued
    counter.clear()
    trained(params, state, opt, range(1))
    layout, momentum = params.layout, state["momentum_buffer"].layout
    owner = {name: slot.offset // momentum.buffers["(owners)"].shard_numel for name, slot in momentum.slots.items()}
    parts = [(rank, part) for rank in range(layout.num_shards) for part in layout.slices(rank)]
    away = sum(part.numel for rank, part in parts if owner.get(part.name, rank) != rank)
    mean = [-(-numel // layout.num_shards) for numel in (2 * away, away)]  # parameters and gradients, and back
    return [(kind, t.number, t.sent) for (_, kind), t in counter.traffic.items()], 8 * sum(mean)


@pytest.mark.parametrize("ranks", [*simulated(5, HYBRID), *gloo(2)], ids=str)
def test_parameters_and_gradients_are_sent_to_owners_once_and_new_parts_back_once_and_nothing_else(
    ranks: Ranks,
) -> None:
    for seen, expected in ranks.run(counted_step):
        assert seen == [("ragged_all_to_all", 2, expected)]


def test_many_rounds_send_as_much_as_one_and_have_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen_by(mesh: fs.Mesh) -> list[int]:
        with count_collectives() as seen:
            opt, params = optimizer("muon"), fs.shard(values(), planned(mesh))
            params, _ = trained(params, opt.init(params), opt)
        assert_unsharded(fs.gather(params), "muon")
        return [op.numel for op in seen.issued]

    once = seen_by(fs.simulated_mesh(2))
    monkeypatch.setattr(plan, "ROUND", 1)  # a round for each parameter of an owner
    often = seen_by(fs.simulated_mesh(2))
    assert len(once) == 5 * 2
    assert len(often) > 2 * len(once) - 1
    assert sum(once) <= sum(often) <= sum(once) + len(often)  # each mean is rounded up


def skipping(mesh: fs.Mesh, case: str) -> fs.Full:
    """The first of four steps overflows and is skipped."""
    opt, params = optimizer(case), fs.shard(values(), planned(mesh))
    loss_scale = fs.LossScale.dynamic(initial=4.0)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, scale: Any, grads: fs.Sharded) -> Any:
        grads, finite = loss_scale.unscale(grads, scale)
        new = opt.step(params, grads=grads, state=state)
        params, state = loss_scale.select(finite, new, (params, state))
        return params, state, loss_scale.update(scale, finite)

    state, scale = opt.init(params), loss_scale.init(params)
    for i in range(4):
        factor = torch.inf if i == 0 else 2.0
        whole = {name: x * factor for name, x in values(i).items()}
        params, state, scale = step(params, state, scale, fs.shard(whole, params.layout))
    return fs.gather(params, lazy=False)


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
@pytest.mark.parametrize("case", ["sgd", "first_gradient"])
def test_a_skipped_first_step_leaves_the_state_as_if_there_had_been_none(case: str, ranks: Ranks) -> None:
    for full in ranks.run(skipping, case):
        assert_unsharded(full, case, 3)
