"""Lazy parameters whose data all ranks have in one memory: what one rank writes there, by any way, no other sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import functorch_shard as fs
from tests.support.ranks import gloo, on_each

SIDE = 512  # a part of two is large enough for shared memory
aten = torch.ops.aten


def whole() -> Tensor:
    return torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)


def sharded(mesh: fs.Mesh, **tensors: Tensor) -> fs.Sharded:
    return fs.shard(tensors, fs.plan(tensors, mesh, units=[[name] for name in tensors]))


@on_each(gloo(2))
def test_a_decode_that_writes_to_its_message_writes_to_that_of_this_rank(mesh: fs.Mesh) -> None:
    params = sharded(mesh, w=whole())
    codec = (lambda x: (x / 4, torch.full((1,), 4.0)), lambda encoded: encoded[0].mul_(encoded[1]))
    for _ in range(5):
        assert torch.equal(fs.gather(params, codec=codec)["w"] + 0, whole())


@on_each(gloo(2))
def test_batch_norm_writes_to_statistics_of_this_rank(mesh: fs.Mesh) -> None:
    mean, var, x = whole().flatten(), torch.ones(SIDE * SIDE), torch.zeros(2, SIDE * SIDE)
    for inference in (False, True):
        full = fs.gather(sharded(mesh, mean=mean, var=var))
        with torch.inference_mode(inference), torch.no_grad():
            F.batch_norm(x, full["mean"], full["var"], momentum=0.5)  # reads them
            for i in range(1, 4):
                F.batch_norm(x, full["mean"], full["var"], training=True, momentum=0.5)
                dist.barrier()
                assert torch.equal(full["mean"] + 0, mean / 2**i)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unsafe view": lambda w: aten._unsafe_view(w, [SIDE, SIDE]),
    "dropout": lambda w: F.dropout(w, training=False),
    "einsum": lambda w: torch.einsum("ij->ij", w),
}


@on_each(gloo(2))
def test_a_view_that_is_not_lazy_is_of_memory_of_this_rank(mesh: fs.Mesh) -> None:
    params = sharded(mesh, w=whole())
    for inference in (False, True):
        for name, view in VIEWS.items():
            with torch.inference_mode(inference), torch.no_grad():
                x = view(fs.gather(params)["w"])
                if type(x) is Tensor:  # and not lazy
                    x.mul_(2)
                    dist.barrier()
                    assert torch.equal(x, whole() * 2), name
