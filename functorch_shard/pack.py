"""Named tensors to padded flat buffers and back: pure tensor functions, differentiable, under any transform."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .layout import Buffer


def pack(tensors: Mapping[str, Tensor], buffer: Buffer, out: Tensor | None = None) -> Tensor:
    """All of ``buffer`` as one 1-D tensor, with zeros between and behind the parameters.

    One concatenation: its gradient is one split, and padding has none. ``out`` takes it, in another dtype if need be.
    """
    like = tensors[buffer.slots[0].name]
    gaps = buffer.split_sizes()[1::2]
    pieces = [like.new_zeros(buffer.slots[0].offset)]
    for slot, gap in zip(buffer.slots, gaps, strict=True):
        pieces += [tensors[slot.name].reshape(-1), like.new_zeros(gap)]
    pieces = [piece for piece in pieces if piece.numel()] or pieces[:1]
    return torch.cat(pieces) if out is None else torch.cat(pieces, out=out)


def unpack(flat: Tensor, buffer: Buffer) -> dict[str, Tensor]:
    """The parameters of ``buffer`` as views of ``flat``.

    Cut by one split and not by slices: the backward of a slice is a zero buffer of full size, for every parameter.
    """
    pieces = flat.split(buffer.split_sizes())
    return {slot.name: piece.view(slot.shape) for slot, piece in zip(buffer.slots, pieces[::2], strict=True)}


def pack_shard(tensors: Mapping[str, Tensor], buffer: Buffer, rank: int, device: torch.device) -> Tensor:
    """Shard ``rank`` of ``pack(tensors, buffer)`` on ``device``, without ever holding the whole buffer."""
    shard = torch.zeros(buffer.shard_numel, dtype=buffer.dtype, device=device)
    for name, offset, numel, start in buffer.slices(rank):
        shard[offset : offset + numel] = tensors[name].detach().reshape(-1)[start : start + numel]
    return shard
