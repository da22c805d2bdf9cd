"""Gloo ranks exchange what moves between meshes and layouts: every bit, nothing else, and no rank is left alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.sharding.reshard import copy_plan
from functorch_shard.testing import count_collectives
from tests.sharding.test_resharding import mapped, same_bits
from tests.support.models import awkward, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo, slow
from tests.support.refusals import text_of

OPTIONS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "other units and labels": {
        "units": 64,
        "align_bytes": 0,
        "labels": lambda name, p: "vector" if p.ndim == 1 else None,
    },
    "some whole": {"ignored": ["blocks", "mask"]},
}


def values() -> dict[str, Tensor]:
    """Dtypes that gloo can send, and some that it cannot."""
    torch.manual_seed(0)
    dtypes = [torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16]
    return {
        **{f"a.{i}": (9 * torch.randn(7, 3)).to(dtype) for i, dtype in enumerate(dtypes)},
        "b.scalar": torch.tensor(3.0),
        "b.empty": torch.zeros(0, 2),
    }


Sent = tuple[int, int, int, int]  # bytes and exchanges: counted, planned, counted, planned


def moves(mesh: fs.Mesh) -> tuple[list[Any], dict[Any, Sent]]:
    """From every layout on every mesh to every other: which ones lost a bit, and what each one sent."""
    wrong, sent = [], {}
    for source in (awkward(), values()):
        options = OPTIONS if isinstance(source, nn.Module) else {"as planned": {}}
        layouts = {
            (m, what): fs.plan(source, one, **o) for m, one in enumerate(meshes(mesh)) for what, o in options.items()
        }
        expected = {name: fs.shard(source, layout) for name, layout in layouts.items()}
        for (old_name, old), (new_name, new) in product(layouts.items(), repeat=2):
            with count_collectives() as seen:
                moved = fs.reshard(expected[old_name], new)
            case = (type(source).__name__, old_name, new_name)
            wrong += [] if same_bits(moved, expected[new_name]) else [case]
            home = [old.mesh.processes.index(process) for process in new.mesh.processes]
            moving = [copy for copy in copy_plan(old, new, home) if home[copy.rank] != copy.source_rank]
            mine = [copy for copy in moving if copy.source_rank == mesh.rank]
            planned = sum(copy.numel * new.buffers[copy.key].dtype.itemsize for copy in mine)
            sent[case] = seen.nbytes("send"), planned, seen["send"], len({copy.key for copy in moving})
    return wrong, sent


def meshes(mesh: fs.Mesh) -> list[fs.Mesh]:
    """Three of these ranks."""
    axes = (
        [{"replicate": 2}, {"shard": 2, "replicate": 1}] if mesh.size == 2 else [HYBRID, dict(reversed(HYBRID.items()))]
    )
    return [mesh, *map(fs.init_mesh, axes)]


two_or_four = pytest.mark.parametrize("ranks", [*gloo(2), *slow(gloo(4))], ids=str)


@two_or_four
def test_every_bit_arrives_and_only_what_moves_is_sent_in_one_exchange_a_buffer(ranks: Ranks) -> None:
    """Between any two meshes and layouts."""
    results = ranks.run(moves)
    for wrong, sent in results:
        assert wrong == []
        assert len(sent) == (3 * len(OPTIONS)) ** 2 + 9
        for case, (nbytes, planned, exchanges, buffers) in sent.items():
            assert (case, nbytes, exchanges) == (case, planned, buffers)
    assert sum(nbytes for _, sent in results for nbytes, *_ in sent.values()) > 0


def errors(mesh: fs.Mesh) -> dict[str, str]:
    """What this rank is told when the last one does something else than the others."""
    model, last = two_layers(), dist.get_rank() == dist.get_world_size() - 1
    other_mesh = meshes(mesh)[1]
    params, planned = fs.shard(model, fs.plan(model, mesh)), on_one_rank(model, other_mesh)
    calls = {
        "a stale layout": (params, on_one_rank(two_layers((5, 8, 3)), other_mesh) if last else planned),
        "another layout": (params, on_one_rank(model, other_mesh, units=64) if last else planned),
        "other leaves": (mapped(lambda x: None if last else x, params), planned),
        "a simulated mesh": (params, fs.plan(model, fs.simulated_mesh(4))),
    }
    return {what: text_of(fs.reshard, *arguments) for what, arguments in calls.items()}


def on_one_rank(model: nn.Module, mesh: fs.Mesh, **options: Any) -> fs.Layout:
    """A layout that no other rank has been asked about."""
    return fs.plan(model, fs.simulated_mesh(mesh.axes), **options).on(mesh)


@two_or_four
def test_a_rank_with_a_wrong_layout_gets_an_error_on_all_ranks(ranks: Ranks) -> None:
    *others, last = ranks.run(errors)
    for told in others:
        assert f"RuntimeError: reshard failed on rank {len(others)}" in told["a stale layout"]
        for what in ("another layout", "other leaves"):
            assert "RuntimeError: reshard: the ranks disagree. First difference:" in told[what], what
    wrong = "'0.weight': (7, 5), torch.float32 in the tree; (8, 5), torch.float32 in the layout"
    assert wrong in last["a stale layout"]
    for told in (*others, last):
        assert "the layout on Mesh(shard=4, simulated, cpu): expected the same processes" in told["a simulated mesh"]
