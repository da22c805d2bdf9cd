"""What a layout says about DTensors, without any rank: forms, parts, equality, JSON."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functorch_shard as fs
from functorch_shard.layout.buffers import Buffer, DTensorForm, Unit
from functorch_shard.layout.layout import Layout, lines_of
from tests.support.refusals import refused

MESH = fs.simulated_mesh(2)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data()
)
@settings(max_examples=100, deadline=None)
def test_a_local_part_has_the_shape_that_chunks_have(shape: list[int], sizes: list[int], data: st.DataObject) -> None:
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in sizes]
    placements = tuple("R" if dim is None else f"S({dim})" for dim in dims)
    form = DTensorForm(tuple(shape), placements, tuple((f"axis {i}", size) for i, size in enumerate(sizes)))
    numel = 0
    for place in product(*map(range, sizes)):
        part = torch.zeros(shape)
        for dim, size, index in zip(dims, sizes, place, strict=True):
            if dim is not None:
                chunks = part.chunk(size, dim)
                part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
        assert form.part_at(place)[0] == tuple(part.shape)
        numel += part.numel()
    copies = prod(size for dim, size in zip(dims, sizes, strict=True) if dim is None)
    assert numel == copies * prod(shape)  # the parts tile the whole


def layout_of_parts(**changes: Any) -> Layout:
    """As ``plan`` would make it on the first of two ranks of a tensor axis: (2, 3) of (3, 3), and a copied bias."""
    layout = fs.plan({"m.w": torch.zeros(2, 3), "m.b": torch.zeros(5), "m.p": torch.zeros(1)}, MESH)
    form = DTensorForm((3, 3), ("S(0)",), (("tensor", 2),))
    w, b, p = layout.units[0].buffers[0].slots
    slots = replace(w, dtensor=replace(form, **changes)), replace(b, dtensor=DTensorForm((5,), ("R",), form.axes)), p
    buffer: Buffer = replace(layout.units[0].buffers[0], slots=slots)
    return replace(layout, units=(Unit("m", (buffer,)),))


def test_layouts_differ_when_the_dtensors_do() -> None:
    layout = layout_of_parts()
    plain = fs.plan({"m.w": torch.zeros(2, 3), "m.b": torch.zeros(5), "m.p": torch.zeros(1)}, MESH)
    others = [layout_of_parts(shape=(4, 3)), layout_of_parts(axes=(("other", 2),))]
    assert layout == layout_of_parts()
    assert all(layout != other for other in [plain, *others])
    assert len({layout, layout_of_parts(), plain, *others}) == 4
    text = "'m.w': shape (2, 3), torch.float32, trainable, local part of a DTensor of shape (3, 3), S(0) over tensor=2"
    assert text in "\n".join(lines_of(layout))
    assert str(layout).endswith("16 bytes\nDTensors: the local parts of 2 parameters over tensor=2")
    assert "DTensor" not in str(plain)


def test_a_layout_with_dtensors_needs_the_ranks_that_they_are_on() -> None:
    layout = layout_of_parts()
    shards = {key: torch.zeros(2, buffer.shard_numel) for key, buffer in layout.buffers.items()}
    text = refused(fs.gather, fs.Sharded(shards, layout))
    assert "Mesh(shard=2, simulated, cpu) has no axes 'tensor' beside it" in text
    assert "Mesh.from_device_mesh(device_mesh['shard'])" in text
