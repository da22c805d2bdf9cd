"""What an optimizer takes trains on gloo ranks as it does by itself, and as on simulated ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.pool import run_ranks
from tests.training.test_optimizer_probe import ACCEPTED, assert_trains_as_by_itself, trained

CHOSEN = [(cls, options) for cls, options, _ in ACCEPTED]


def trained_on_this_rank() -> list[dict[str, Tensor]]:
    mesh = fs.init_mesh()
    for cls, options in CHOSEN:
        assert_trains_as_by_itself(mesh, cls, donate=True, **options)
    return [dict(trained(mesh, cls, 4, lr=0.1, **options)) for cls, options in CHOSEN]


def test_what_is_accepted_trains_on_gloo_ranks_as_by_itself_and_as_on_simulated_ones() -> None:
    mesh = fs.simulated_mesh(3)
    simulated: list[Any] = [trained(mesh, cls, 4, lr=0.1, **options) for cls, options in CHOSEN]
    for rank, results in enumerate(run_ranks(trained_on_this_rank, 3)):
        expected = [{key: x[rank] for key, x in tree.items()} for tree in simulated]
        assert_trees_close(results, expected, rtol=1e-13, atol=1e-14)
