"""What a program changes for a while, and torch keeps for the process, holds for the rank or derivative that did so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils import checkpoint

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.testing import assert_trees_close


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def kernels() -> tuple[bool, bool]:
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


Change = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any], Any]
CHANGES: dict[str, Change] = {  # what changes a setting for a while, what reads it, and what it is then
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), kernels, (False, True)),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled, True),
    "dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype, torch.float64),
    "early stop": (
        lambda: checkpoint.set_checkpoint_early_stop(False),
        lambda: checkpoint._enable_checkpoint_early_stop,
        False,
    ),
    "mutation": (allow_mutation_on_saved_tensors, lambda: graph._allow_mutation_on_saved_tensors_enabled, True),
    "cached": (parametrize.cached, lambda: parametrize._cache_enabled, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changed_for_a_while_is_that_of_its_rank_and_afterwards_as_before(name: str) -> None:
    mesh = fs.simulated_mesh(3, kind="sequential")
    change, read, changed = CHANGES[name]
    before = read()

    def seen(x: Tensor) -> list[Any]:
        if mesh.rank == 1:
            psum(x, mesh)
            return [read(), psum(x, mesh), read()][::2]
        with change():
            inside = [read(), psum(x, mesh), read()][::2]
        psum(x, mesh)
        return [*inside, read()]

    by_rank = mesh.spmd(seen, out_dims="list")(torch.ones(3))
    assert by_rank == [[changed, changed, before], [before, before], [changed, changed, before]]
    assert read() == before


def test_a_setting_that_all_ranks_change_stays_changed_and_one_of_some_ranks_does_not() -> None:
    mesh, before = fs.simulated_mesh(2, kind="sequential"), torch.get_default_dtype()

    def double(ranks: int) -> torch.dtype:
        if mesh.rank < ranks:
            torch.set_default_dtype(torch.float64)
        psum(torch.ones(1, dtype=torch.float64), mesh)
        return torch.get_default_dtype()

    with default_dtype(before):
        assert mesh.spmd(double, out_dims="list")(1) == [torch.float64, before]
        assert torch.get_default_dtype() == before
        assert mesh.spmd(double, out_dims="list")(2) == [torch.float64] * 2
        assert torch.get_default_dtype() == torch.float64


def test_forward_mode_of_attention_by_a_kernel_that_has_it_is_that_of_batched_ranks() -> None:
    tangents = []
    for kind in ("batched", "sequential"):
        mesh = fs.simulated_mesh(3, kind=kind)
        params = fs.shard({"w": torch.eye(4)}, fs.plan({"w": torch.eye(4)}, mesh))

        def loss(params: fs.Sharded, x: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                q = x @ fs.gather(params)["w"]
                return F.scaled_dot_product_attention(q, q, x).square().mean()

        tangent = mesh.spmd(lambda p, x, loss=loss: jvp(lambda p: loss(p, x), (p,), (p,))[1])
        tangents.append(tangent(params, torch.arange(48.0).sin().view(3, 1, 1, 4, 4)))
    assert_trees_close(*tangents)
