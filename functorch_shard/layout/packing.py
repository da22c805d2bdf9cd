"""Named tensors to padded flat buffers and back: pure tensor functions, differentiable, under any transform."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .buffers import Buffer


def pack(tensors: Mapping[str, Tensor], buffer: Buffer, out: Tensor | None = None) -> Tensor:
    """All of ``buffer`` as one 1-D tensor, with zeros between and behind the parameters.

    One concatenation: its gradient is one split, and padding has none. ``out`` takes it, in another dtype if need be.
    """
    _refuse_sparse(tensors, buffer)
    like = tensors[buffer.slots[0].name]
    gaps = buffer.split_sizes()[1::2]
    pieces = [like.new_zeros(buffer.slots[0].offset)]
    for slot, gap in zip(buffer.slots, gaps, strict=True):
        pieces += [tensors[slot.name].reshape(-1), like.new_zeros(gap)]
    pieces = [piece for piece in pieces if piece.numel()] or pieces[:1]
    return torch.cat(pieces) if out is None else torch.cat(pieces, out=out)


def _refuse_sparse(tensors: Mapping[str, Tensor], buffer: Buffer) -> None:
    sparse = [slot.name for slot in buffer.slots if tensors[slot.name].layout is not torch.strided]
    if sparse:
        raise ValueError(f"gather: the gradient of {', '.join(map(repr, sparse))} is sparse{_SPARSE}")


@contextmanager
def sparse_explained(verb: str) -> Iterator[None]:
    """Torch's word that a parameter has a sparse gradient, where it is a view of its buffer, in words that help."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("reshape is not implemented for sparse tensors"):
            raise ValueError(f"{verb}: the gradient of a gathered parameter is sparse{_SPARSE}") from error
        raise


_SPARSE = ", as F.embedding(..., sparse=True) makes it, and buffers are dense. Pass sparse=False."


def unpack(flat: Tensor, buffer: Buffer) -> dict[str, Tensor]:
    """The parameters of ``buffer`` as views of ``flat``.

    Cut by one split and not by slices: the backward of a slice is a zero buffer of full size, for every parameter.
    """
    pieces = flat.split(buffer.split_sizes())
    return {slot.name: piece.view(slot.shape) for slot, piece in zip(buffer.slots, pieces[::2], strict=True)}


def pack_shard(tensors: Mapping[str, Tensor], buffer: Buffer, rank: int, device: torch.device) -> Tensor:
    """Shard ``rank`` of ``pack(tensors, buffer)`` on ``device``, without ever holding the whole buffer."""
    shard = torch.zeros(buffer.shard_numel, dtype=buffer.dtype, device=device)
    fill_shard(shard, tensors, buffer, rank)
    return shard


def fill_shard(shard: Tensor, tensors: Mapping[str, Tensor], buffer: Buffer, rank: int) -> None:
    """Write the parameters of shard ``rank`` into ``shard``, which has zeros for padding already."""
    for name, offset, numel, start in buffer.slices(rank):
        shard[offset : offset + numel] = tensors[name].detach().reshape(-1)[start : start + numel]


def without_padding(shard: Tensor, buffer: Buffer, rank: Tensor | int) -> Tensor:
    """``shard`` with zeros for padding, whatever stood there; as it is where ``buffer`` has none.

    ``rank`` is which shard it is: an int, or a tensor without dims that a vmap over simulated ranks has batched.
    """
    if buffer.numel == buffer.parameter_numel:
        return shard
    return torch.where(of_rank(_owned(buffer, rank, shard.device), rank), shard, 0)


def slot_of_each(buffer: Buffer, device: torch.device) -> Tensor:
    """The number of the slot that each element belongs to, one row a shard; ``len(buffer.slots)`` for padding."""
    ids = torch.full((buffer.numel,), len(buffer.slots), device=device)
    for i, slot in enumerate(buffer.slots):
        ids[slot.offset : slot.end] = i
    return ids.view(buffer.num_shards, -1)


def of_rank(rows: Tensor, rank: Tensor | int) -> Tensor:
    """The row of this rank; ``rows`` is one row for a rank that is known, or all of them."""
    return rows.index_select(0, rank.reshape(1).to(rows.device)).squeeze(0) if isinstance(rank, Tensor) else rows[0]


def _owned(buffer: Buffer, rank: Tensor | int, device: torch.device) -> Tensor:
    """Where there are parameters, one row a shard; of a rank that is known, its row alone."""
    ranks = range(buffer.num_shards) if isinstance(rank, Tensor) else [rank]
    mask = torch.zeros(len(ranks), buffer.shard_numel, dtype=torch.bool, device=device)
    for row, number in zip(mask, ranks, strict=True):
        for _, offset, numel, _ in buffer.slices(number):
            row[offset : offset + numel] = True
    return mask
