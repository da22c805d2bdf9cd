"""Named tensors to padded flat buffers and back: pure tensor functions, differentiable, under any transform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Buffer


@dataclass(frozen=True)
class Pieces:
    """A 1-D tensor of ``numel`` elements that is not laid out: parts at ascending offsets, and zeros between them."""

    numel: int
    parts: Sequence[tuple[int, Tensor]]

    def laid(self) -> Tensor:
        """As one tensor: one concatenation, whose gradient is one split."""
        like = self.parts[0][1]
        parts, end = [], 0
        for offset, part in [*self.parts, (self.numel, like.new_zeros(0))]:
            parts += [like.new_zeros(offset - end), part]
            end = offset + part.numel()
        return torch.cat([part for part in parts if part.numel()] or parts[:1])

    def within(self, low: int, high: int) -> Pieces:
        """Elements ``[low, high)``: views."""
        cuts = ((at, part, max(at, low), min(at + part.numel(), high)) for at, part in self.parts)
        return Pieces(high - low, [(a - low, part[a - at : b - at]) for at, part, a, b in cuts if a < b])

    def joined(self, small: int) -> Pieces:
        """The same with neighbours of fewer than ``small`` elements laid together, gaps and all."""
        groups: list[list[tuple[int, Tensor]]] = []
        for at, part in self.parts:
            if groups and part.numel() < small and groups[-1][-1][1].numel() < small:
                groups[-1].append((at, part))
            else:
                groups.append([(at, part)])
        return Pieces(self.numel, [(group[0][0], _lay(group)) for group in groups])

    def to(self, dtype: torch.dtype) -> Pieces:
        return Pieces(self.numel, [(at, part.to(dtype)) for at, part in self.parts])


def pieces(tensors: Mapping[str, Tensor], buffer: Buffer) -> Pieces:
    """``buffer`` from its parameters, without a copy of those that are contiguous."""
    return Pieces(buffer.numel, [(slot.offset, tensors[slot.name].reshape(-1)) for slot in buffer.slots])


def pack(tensors: Mapping[str, Tensor], buffer: Buffer) -> Tensor:
    """All of ``buffer`` as one 1-D tensor, with zeros between and behind the parameters."""
    return pieces(tensors, buffer).laid()


def unpack(flat: Tensor, buffer: Buffer) -> dict[str, Tensor]:
    """The parameters of ``buffer`` as views of ``flat``.

    Cut by one split and not by slices: the backward of a slice is a zero buffer of full size, for every parameter.
    """
    parts = flat.split(buffer.split_sizes())
    return {slot.name: part.view(slot.shape) for slot, part in zip(buffer.slots, parts[::2], strict=True)}


def pack_shard(tensors: Mapping[str, Tensor], buffer: Buffer, rank: int, device: torch.device) -> Tensor:
    """Shard ``rank`` of ``pack(tensors, buffer)`` on ``device``, without ever holding the whole buffer."""
    shard = torch.zeros(buffer.shard_numel, dtype=buffer.dtype, device=device)
    for name, offset, numel, start in buffer.slices(rank):
        shard[offset : offset + numel] = tensors[name].detach().reshape(-1)[start : start + numel]
    return shard


def _lay(group: Sequence[tuple[int, Tensor]]) -> Tensor:
    if len(group) == 1:
        return group[0][1]
    start = group[0][0]
    return Pieces(_end(group) - start, [(at - start, part) for at, part in group]).laid()


def _end(group: Iterable[tuple[int, Tensor]]) -> int:
    return max(at + part.numel() for at, part in group)
