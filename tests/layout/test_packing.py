"""Packing: bitwise inverse, zeros in every gap, and nothing that padding could leak through, under any transform."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad

import functorch_shard as fs
from functorch_shard.layout.buffers import Buffer, pack, unpack

SHAPES = [(), (0,), (3, 3), (1,), (0, 2), (7,), (2, 3, 5), (17, 257)]
ALIGNMENTS = [0, 2, 16, 64]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def tensors_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Any bits, none of them zero: every second one is stored transposed."""
    generator = torch.Generator().manual_seed(len(shapes))
    values = [torch.randint(1, 100, shape, generator=generator).to(dtype) for shape in shapes]
    return {f"p{i}": x.mT.contiguous().mT if x.ndim > 1 and i % 2 else x for i, x in enumerate(values)}


def planned(tensors: dict[str, Tensor], ranks: int, align_bytes: int = 16) -> tuple[fs.Layout, Buffer]:
    layout = fs.plan(tensors, fs.simulated_mesh(ranks), units=10**9, align_bytes=align_bytes)
    (buffer,) = layout.buffers.values()
    return layout, buffer


def padding_of(buffer: Buffer) -> Tensor:
    """True in padding."""
    mask = torch.ones(buffer.numel, dtype=torch.bool)
    for slot in buffer.slots:
        mask[slot.offset : slot.end] = False
    return mask


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, x in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (x.shape, x.dtype)
        assert torch.equal(actual[name], x)


@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    align_bytes=st.sampled_from(ALIGNMENTS),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
)
@settings(max_examples=100, deadline=None)
def test_unpack_inverts_pack_which_is_zero_in_padding_alone_and_the_shards_side_by_side(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, align_bytes: int, ranks: int
) -> None:
    tensors = tensors_of(shapes, dtype)
    layout, buffer = planned(tensors, ranks, align_bytes)
    flat = pack(tensors, buffer)
    assert (flat.shape, flat.dtype) == ((buffer.numel,), dtype)
    assert torch.equal(flat == 0, padding_of(buffer))
    assert_bitwise(unpack(flat, buffer), tensors)
    assert torch.equal(fs.shard(tensors, layout)[buffer.key].flatten(), flat)


def energy(tensors: dict[str, Tensor]) -> Tensor:
    return sum(((x**3).sum() for x in tensors.values()), torch.zeros((), dtype=torch.float64))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": torch.rand(s, generator=generator, dtype=torch.float64) for i, s in enumerate(SHAPES[:-1])}


def test_nan_in_padding_does_not_reach_any_value_and_its_gradient_is_zero(tensors: dict[str, Tensor]) -> None:
    _, buffer = planned(tensors, 5)
    padding = padding_of(buffer)
    assert padding.any()
    flat = pack(tensors, buffer)
    dirty = flat.masked_fill(padding, float("nan"))
    assert_bitwise(unpack(dirty, buffer), tensors)
    gradient = grad(lambda flat: energy(unpack(flat, buffer)))(dirty)
    assert (gradient[padding] == 0).all()
    assert torch.equal(gradient, 3 * flat**2)
    leaf = dirty.requires_grad_()
    energy(unpack(leaf, buffer)).backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)
