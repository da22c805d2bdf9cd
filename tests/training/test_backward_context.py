"""What backward does depends on nothing that the thread of the forward has, and autograd's threads of a device lack."""

from __future__ import annotations

import pytest

from functorch_shard.torch_internals.autograd import Function
from tests.laws.nestings import COLUMNS, Row, verdict
from tests.support.empty_context import functions, on_mesh_in_empty_contexts

ROWS: list[Row] = [
    ("grad", "the loss"),
    ("fs.grad", "the loss"),
    ("fs.grad", "fs.grad"),
    ("fs.grad", "grad"),
    ("fs.grad", "Hessian product"),
    ("jacrev", "fs.grad"),
    ("jvp", "fs.grad"),
]


def test_every_function_of_the_library_keeps_the_context_of_its_forward() -> None:
    assert len(functions()) > 10
    assert [cls for cls in functions() if not issubclass(cls, Function)] == []


@pytest.mark.parametrize(
    "column",
    [
        "simulated, 2 axes",
        "simulated, 1 axis, remat",
        "gloo, 1 axis, lazy, remat",
        "gloo, 2 axes, plain",
        "one after the other, 1 axis, remat",
    ],
)
def test_derivatives_are_right_when_every_backward_starts_without_context_variables(column: str) -> None:
    ranks = COLUMNS[column].ranks
    for results in ranks.run(on_mesh_in_empty_contexts, COLUMNS[column], ROWS):
        found = {row: verdict(result, ranks.size, row) for row, result in zip(ROWS, results, strict=True)}
        assert found == dict.fromkeys(ROWS, "right")
