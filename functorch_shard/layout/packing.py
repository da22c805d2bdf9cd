"""Pack named tensors into padded flat buffers and unpack them: differentiable functions, under any transform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .buffers import Buffer, Slot


def pack(tensors: Mapping[str, Tensor], buffer: Buffer, out: Tensor | None = None) -> Tensor:
    """Concatenate the parameters of ``buffer`` into one 1-D tensor, behind any batch dims, with zeros for padding.

    The gradient of one concatenation is one split, without padding. ``out`` may have another dtype.
    """
    like = tensors[buffer.slots[0].name]
    batch = batch_of(like, buffer.slots[0])
    parts = [like.new_zeros(*batch, start)] if (start := buffer.slots[0].offset) else []
    for slot, gap in zip(buffer.slots, buffer.split_sizes[1::2], strict=True):
        parts += [tensors[slot.name].reshape(*batch, slot.numel)] if slot.numel else []
        parts += [like.new_zeros(*batch, gap)] if gap else []
    parts = parts or [like.new_zeros(*batch, 0)]
    return torch.cat(parts, -1) if out is None else torch.cat(parts, -1, out=out)


def batch_of(x: Tensor, slot: Slot) -> torch.Size:
    """The dims of ``x`` in front of those of its parameter."""
    return x.shape[: x.ndim - len(slot.shape)]


def unpack(flat: Tensor, buffer: Buffer) -> dict[str, Tensor]:
    """Return the parameters of ``buffer`` as views of ``flat``.

    By one split and not by slices: the backward of every slice would allocate a zero buffer of full size.
    """
    parts = flat.split(buffer.split_sizes)
    return {slot.name: part.view(slot.shape) for slot, part in zip(buffer.slots, parts[::2], strict=True)}


def pack_shard(tensors: Mapping[str, Tensor], buffer: Buffer, rank: int, device: torch.device) -> Tensor:
    """Make shard ``rank`` of ``pack(tensors, buffer)`` on ``device``, without allocating the whole buffer."""
    shard = torch.zeros(buffer.shard_numel, dtype=buffer.dtype, device=device)
    fill_shard(shard, tensors, buffer, rank)
    return shard


def fill_shard(shard: Tensor, tensors: Mapping[str, Tensor], buffer: Buffer, rank: int) -> None:
    """Write the parameters of shard ``rank`` to ``shard``, whose padding is zero already."""
    for name, offset, numel, start in buffer.slices(rank):
        shard[offset : offset + numel] = tensors[name].detach().reshape(-1)[start : start + numel]


def without_padding(shard: Tensor, buffer: Buffer, rank: Tensor | int) -> Tensor:
    """Set the padding of ``shard`` to zero; return it unchanged if ``buffer`` has no padding.

    ``rank`` is the index of the shard: an int, or on simulated ranks a batched tensor of shape ``()``.
    """
    if buffer.numel == buffer.parameter_numel:
        return shard
    return torch.where(of_rank(_owned(buffer, rank, shard.device), rank), shard, 0)


def slot_of_each(buffer: Buffer, device: torch.device) -> Tensor:
    """The index of the slot of each element, one row per shard; ``len(buffer.slots)`` for padding."""
    blank = torch.full((buffer.numel,), len(buffer.slots), device=device)
    parts = [(slot.offset, torch.full((slot.numel,), i, device=device)) for i, slot in enumerate(buffer.slots)]
    return overlaid(blank, parts).view(buffer.num_shards, -1)


def of_rank(rows: Tensor, rank: Tensor | int) -> Tensor:
    """The row of this rank; ``rows`` has one row if ``rank`` is an int, otherwise all rows."""
    return rows.index_select(0, rank.reshape(1).to(rows.device)).squeeze(0) if isinstance(rank, Tensor) else rows[0]


def _owned(buffer: Buffer, rank: Tensor | int, device: torch.device) -> Tensor:
    """A mask of the elements that are not padding, one row per shard; only that of ``rank`` if it is an int."""
    ranks = range(buffer.num_shards) if isinstance(rank, Tensor) else [rank]
    blank, full = (make(buffer.shard_numel, dtype=torch.bool, device=device) for make in (torch.zeros, torch.ones))
    rows = ([(offset, full[:numel]) for _, offset, numel, _ in buffer.slices(number)] for number in ranks)
    return torch.stack([overlaid(blank, parts) for parts in rows])


def overlaid(blank: Tensor, parts: Iterable[tuple[int, Tensor]]) -> Tensor:
    """``blank``, of one dim, with ``parts`` from their offsets on, which are in order.

    Not written in place: ``torch.func.linearize`` forgets what is written to a view of a constant.
    """
    pieces, end = list[Tensor](), 0
    for offset, part in parts:
        pieces += [blank[end:offset], part]
        end = offset + part.numel()
    return torch.cat([*pieces, blank[end:]])
