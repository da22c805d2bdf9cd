"""Every kind of collective, issued under wrappers that record them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.collectives import all_gather, pmax, psum, psum_scatter
from functorch_shard.communication import Collective, Counter, wrap
from functorch_shard.testing import count_collectives
from tests.support.models import loss_of

Seen = list[tuple[Any, ...]]

KINDS = {"psum", "pmax", "all_gather", "psum_scatter", "all_to_all"}


def shown(op: Collective) -> tuple[Any, ...]:
    return op.kind, op.axis, op.numel, op.dtype, op.key


def noting(seen: Seen) -> Callable[[Any], Any]:
    return wrap(lambda op, x, send: (seen.append(shown(op)), send(op, x))[1])


def every_kind(mesh: fs.Mesh) -> None:
    """A step, a copy from one rank, encoded gradients, and each collective by itself, in forward and backward."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    layout = fs.plan(model, mesh)
    ranks = tuple(mesh.axes.values()) if mesh.is_simulated else ()
    rows = torch.ones(*ranks, 2 * mesh.size, dtype=torch.float64)

    def one_rank(x: Tensor) -> Any:
        params = fs.shard(model, layout, from_rank=1)
        inputs, targets = x[:1].expand(2, 5), x[:1].expand(2, 3)
        grads = fs.grad(lambda p: loss_of(model, fs.gather(p), inputs, targets))(params)
        encoded = fs.codecs.scatter_encoded_grads(fs.gather(params, lazy=False), fs.codecs.int8(), layout=layout)
        each = psum(x, mesh), pmax(x, mesh), all_gather(x, mesh), psum_scatter(x, mesh)
        slope = fs.grad(lambda x: psum(x.square(), mesh).sum())(x)
        return dict(grads), encoded[0], each, slope

    mesh.spmd(one_rank)(rows)


def records_of(plain: fs.Mesh) -> tuple[Seen, Seen, Seen, int]:
    """What the recorder, two wrappers and a counter saw of one program."""
    first, last, counter = list[Any](), list[Any](), Counter()
    mesh = plain.with_backend(noting(first)).with_backend(counter).with_backend(noting(last))
    with count_collectives() as recorded:
        every_kind(mesh)
    return list(map(shown, recorded.issued)), first, last, counter.total.number


def in_threads(*works: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


AXES = [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}]


def check_records(recorded: Seen, first: Seen, last: Seen, counted: int) -> None:
    assert recorded == first == last
    assert counted == len(recorded)
    assert {kind for kind, *_ in recorded} >= KINDS
