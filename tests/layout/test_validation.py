"""How the library says no: all offenders of all kinds in one error, each under the name that the caller used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.errors import name_problems

MESH = fs.simulated_mesh(2)


def test_a_wrong_name_is_answered_with_the_nearest_right_one() -> None:
    problems = name_problems(["blocks.0.wieght", "xyz", "tied"], ["blocks.0.weight", "bias"], allowed=["tied"])
    assert problems == [
        "'blocks.0.weight': missing",
        "'bias': missing",
        "'blocks.0.wieght': not in the layout (did you mean 'blocks.0.weight'?)",
        "'xyz': not in the layout",
    ]


TIED: dict[str, tuple[Any, str]] = {
    "values": (torch.ones(3), "'b': tied to 'a' in the layout, but the values differ"),
    "dtype": (torch.zeros(3).double(), "'b': got shape (3,), torch.float64, expected (3,), torch.float32"),
    "meta": (torch.zeros(3, device="meta"), "'b': on the meta device, without values"),
}


@pytest.mark.parametrize("what", TIED)
def test_a_tied_name_is_checked_like_any_other(what: str) -> None:
    x = torch.zeros(3)
    layout = fs.plan({"a": x, "b": x}, MESH)
    wrong, problem = TIED[what]
    with pytest.raises(ValueError, match="shard: 1 problem") as error:
        fs.shard({"a": x, "b": wrong}, layout)
    assert str(error.value).splitlines()[1] == f"  {problem}"
