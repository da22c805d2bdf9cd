"""Wherever a shard lies, and whatever is written to it meanwhile, lazy values are those of the gather, or an error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functorch_shard as fs
from tests.support.odd_shards import (
    BATCHES,
    FORMS,
    WRITES,
    check_batches,
    check_forms,
    check_writes,
)
from tests.support.ranks import HYBRID, Ranks, gloo, slow

some = settings(max_examples=60, deadline=None)
stored = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int32])
gathered = st.sampled_from([None, torch.float32, torch.bfloat16])


@given(forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=3), stored=stored, dtype=gathered)
@some
def test_a_shard_that_lies_oddly_is_gathered_as_it_is_at_once(
    forms: list[str], stored: torch.dtype, dtype: torch.dtype | None
) -> None:
    check_forms(fs.init_mesh(), forms, stored, dtype)


@given(places=st.lists(st.sampled_from(sorted(BATCHES)), min_size=3, max_size=3), dtype=gathered)
@some
def test_a_batch_of_shards_may_have_its_dim_anywhere(places: list[str], dtype: torch.dtype | None) -> None:
    check_batches(fs.init_mesh(), places, dtype)


events = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, None, None, *sorted(WRITES)])), max_size=12)


@given(form=st.sampled_from(sorted(FORMS)), reshard=st.booleans(), dtype=gathered, events=events)
@some
def test_writes_in_between_never_change_what_was_gathered_in_silence(
    form: str, reshard: bool, dtype: torch.dtype | None, events: list[Any]
) -> None:
    check_writes(fs.init_mesh(), form, reshard, dtype, events)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_step_that_is_donated_between_forward_and_backward_leaves_the_gradient_right(
    mapped: bool, tmp_path: Path
) -> None:
    source = {"fc.w": torch.tensor([1.0, 2.0])}
    layout = fs.plan(source, fs.init_mesh())
    params: Any = fs.shard(source, layout)
    params = fs.offload(params, tmp_path) if mapped else params
    leaf = fs.Sharded({k: x.requires_grad_() for k, x in params.items()}, layout)
    loss = fs.gather(leaf, lazy=True)["fc.w"].square().sum()
    opt = fs.optimizer(torch.optim.SGD, lr=1.0)
    with torch.no_grad():
        opt.step(leaf, grads=fs.shard({"fc.w": torch.ones(2)}, layout), state=opt.init(leaf), donate=True)
    assert torch.equal(leaf["fc"], torch.tensor([0.0, 1.0]))
    (grad,) = torch.autograd.grad(loss, list(leaf.values()))
    assert torch.equal(grad, torch.tensor([2.0, 4.0]))


def odd_shards_on_this_rank(mesh: fs.Mesh) -> list[list[str]]:
    draw = random.Random(5)  # the same cases on all ranks
    for _ in range(12):
        forms, dtype = draw.choices(sorted(FORMS), k=3), draw.choice([None, torch.bfloat16])
        check_forms(mesh, forms, draw.choice([torch.float64, torch.bfloat16, torch.complex64, torch.int32]), dtype)
        check_batches(mesh, draw.choices(sorted(BATCHES), k=3), dtype)
    return [
        check_writes(
            mesh,
            draw.choice(sorted(FORMS)),
            draw.choice([True, False]),
            draw.choice([None, torch.bfloat16]),
            [(draw.randrange(4), draw.choice([None, None, *sorted(WRITES)])) for _ in range(10)],
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize("ranks", [*gloo(2, {"replicate": 2}), *slow(gloo(HYBRID))], ids=str)
def test_odd_shards_and_writes_in_between_are_right_or_refused_alike_on_every_rank(ranks: Ranks) -> None:
    first, *others = ranks.run(odd_shards_on_this_rank)
    assert any(first)
    assert not all(first)
    assert all(told == first for told in others)
