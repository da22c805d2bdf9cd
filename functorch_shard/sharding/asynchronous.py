"""The asynchronous interpreter of a schedule: a collective is started now, the operations after it are done on wait.

The differentiable one is ``collectives.data_parallel``; both are folds over the same operations, Note [Schedule], so
their results are equal bitwise. Nothing here is seen by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.codecs import decode_rows, encode_rows
from ..collectives.data_parallel import no_communication, run
from ..communication.axis import Axis
from ..communication.work import Finished, Work
from ..layout.schedule import AllGather, AllReduce, Cast, Ops, up_to_communication
from ..mesh.mesh import Mesh


def start_gather(ops: Ops, shard: Tensor, key: str, mesh: Mesh, device: torch.device) -> Work:
    """The whole buffer ``key`` on ``device``; dims before the last are batch dims."""
    front, op, behind = up_to_communication(ops)
    dtypes = [one.dtype for one in front if isinstance(one, Cast)]
    if not isinstance(op, AllGather):
        return Finished(_copied(shard, dtypes[-1], device))
    if op.codec is None:
        return _start_all_gather(mesh[op.axis], shard, dtypes[-1], key, device)
    message, form = encode_rows(shard.to(device, non_blocking=True), op.codec)
    sizes = mesh[op.axis].size, message.shape[-1]

    def decoded(messages: Tensor) -> Tensor:
        rows = decode_rows(messages.unflatten(-1, sizes), form, op.codec)
        return run(behind, rows.flatten(-2), no_communication)

    return _start_all_gather(mesh[op.axis], message, message.dtype, key, device).then(decoded)


def start_reduction(ops: Ops, packed: Tensor, key: str, mesh: Mesh) -> Work:
    """What ``ops`` make of the full gradient of buffer ``key``; ``packed`` is written over, and read until the wait."""

    def all_reduce(op: AllReduce, x: Tensor) -> Tensor:
        return mesh[op.axis].issue("psum", x, key=key).wait()

    front, op, behind = up_to_communication(ops)
    if op is None or isinstance(op, AllReduce):  # of copies alone: they wait for each other at the end
        return Work(lambda: run(ops, packed, all_reduce, Tensor.div_))
    work = mesh[op.axis].issue("psum_scatter", run(front, packed, no_communication, Tensor.div_), key=key)
    return work.then(lambda total: run(behind, total, all_reduce, Tensor.div_))


def _start_all_gather(axis: Axis, x: Tensor, dtype: torch.dtype, key: str, device: torch.device) -> Work:
    """In ``dtype``, cast on the way; ranks are laid side by side in the last dim."""
    if x.ndim > 1:
        rows = _copied(x, dtype, device)
        return Work(lambda: axis.issue("all_gather", rows, key=key, dim=rows.ndim - 1).wait().contiguous())
    return axis.issue("all_gather", x, dtype=dtype, key=key, device=device)


def _copied(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As it is now, row-major in memory of its own: a shard may be a view, and may be written to meanwhile."""
    return x.new_empty(x.shape, dtype=dtype, device=device).copy_(x, non_blocking=True)
