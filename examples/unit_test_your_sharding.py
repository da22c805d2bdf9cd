"""Unit tests of a sharded training step, without a cluster: copy this file, and put your model and step into it.

python -m pytest examples/unit_test_your_sharding.py

A law is a function of a mesh, and runs on simulated ranks in this process and on real gloo processes. What it compares
with is the same step in plain torch, on whole tensors and the whole batch.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_rank_invariant, assert_trees_close, count_collectives, mutants, run_ranks

Batch = tuple[Tensor, Tensor]


# --- What is tested: replace these with your own ---


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()  # odd sizes: shards are padded


def make_batch() -> Batch:  # 12 samples: a multiple of every number of ranks below
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 7, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=generator)


def prepared(mesh: fs.Mesh) -> tuple[fs.Sharded, Any, Any]:
    """Parameters, the state of their optimizer, and the step."""
    model = make_model()
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.1)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads = fs.grad(lambda params: F.cross_entropy(functional_call(model, fs.gather(params), (x,)), y))(params)
        grads, norm = fs.clip_by_global_norm(grads, 1.0)
        return *opt.step(params, grads=grads, state=state), norm

    return params, opt.init(params), step


def train_unsharded(steps: int) -> dict[str, Tensor]:
    model, (x, y) = make_model(), make_batch()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return {name: p.detach() for name, p in model.named_parameters()}


# --- Laws ---


def train(mesh: fs.Mesh, steps: int) -> tuple[fs.Sharded, Any]:
    params, state, step = prepared(mesh)
    for _ in range(steps):
        params, state, _ = step(params, state, *mesh.split(make_batch()))
    return params, state


def trains_as_unsharded(mesh: fs.Mesh) -> None:
    params, _ = train(mesh, 5)
    assert_trees_close(dict(fs.gather(params, lazy=False)), train_unsharded(5), rtol=0, atol=1e-12)


def has_the_norm_of_the_whole(mesh: fs.Mesh) -> None:  # padding, copies and other ranks are counted right
    params, _ = train(mesh, 2)
    norm = mesh.spmd(fs.global_norm)(params).flatten()[0]
    torch.testing.assert_close(norm, nn.utils.get_total_norm(train_unsharded(2).values()))


def sends_what_it_should(mesh: fs.Mesh) -> None:
    params, state, step = prepared(mesh)
    with count_collectives() as seen:
        step(params, state, *mesh.split(make_batch()))
    # Two units: each is gathered once, both still are whole when backward begins. Replicas add up both; and the norm.
    expected = {"all_gather": 2, "psum_scatter": 2, "psum": 3 if "replicate" in mesh.axes else 1}
    assert dict(seen.by_kind) == (expected if mesh.size > 1 else {})
    assert seen.nbytes("psum_scatter") in (0, sum(8 * buffer.numel for buffer in params.layout.buffers.values()))


def goes_on_from_a_checkpoint_of_other_ranks(mesh: fs.Mesh) -> None:
    params, state = train(fs.simulated_mesh(2), 3)
    like, like_state, step = prepared(mesh)
    with tempfile.TemporaryDirectory() as folder:
        fs.checkpoint.save(f"{folder}/step-3", {"model": params, "optim": {"state": state}})
        found = fs.checkpoint.load(f"{folder}/step-3", {"model": like, "optim": {"state": like_state}})
    params, _, _ = step(found["model"], found["optim"]["state"], *mesh.split(make_batch()))
    assert_trees_close(dict(fs.gather(params, lazy=False)), train_unsharded(4), rtol=0, atol=1e-12)


def first_step(mesh: fs.Mesh) -> Any:  # a law without a reference: the same on every mesh
    params, state, step = prepared(mesh)
    params, state, norm = step(params, state, *mesh.split(make_batch()))
    return params, state, norm.flatten()[0]


LAWS = [
    trains_as_unsharded,
    has_the_norm_of_the_whole,
    sends_what_it_should,
    goes_on_from_a_checkpoint_of_other_ranks,
]


@pytest.mark.parametrize("axes", [1, 2, 3, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_on_simulated_ranks(law: Any, axes: Any) -> None:
    law(fs.simulated_mesh(axes))


def laws_on_this_rank() -> None:
    for law in (trains_as_unsharded, has_the_norm_of_the_whole, sends_what_it_should):
        law(fs.init_mesh())


def test_on_gloo_ranks() -> None:
    run_ranks(laws_on_this_rank, 2)


def test_a_step_does_not_depend_on_ranks() -> None:
    assert_rank_invariant(first_step, rtol=0, atol=1e-12)


def test_every_wrong_collective_of_a_step_is_noticed() -> None:
    def check(program: Any) -> None:
        assert_rank_invariant(program, [1, {"replicate": 2, "shard": 2}], rtol=0, atol=1e-12)

    assert [str(mutant) for mutant in mutants(first_step) if not mutant.is_noticed_by(check)] == []


def test_the_laws_notice_a_gradient_that_is_not_reduced() -> None:
    mesh = fs.simulated_mesh(2)
    with pytest.raises(AssertionError):
        trains_as_unsharded(mesh.with_backend(fs.communication.skip("psum_scatter", "psum")))
