"""Rows of tensors with the values of all ranks, each at the start of memory of its rank as on real ranks.

The offset of a row in its memory differs between ranks, and torch's programs can depend on it: ``make_dual`` takes a
tangent as it is if its offset and strides are those of its primal, and copies it otherwise. Inside of a vmap that copy
has a batch, and ranks of one program would gather tangents of different shapes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from ..torch_internals.tensors import identity_of_storage


def at_start_of_memory(rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The rows of one rank, the same memory; those of one storage still share one, and keep their distances in it.

    Tensors that autograd has a part in are left as they are, and files, which a storage is known by.
    """
    movable = {i: x for i, x in rows.items() if _is_movable(x)}
    found: dict[Hashable, list[Tensor]] = {}
    for x in movable.values():
        found.setdefault(_memory(x), []).append(x)
    starts = {memory: min(map(_start, xs)) for memory, xs in found.items()}
    own = {memory: xs[0].untyped_storage()[starts[memory] : max(map(_end, xs))] for memory, xs in found.items()}
    moved = {i: _in_storage(x, own[_memory(x)], _start(x) - starts[_memory(x)]) for i, x in movable.items()}
    return {**rows, **moved}


def _is_movable(x: Tensor) -> bool:
    plain = type(x) is Tensor and x.layout is torch.strided and not (x.requires_grad or x.is_inference())
    if not plain or x.is_meta or x.is_quantized or x.is_conj() or x.is_neg() or not x.numel():
        return False
    return x.untyped_storage().filename is None


def _memory(x: Tensor) -> Hashable:
    return identity_of_storage(x), x.element_size()  # offsets are in elements


def _start(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _end(x: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return _start(x) + (last + 1) * x.element_size()


def _in_storage(x: Tensor, storage: torch.UntypedStorage, start: int) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor would count no writes
        own = torch.empty(0, dtype=x.dtype, device=x.device)
        return own.set_(storage, start // x.element_size(), x.shape, x.stride())
