"""Packing: bitwise inverse, zeros in every gap, and nothing that padding could leak through, under any transform."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import functorch_shard as fs
from functorch_shard.layout.buffers import Buffer
from functorch_shard.layout.packing import pack, pack_shard, unpack

SHAPES = [(), (0,), (3, 3), (1,), (0, 2), (7,), (2, 3, 5), (17, 257)]
ALIGNMENTS = [0, 2, 16, 64]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
CPU = torch.device("cpu")
some_laws = settings(max_examples=50, deadline=None)


def tensors_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Any bits, none of them zero: every second one is stored transposed."""
    generator = torch.Generator().manual_seed(len(shapes))
    values = [torch.randint(1, 100, shape, generator=generator).to(dtype) for shape in shapes]
    return {f"p{i}": x.mT.contiguous().mT if x.ndim > 1 and i % 2 else x for i, x in enumerate(values)}


def buffer_of(tensors: dict[str, Tensor], ranks: int = 3, align_bytes: int = 16) -> Buffer:
    layout = fs.plan(tensors, fs.simulated_mesh(ranks), units=10**9, align_bytes=align_bytes)
    (buffer,) = layout.buffers.values()
    return buffer


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


packs = given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    align_bytes=st.sampled_from(ALIGNMENTS),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
)


@packs
@some_laws
def test_unpack_inverts_pack_bitwise(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, align_bytes: int, ranks: int
) -> None:
    tensors = tensors_of(shapes, dtype)
    buffer = buffer_of(tensors, ranks, align_bytes)
    flat = pack(tensors, buffer)
    assert (flat.shape, flat.dtype) == ((buffer.numel,), dtype)
    assert_bitwise(unpack(flat, buffer), tensors)
    assert torch.equal(pack(unpack(flat, buffer), buffer), flat)


@packs
@some_laws
def test_pack_is_zero_in_padding_and_only_there(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, align_bytes: int, ranks: int
) -> None:
    tensors = tensors_of(shapes, dtype)
    buffer = buffer_of(tensors, ranks, align_bytes)
    assert torch.equal(pack(tensors, buffer) == 0, padding_of(buffer))


@packs
@some_laws
def test_the_shards_side_by_side_are_the_packed_buffer(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, align_bytes: int, ranks: int
) -> None:
    tensors = tensors_of(shapes, dtype)
    buffer = buffer_of(tensors, ranks, align_bytes)
    shards = [pack_shard(tensors, buffer, rank, CPU) for rank in range(ranks)]
    assert {len(shard) for shard in shards} == {buffer.shard_numel}
    assert torch.equal(torch.cat(shards), pack(tensors, buffer))


def test_a_shard_owns_its_memory_and_has_no_graph() -> None:
    tensors = {"a": torch.ones(7, requires_grad=True)}
    shard = pack_shard(tensors, buffer_of(tensors, 1, 0), 0, CPU)
    assert not shard.requires_grad
    shard.zero_()
    assert tensors["a"].sum() == 7


def test_unpack_gives_views() -> None:
    tensors = tensors_of(SHAPES, torch.float32)
    buffer = buffer_of(tensors)
    flat = pack(tensors, buffer)
    assert all(
        x.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for x in unpack(flat, buffer).values()
    )


def test_bits_of_nan_are_kept() -> None:
    tensors = {"a": torch.tensor([float("nan"), -0.0, float("inf")]), "b": torch.tensor(float("-inf"))}
    back = unpack(pack(tensors, buffer := buffer_of(tensors)), buffer)
    assert torch.equal(back["a"].view(torch.int32), tensors["a"].view(torch.int32))
    assert torch.equal(back["b"], tensors["b"])


def energy(tensors: dict[str, Tensor]) -> Tensor:
    return sum(((x**3).sum() for x in tensors.values()), torch.zeros((), dtype=torch.float64))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": torch.rand(s, generator=generator, dtype=torch.float64) for i, s in enumerate(SHAPES[:-1])}


@pytest.mark.parametrize("align_bytes", ALIGNMENTS)
def test_nan_in_padding_does_not_reach_any_value_and_its_gradient_is_zero(
    tensors: dict[str, Tensor], align_bytes: int
) -> None:
    buffer = buffer_of(tensors, 5, align_bytes)
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


def test_nan_in_the_gradient_of_padding_does_not_reach_any_parameter(tensors: dict[str, Tensor]) -> None:
    buffer = buffer_of(tensors)
    cotangent = torch.ones(buffer.numel, dtype=torch.float64).masked_fill(padding_of(buffer), float("nan"))
    (gradient,) = vjp(lambda tensors: pack(tensors, buffer), tensors)[1](cotangent)
    assert_bitwise(gradient, {name: torch.ones_like(x) for name, x in tensors.items()})


def test_both_directions_pass_gradcheck_of_first_and_second_order(tensors: dict[str, Tensor]) -> None:
    buffer = buffer_of(tensors)
    names = list(tensors)
    leaves = [x.requires_grad_() for x in tensors.values()]

    def packed(*xs: Tensor) -> Tensor:
        return pack(dict(zip(names, xs, strict=True)), buffer) ** 2

    def unpacked(flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(x**2 for x in unpack(flat, buffer).values() if x.numel())

    flat = pack(tensors, buffer).detach().requires_grad_()
    assert torch.autograd.gradcheck(packed, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradcheck(unpacked, flat, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(unpacked, flat)


def test_both_directions_map_and_differentiate_forward(tensors: dict[str, Tensor]) -> None:
    buffer = buffer_of(tensors)
    double = {name: torch.stack([x, 2 * x], -1) for name, x in tensors.items()}
    flat = vmap(lambda tensors: pack(tensors, buffer), in_dims=-1)(double)
    assert torch.equal(flat, torch.stack([pack(tensors, buffer), 2 * pack(tensors, buffer)]))
    assert_bitwise(vmap(lambda flat: unpack(flat, buffer), out_dims=-1)(flat), double)
    tangent = jvp(lambda tensors: pack(tensors, buffer), (tensors,), (tensors,))[1]
    assert torch.equal(tangent, flat[0])
    assert_bitwise(jvp(lambda flat: unpack(flat, buffer), (flat[0],), (flat[1],))[1], unpack(flat[1], buffer))


def test_gradients_mapped_over_samples_are_those_of_each_sample(tensors: dict[str, Tensor]) -> None:
    buffer = buffer_of(tensors)
    flat = pack(tensors, buffer)
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)
    rows = vmap(grad(lambda flat, w: w * energy(unpack(flat, buffer))), in_dims=(None, 0))(flat, weights)
    assert torch.equal(rows, weights[:, None] * (3 * flat**2))


def test_one_mapped_parameter_among_plain_ones_packs(tensors: dict[str, Tensor]) -> None:
    buffer = buffer_of(tensors)
    rows = vmap(lambda x: pack({**tensors, "p5": x}, buffer))(torch.stack([tensors["p5"], 2 * tensors["p5"]]))
    assert torch.equal(rows[1], pack({**tensors, "p5": 2 * tensors["p5"]}, buffer))
