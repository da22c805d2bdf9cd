"""Values are compared by a line of text: another one after any change of one bit, the same one wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functorch_shard.mesh.agreement import value_lines

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]


def line(x: Tensor) -> str:
    (only,) = value_lines({"w": x, "other": torch.ones(1)}, ["w"])
    return only


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_more_or_less_is_another_line_and_the_place_in_memory_is_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (9 * torch.randn(5, 13)).to(dtype)
    lines = set[str]()
    for i in range(x.nbytes):
        changed = x.clone()
        changed.view(-1).view(torch.uint8)[i] ^= 1  # all that a bool has
        lines.add(line(changed))
    assert line(x) not in lines
    wide = torch.zeros(5, 14, dtype=dtype)
    wide[:, 1:] = x  # neither contiguous nor at a multiple of eight bytes
    shifted = torch.cat([wide.new_zeros(1), x.flatten()])[1:].view(5, 13)
    places = [x.clone(), wide[:, 1:], shifted, x.t().contiguous().t()]
    places += [x.clone().requires_grad_()] if dtype.is_floating_point else []
    places += [x.conj().resolve_conj().conj()] if dtype.is_complex else []
    assert {line(place) for place in places} == {line(x)}


def test_seeds_zeros_and_signs_tell_apart() -> None:
    torch.manual_seed(0)
    first = torch.randn(100, 3)
    torch.manual_seed(1)
    tensors = [first, torch.randn(100, 3), -first, torch.zeros(100, 3), torch.full((100, 3), -0.0), torch.zeros(0)]
    assert [line(x).startswith("'w': values of bit sum ") for x in tensors] == [True] * 6
    assert len({line(x) for x in tensors[:5]}) == 5
