"""The rows of the transform matrix under torch's ``fully_shard``, run as they are on two gloo ranks.

The same programs: ``functional_call`` with the module's parameters, which are DTensors, under the transforms of torch.
Where a row has ``fs.grad`` it is ``backward()``, which is what FSDP2 is made for.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

import functorch_shard as fs
from tests.laws.convention import Samples, direction, model
from tests.laws.nestings import Row, Side, Tree, attempted, derived, verdict
from tests.support.pool import run_ranks
from tests.support.tensor_parallel import whole

RANKS = 2


def verdicts(rows: list[Row]) -> list[str]:
    """For each row: right, wrong, or the error."""
    results = run_ranks(_on_this_rank, RANKS, rows)
    first = [next((x for x in of_ranks if isinstance(x, str)), of_ranks[0]) for of_ranks in zip(*results, strict=True)]
    return [verdict(result, RANKS, row) for result, row in zip(first, rows, strict=True)]


def _on_this_rank(rows: list[Row]) -> list[Any]:
    fs.init_mesh()
    mesh = init_device_mesh("cpu", (RANKS,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_result(row, mesh) for row in rows]


def _result(row: Row, mesh: Any) -> Any:
    result = attempted(lambda row: _of_row(row, mesh), row)
    errors: list[Any] = [None] * RANKS
    dist.all_gather_object(errors, result if isinstance(result, str) else None)  # before anything that needs all ranks
    found = next((text for text in errors if text), None)
    return found or _whole(result)


def _of_row(row: Row, mesh: Any) -> Tree:
    sharded = copy.deepcopy(model())
    for part in (sharded[0], sharded[2], sharded):  # pyright: ignore[reportIndexIssue]
        fully_shard(part, mesh=mesh)
    params = dict(sharded.named_parameters())
    v = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in direction().items()}
    samples, rank = Samples.of(RANKS), dist.get_rank()

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return ((functional_call(sharded, p, (x,)) - y) ** 2).mean()

    side = Side(loss, grad=_by_backward, dot=_dot)
    return derived(side, row, params, v, samples.x[rank], samples.y[rank])


def _by_backward(fn: Any) -> Any:
    def gradient(p: Tree) -> Tree:
        fn(p).backward(create_graph=True)  # for a derivative of it
        return {name: x.grad for name, x in p.items()}

    return gradient


def _dot(a: Tree, b: Tree) -> Tensor:
    return torch.stack([whole((a[name] * b[name]).sum()) for name in a]).sum()


def _whole(result: Tree) -> Any:
    if isinstance(result, dict):
        return {name: _plain(x) for name, x in result.items()}
    value = torch.as_tensor(_plain(result)).clone()
    dist.all_reduce(value)
    return (value / RANKS).numpy()


def _plain(x: Any) -> Any:
    return whole(x).numpy(force=True)
