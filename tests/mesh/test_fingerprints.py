"""Values are compared by a line of text: another one after any change of one bit, the same one wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functorch_shard.mesh.fingerprints import value_lines

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint8, torch.bool),
]
SHAPES = [(), (0,), (5, 13)]


def line(x: Tensor) -> str:
    (only,) = value_lines({"w": x, "other": torch.ones(1)}, ["w"])
    return only


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return (9 * torch.randn(shape)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_bit_more_or_less_is_another_line(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(shape, dtype)
    assert line(x) not in {line(changed_at(x, i)) for i in range(x.nbytes)}


def changed_at(x: Tensor, i: int) -> Tensor:
    """The lowest bit of a byte is another one, all that a bool has."""
    changed = x.clone()
    changed.view(-1).view(torch.uint8)[i] ^= 1
    return changed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_values_have_one_line_wherever_they_lie(dtype: torch.dtype) -> None:
    x = values((4, 6), dtype)
    wide = torch.zeros(4, 7, dtype=dtype)
    wide[:, 1:] = x  # neither contiguous nor at a multiple of eight bytes
    shifted = torch.cat([wide.new_zeros(1), x.flatten()])[1:].view(4, 6)
    places = [
        x,
        x.clone(),
        wide[:, 1:],
        shifted,
        x.t().contiguous().t(),
        x.clone().requires_grad_(x.is_floating_point()),
    ]
    places += [x.clone().requires_grad_()] if dtype.is_floating_point else []
    places += [x.conj().resolve_conj().conj()] if dtype.is_complex else []
    assert {line(place) for place in places} == {line(x)}


def test_seeds_zeros_and_signs_tell_apart() -> None:
    torch.manual_seed(0)
    first = torch.randn(100, 3)
    torch.manual_seed(1)
    tensors = [first, torch.randn(100, 3), -first, torch.zeros(100, 3), torch.full((100, 3), -0.0), first * 2]
    assert len({line(x) for x in tensors}) == len(tensors)
    assert line(first).startswith("'w': values of bit sum ")
