"""Models of other libraries, bound: gradients of the unsharded program by fs.grad and backward(), also checkpointed.

Programs that train with checkpointing, or bind their model, and no more are in the table: see ``programs``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives, run_ranks
from tests.referees.programs import diffusers, timm, transformers
from tests.referees.programs.torchdiffeq import flow as trajectory
from tests.referees.programs.torchdiffeq import points, squares
from tests.referees.referee import quiet
from tests.referees.training import Batch, Task, parts
from tests.support.refusals import refused


def flow() -> nn.Module:
    model: Any = import_module("zuko").flows.NSF(2, 3, transforms=2, hidden_features=[16])
    return model


def contexts() -> Batch:
    return {"c": torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def likelihood(flow: Any) -> Tensor:
    return -flow.log_prob(torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)).mean()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 6, 2, bidirectional=True, batch_first=True), nn.Linear(12, 3)

    def forward(self, c: Tensor) -> Tensor:
        return self.out(self.rnn(c[:, None])[0])


def transformer() -> nn.Module:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    return import_module("diffusers").DiTTransformer2DModel(
        **sizes, num_embeds_ada_norm=10, norm_num_groups=4, dropout=0.1
    )


def labelled() -> Batch:
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"hidden_states": x, "timestep": torch.tensor([3, 141, 592, 653]), "class_labels": torch.arange(4)}


ENABLE = "enable_gradient_checkpointing"
of = partial(transformers.task, checkpointing=True)
CASES: dict[str, tuple[str, Task]] = {
    "GPT-2, dropout": ("transformers", replace(of("GPT-2", attn_pdrop=0.1, resid_pdrop=0.1), dropout=True)),
    "T5, dropout": ("transformers", replace(of("T5", dropout_rate=0.1), dropout=True)),
    "Mixtral": ("transformers", of("Mixtral", experts_implementation="eager")),  # torch's kernel has no float64
    "timm ResNet": ("timm", timm.task("resnet10t", 32, "set_grad_checkpointing")),  # BatchNorm in what is recomputed
    "DiT, dropout": ("diffusers", Task(transformer, labelled, diffusers.of_output, ENABLE, dropout=True)),
    "zuko": ("zuko", Task(flow, contexts, likelihood)),
    "torchdiffeq's adjoint": ("torchdiffeq", Task(partial(trajectory, "odeint_adjoint", "rk4"), points, squares)),
    "LSTM": ("torch", Task(Tagger, contexts, timm.of_logits)),
}


def unsharded(task: Task, num_ranks: int) -> dict[str, Tensor]:
    model = task.made()
    for part in parts(task.batch(), num_ranks):
        (task.loss(model(**part)) / num_ranks).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }


def gradients(task: Task, mesh: fs.Mesh) -> tuple[list[dict[str, Tensor]], dict[str, int], str]:
    """By fs.grad and by backward(), and its collectives; and what fs.grad says of functional_call."""
    model = task.made()
    before = [(n, id(x), x._version) for n, x in model.state_dict(keep_vars=True).items()]
    trained, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))
    part = mesh.split(dict(task.batch()))

    def loss(p: fs.Sharded) -> Tensor:
        torch.manual_seed(7)
        return task.loss(fs.bind(model, fs.gather(p, frozen) if len(frozen) else p)(**part))

    def called(p: fs.Sharded) -> Tensor:
        return task.loss(functional_call(model, fs.gather(p, frozen), kwargs=dict(part)))

    leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in trained.items()}, trained.layout)
    loss(leaves).backward()
    plain = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}
    with count_collectives() as seen:
        grads = fs.grad(loss)(trained)
    assert [(n, id(x), x._version) for n, x in model.state_dict(keep_vars=True).items()] == before
    found = [dict(fs.gather(x, lazy=False)) for x in (grads, fs.Sharded(plain, trained.layout))]
    return found, dict(seen.by_kind), refused(fs.grad(called), trained) if task.checkpointing else ""


def differences(task: Task) -> float:
    """Relative to the largest element of each parameter's gradient; checkpointing changes no bit."""
    with quiet():
        mesh = fs.init_mesh()
        found, kinds, _ = gradients(replace(task, checkpointing=""), mesh)
        if task.checkpointing:
            again, more, refusal = gradients(task, mesh)
            assert_trees_close(again, found, rtol=0, atol=0)
            assert more["psum_scatter"] == kinds["psum_scatter"]
            assert more["all_gather"] <= kinds["all_gather"] + 6
            assert "functorch_shard.bind(model, params)(...)" in refusal
        expected = found[1] if task.dropout else unsharded(replace(task, checkpointing=""), mesh.size)
        assert all(tree.keys() == expected.keys() for tree in found)
        far = [(tree[n] - x).abs().max() / x.abs().max().clamp(min=1e-6) for n, x in expected.items() for tree in found]
        return max(far).item()


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_bound_model_are_those_of_the_unsharded_program(name: str) -> None:
    library, task = CASES[name]
    pytest.importorskip(library)
    assert max(run_ranks(differences, 2, task, timeout=600.0)) < (1e-6 if name == "Mixtral" else 1e-9)
