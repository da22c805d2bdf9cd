"""Counters see what is inside of them; trees are compared leaf by leaf."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives


def test_tensors_without_data_are_counted_past() -> None:
    """DTensors and torch.compile ask fake tensors what shape a result has."""
    with count_collectives() as seen, FakeTensorMode():
        assert torch.ones(2, 3).t().matmul(torch.ones(2, 5)).shape == (3, 5)
    assert seen.total == 0


def test_nested_counters_each_see_what_is_inside_them() -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 3})
    psum = mesh.spmd(lambda x: fs.collectives.psum(x, mesh["shard"]))
    x = torch.ones(2, 3, 5)
    with count_collectives() as outer:
        psum(x)
        with count_collectives() as inner:
            psum(x)
        psum(x.double())
    psum(x)
    assert (outer["psum"], inner["psum"]) == (3, 1)
    assert outer.nbytes("psum") == 2 * 5 * 4 + 5 * 8
    assert inner.nbytes("psum") == 5 * 4
    assert {(c.axis, c.numel) for c in outer.issued} == {("shard", 5)}


def test_equal_trees_pass_whatever_kind_of_mapping_they_are() -> None:
    full = fs.gather(fs.shard({"w": torch.ones(3)}, fs.plan({"w": torch.ones(3)}, fs.simulated_mesh(2))))
    assert_trees_close(full, {"w": torch.ones(3)})
    assert_trees_close({"b": 1, "a": [None, "x"]}, {"a": (None, "x"), "b": 1})
    assert_trees_close(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert_trees_close({"x": torch.ones(2), "y": 1.0}, {"x": torch.ones(2) + 1e-3, "y": 1.001}, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("actual", "close", "far"),
    [
        (1.0, 1.0 + 1e-9, 1.001),
        (numpy.ones(3), numpy.ones(3) + 1e-9, numpy.zeros(3)),
        (numpy.float32(1), numpy.float32(1), numpy.float32(2)),
    ],
)
def test_floats_and_arrays_of_numpy_are_compared_as_tensors_are(actual: Any, close: Any, far: Any) -> None:
    assert_trees_close({"x": actual}, {"x": close})
    with pytest.raises(AssertionError, match=r"1 leaf differs:\n  \['x'\]: .*not close"):
        assert_trees_close({"x": actual}, {"x": far})


def test_every_leaf_that_differs_is_named() -> None:
    x = torch.ones(2)
    actual, expected = {"far": x, "list": [x, x], "more": x}, {"far": 0 * x, "list": [x, 2 * x], "less": 1}
    with pytest.raises(AssertionError) as caught:
        assert_trees_close(actual, expected)
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 leaves differ:"
    named = [line.split(":")[0].strip() for line in lines[1:] if line.startswith("  [")]
    assert named == ["['far']", "['less']", "['list'][1]", "['more']"]
    assert "  ['less']: missing" in lines
    assert "  ['more']: not expected" in lines


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "1 leaf differs:\n  the tree: .*dtype"),
        (torch.tensor(float("nan")), torch.tensor(0.0), "the tree: .*not close"),
        ({"a": None}, {"a": torch.ones(1)}, r"\['a'\]: got None, expected tensor"),
        ({"a": 1}, {"a": True}, r"\['a'\]: got 1, expected True"),
        ({"a": {"b": 1}}, {"a": 1}, r"2 leaves differ:\n  \['a'\]: missing\n  \['a'\]\['b'\]: not expected"),
    ],
)
def test_differences_of_any_kind_fail(actual: Any, expected: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_trees_close(actual, expected)
