"""Whole buffers to shards: each rank cuts its own, or one rank sends everybody theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..collectives.primitives import all_gather
from ..layout.buffers import Buffer, Slot, fill_shard, of_rank, pack, pack_shard
from ..layout.layout import Layout, shard_at, shard_axis, shard_index
from ..mesh.axes import coordinate_of
from ..storage.memory_kind import to_working_device
from ..torch_internals.autograd import is_functorch_wrapped_tensor


def cut_buffer(tensors: Mapping[str, Tensor], buffer: Buffer, layout: Layout) -> Tensor:
    """This rank's shard of ``tensors``; outside ``spmd``, of all simulated ranks, stacked."""
    mesh = layout.mesh
    transformed = any(is_functorch_wrapped_tensor(tensors[slot.name]) for slot in buffer.slots)
    if mesh.in_spmd and (mesh.is_simulated or transformed):  # not written into plain tensors
        return _own_row(to_working_device(pack(tensors, buffer).detach(), mesh.device), buffer, layout)
    if mesh.in_spmd:
        return pack_shard(tensors, buffer, int(shard_index(buffer, layout)), mesh.device)
    return stacked(_rows(tensors, buffer, layout), layout)


def blank_rows(buffer: Buffer, layout: Layout) -> Tensor:
    """Zeros for :func:`fill_rows`: a row for each shard that is made here."""
    numbers = _numbers(buffer, layout)
    return torch.zeros(len(numbers), buffer.shard_numel, dtype=buffer.dtype, device=layout.mesh.device)


def fill_rows(rows: Tensor, slot: Slot, value: Tensor, buffer: Buffer, layout: Layout) -> None:
    """Write the parts of one parameter into the rows of :func:`blank_rows`."""
    flat = value.detach().reshape(-1)
    for row, number in zip(rows, _numbers(buffer, layout), strict=True):
        _, offset, numel, start = buffer.part(slot, number)
        row[offset : offset + numel] = flat[start : start + numel]


def shard_of_rows(rows: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    """What :func:`cut_buffer` returns, from rows that were filled parameter by parameter."""
    mesh = layout.mesh
    if mesh.in_spmd:
        return _own_row(rows.flatten(), buffer, layout) if mesh.is_simulated else rows[0]
    return stacked(rows, layout)


def _numbers(buffer: Buffer, layout: Layout) -> Sequence[int]:
    """The shards that are made here; simulated ranks choose theirs among all of them."""
    return range(buffer.num_shards) if layout.mesh.is_simulated else shards_here(buffer, layout)


def shards_here(buffer: Buffer, layout: Layout) -> Sequence[int]:
    """The shards of ``buffer`` that this process has: its own, or those of all simulated ranks."""
    return [int(shard_index(buffer, layout))] if layout.mesh.in_spmd else range(buffer.num_shards)


def stacked(rows: Tensor, layout: Layout) -> Tensor:
    """The shards of all simulated ranks, from a row for each shard; the one row of what is whole is everybody's."""
    rows = rows.expand(layout.num_shards, -1)
    names = [name for name in layout.shard_axes if name in layout.mesh.axes]
    rows = rows.unflatten(0, [layout.axis_size(name) for name in names] or [1])  # in the order of the shard axes
    order = [names.index(name) for name, _ in layout.axes if name in names]
    rows = rows.permute(*order, -1) if names else rows
    ones = [size if name in names else 1 for name, size in layout.axes]
    return rows.reshape(*ones, -1).expand(*layout.mesh.axes.values(), -1).contiguous()


def in_shard_order(x: Tensor, layout: Layout) -> Tensor:
    """Shards with one dim per shard axis, in the mesh's order, with these dims in the order of the shard axes."""
    inside = [name for name in layout.mesh.axes if name in layout.shard_axes]
    return x.permute(*(inside.index(name) for name in layout.shard_axes if name in inside), -1)


def receive_buffer(tensors: Mapping[str, Tensor], buffer: Buffer, layout: Layout, source: int) -> Tensor:
    """This rank's shard of the ``tensors`` of rank ``source``; other real ranks need to have none."""
    mesh = layout.mesh
    if not mesh.in_spmd or mesh.size == 1:
        return cut_buffer(tensors, buffer, layout)  # one process has the values of all
    at = dict(zip(mesh.axes, coordinate_of(source, tuple(mesh.axes.values())), strict=True))
    if mesh.is_simulated:  # the values of all ranks are in memory
        flat = to_working_device(pack(tensors, buffer).detach(), mesh.device)
        for axis in mesh:
            flat = all_gather(flat[None], axis)[at[axis.name]]
        return _own_row(flat, buffer, layout)
    return _send(tensors, buffer, layout, source, {**at, layout.shard_axis: shard_at(at, layout)})


def _send(tensors: Mapping[str, Tensor], buffer: Buffer, layout: Layout, source: int, at: Mapping[str, int]) -> Tensor:
    """From the source to the other shards, and from each to its copies: no rank receives more than it keeps."""
    mesh = layout.mesh
    shards = [shard_axis(layout)] if layout.num_shards > 1 else []
    axes = [*shards, *(axis for axis in mesh if axis.size > 1 and axis.name not in layout.shard_axes)]
    x = torch.empty(0, buffer.shard_numel, dtype=buffer.dtype, device=mesh.device)  # rows of what this rank has
    x = _rows(tensors, buffer, layout) if mesh.rank == source else x
    for i, axis in enumerate(axes):
        if any(other.backend.index() != at[other.name] for other in axes[i + 1 :]):
            continue  # these ranks get theirs from the next axis
        kind = "scatter" if axis in shards and buffer.num_shards > 1 else "broadcast"
        if kind == "broadcast":
            x = x[0] if len(x) else x.new_empty(buffer.shard_numel)
        x = axis.issue(kind, x, key=buffer.key, source=at[axis.name]).wait()[None]
    return x[0]


def _rows(tensors: Mapping[str, Tensor], buffer: Buffer, layout: Layout) -> Tensor:
    """The shards of all ranks of the shard axis, as rows; copies of the whole have one memory."""
    rows = torch.zeros(buffer.num_shards, buffer.shard_numel, dtype=buffer.dtype, device=layout.mesh.device)
    for rank, row in enumerate(rows):
        fill_shard(row, tensors, buffer, rank)
    return rows if buffer.num_shards == layout.num_shards else rows.expand(layout.num_shards, -1)


def _own_row(flat: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    if buffer.num_shards == 1:
        return flat
    index, rows = shard_index(buffer, layout), flat.view(buffer.num_shards, -1)
    return of_rank(rows, index) if isinstance(index, Tensor) else rows[index].clone()  # without the memory of others
