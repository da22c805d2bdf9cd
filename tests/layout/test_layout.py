"""Layouts: where parameters start, how buffers are padded; pickle, print and equality."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from math import lcm
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functorch_shard as fs
from functorch_shard.layout.layout import Layout

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]


def test_a_packed_shard_has_numel_over_ranks_elements_rounded_up() -> None:
    for numel in (0, 1, 7, 17 * 257):
        layout = fs.plan({"p": torch.zeros(numel)}, fs.simulated_mesh(5), align_bytes=0)
        assert layout.buffers["(root)"].shard_numel == -(-numel // 5)


@given(
    parameters=st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    align_bytes=st.sampled_from([0, 1, 2, 10, 16, 64]),
    units=st.sampled_from(["auto", 1, 100, 10_000]),
)
@settings(max_examples=50, deadline=None)
def test_every_parameter_starts_at_a_multiple_of_align_bytes(
    parameters: list[tuple[int, torch.dtype]], ranks: int, align_bytes: int, units: Any
) -> None:
    tensors = {f"{i}.w": torch.zeros(numel, dtype=dtype) for i, (numel, dtype) in enumerate(parameters)}
    layout = fs.plan(tensors, fs.simulated_mesh(ranks), units=units, align_bytes=align_bytes)
    for slot in layout.slots.values():
        assert (slot.offset * slot.dtype.itemsize) % (layout.align_bytes or 1) == 0
    for buffer in layout.buffers.values():
        step = lcm(layout.align_bytes or 1, buffer.dtype.itemsize)
        gap_bytes = (buffer.numel - buffer.parameter_numel) * buffer.dtype.itemsize
        assert gap_bytes < step * len(buffer.slots) + layout.num_shards * buffer.dtype.itemsize


def test_shards_of_many_elements_are_multiples_of_64_and_packed_and_small_ones_are_not_padded() -> None:
    sizes = [4095 * 3, 4097 * 3]
    for align_bytes, expected in ((16, [4095, 4160]), (0, [4095, 4097])):
        layouts = [fs.plan({"p": torch.zeros(n)}, fs.simulated_mesh(3), align_bytes=align_bytes) for n in sizes]
        assert [layout.buffers["(root)"].shard_numel for layout in layouts] == expected


def test_slots_are_aligned_in_the_smallest_dtype_that_they_are_gathered_or_reduced_in() -> None:
    values = {"a": torch.zeros(1), "b": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64), "m": torch.zeros(1)}
    for policy, offset in (
        (None, 4),
        (fs.MixedPrecision(torch.bfloat16), 8),
        (fs.MixedPrecision(reduce_dtype=torch.bfloat16), 8),
        (fs.MixedPrecision(torch.float64), 4),
    ):
        layout = fs.plan(values, fs.simulated_mesh(2), precision=policy, units=[["a", "b", "n"], ["m"]])
        assert layout.slots["b"].offset == offset


def test_an_empty_parameter_is_in_no_shard() -> None:
    layout = fs.plan({"m.a": torch.zeros(0, 3), "m.b": torch.zeros(3), "m.c": torch.zeros(0)}, fs.simulated_mesh(2))
    assert [piece.name for rank in range(2) for piece in layout.slices(rank)] == ["m.b", "m.b"]
    assert list(layout.slots) == ["m.a", "m.b", "m.c"]


def test_the_hash_of_a_pickled_layout_is_right_in_another_process() -> None:
    layout = fs.plan({"p": torch.zeros(3)}, fs.simulated_mesh(2), reshard_after_forward=False)
    hash(layout)  # cached properties must not be pickled: strings hash differently in another process
    code = (
        "import pickle, sys, torch, functorch_shard as fs\n"
        "layout = pickle.load(sys.stdin.buffer)\n"
        "assert not layout.reshard_after_forward\n"
        "assert layout in {fs.plan({'p': torch.zeros(3)}, fs.simulated_mesh(2), reshard_after_forward=False)}"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(layout), env=environment, check=True)


def example(ranks: int = 2, **options: Any) -> Layout:
    tensors = {"m.w": torch.zeros(3, 3), "m.b": torch.zeros(3), "m.n": torch.tensor(2)}
    return fs.plan(tensors, fs.simulated_mesh(ranks), **options)


def test_a_layout_fits_only_a_mesh_of_its_sizes() -> None:
    layout = example(2)
    with pytest.raises(ValueError, match=r"slices: got rank 2, expected 0 <= rank < 2 \('shard'\)"):
        layout.slices(2)
    message = r"Layout.on: the layout is for shard=2, the mesh has shard=3. A layout is for fixed sizes: plan a new"
    with pytest.raises(ValueError, match=message):
        layout.on(fs.simulated_mesh(3))
    mesh = fs.simulated_mesh(2)
    assert layout.on(mesh) == layout
    assert layout.on(mesh).mesh is mesh


def test_print_shows_a_table_and_the_ties() -> None:
    w = torch.zeros(5, 3)
    tensors = {"embed.w": w, "body.b": torch.zeros(1000, 7), "body.n": torch.tensor(1), "head.w": w}
    layout = fs.plan(tensors, fs.simulated_mesh({"replicate": 2, "shard": 4}), reduction="sum")
    assert str(layout) == TABLE
    assert str(example(align_bytes=0)).splitlines()[-1] == "shard=2; gradients: mean over ranks; slots packed"


TABLE = """\
buffer             dtype    parameters  elements  padding  shard  shard bytes
-----------------------------------------------------------------------------
embed              float32           1        15        1      4           16
body/float32       float32           1     7,000        0  1,750        7,000
body/int64/frozen  int64             1         1        3      1            8
total                                3     7,016        4  1,755        7,024
replicate=2 x shard=4; gradients: sum over ranks; slots aligned to 16 bytes
tied: head.w = embed.w"""


def test_a_layout_is_frozen_and_a_dict_key_and_copies_are_itself() -> None:
    layout = example()
    with pytest.raises(AttributeError, match="reduction"):
        layout.reduction = "sum"  # pyright: ignore[reportAttributeAccessIssue]
    assert {layout: 1}[example()] == 1
    assert copy.deepcopy(layout) is layout
    others = [example(precision=fs.MixedPrecision(torch.bfloat16)), example(reshard_after_forward=False)]
    others += [example(3), example(reduction="sum"), example(align_bytes=0), example(labels={"m.b": "x"})]
    assert all(other != layout for other in others)
    assert len({layout, example(), *others}) == 7
