"""What a module's own reset may do to its parameters, and how one that leaves some of them unfilled is reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from tests.support.models import initialized, on_meta
from tests.support.refusals import refused

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_told_from_what_a_reset_finds(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 100], dtype=dtype)

    class Counts(nn.Module):
        def __init__(self, filled: int) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.empty(3, dtype=dtype), requires_grad=False)
            self.filled = filled

        def reset_parameters(self) -> None:
            self.x.data[: self.filled] = values[: self.filled]

    assert initialized(on_meta(lambda: Counts(3)))["x"].tolist() == [0, 1, 100]
    model = on_meta(lambda: Counts(2))
    text = refused(fs.init_params, model, fs.plan(model, fs.simulated_mesh(1)))
    assert "'x': reset_parameters of Counts, the model itself, left 1 of 3 elements unfilled" in text


class Careless(nn.Module):
    """Resets a part of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.partial = nn.Parameter(torch.empty(4, 3))
        self.forgotten = nn.Parameter(torch.empty(2, dtype=torch.complex64))
        self.small = nn.Parameter(torch.empty(3, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.count = nn.Parameter(torch.empty(4, dtype=torch.int32), requires_grad=False)
        self.flag = nn.Parameter(torch.empty(2, dtype=torch.bool), requires_grad=False)
        self.fine = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.partial[:, 1:] = 1
            self.count[:3] = torch.tensor([0, 1, 7], dtype=torch.int32)
            self.fine.zero_()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(2))
        self.list = nn.ParameterList([torch.empty(2)])


def test_every_parameter_that_nothing_fills_is_named() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"a": Careless(), "b": Bare(), "c": nn.Linear(2, 2)}))
    weight_norm(model["c"])
    for units in ("auto", 1):
        layout = fs.plan(model, fs.simulated_mesh(2), units=units)
        text = refused(fs.init_params, model, layout)
        assert text.startswith("ValueError: init_params: 9 problems")
        for line in (
            "'a.partial': reset_parameters of Careless 'a' left 4 of 12 elements unfilled",
            "'a.forgotten': reset_parameters of Careless 'a' left 2 of 2 elements unfilled",
            "'a.small': reset_parameters of Careless 'a' left 3 of 3 elements unfilled",
            "'a.count': reset_parameters of Careless 'a' left 1 of 4 elements unfilled",
            "'a.flag': reset_parameters of Careless 'a' left 2 of 2 elements unfilled",
            "'b.gate': neither Bare 'b' nor a module around it has a reset",
            "'b.list.0': neither ParameterList 'b.list' nor a module around it has a reset",
            "'c.parametrizations.weight.original0': reset_parameters of ParametrizedLinear 'c' left 2 of 2",
            "'c.parametrizations.weight.original1': reset_parameters of ParametrizedLinear 'c' left 4 of 4",
        ):
            assert line in text
        assert "shard(model, layout, from_rank=0)" in text


def weight_norm(module: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(module)


class Resetting(nn.Module):
    """A linear layer's parameters and a reset given from outside."""

    def __init__(self, reset: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))
        self.fc = nn.Linear(3, 2)
        self._reset = reset

    def reset_parameters(self) -> None:
        self._reset(self)


def test_a_reset_may_assign_new_parameters_of_the_same_form() -> None:
    for reset in (
        lambda module: setattr(module, "weight", nn.Parameter(torch.ones(2, 3))),
        lambda module: setattr(module.weight, "data", torch.ones(2, 3)),
    ):
        assert torch.equal(initialized(on_meta(partial(Resetting, reset)))["weight"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("reset", "told"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 2))), "put a tensor of shape (3, 2), torch.float32"),
        (lambda m: setattr(m, "weight", None), "put NoneType there, expected a tensor"),
        (lambda m: setattr(m, "weight", nn.Parameter(torch.empty(2, 3, device="meta"))), "without values there"),
        (lambda m: m.weight, "left 6 of 6 elements unfilled"),
        (lambda m: 1 / 0, "of Resetting, the model itself, raised ZeroDivisionError: division by zero"),
        (lambda m: m.weight.data.copy_(m.fc.weight), "of Resetting, the model itself, raised NotImplementedError"),
        (lambda m, std: None, "the model itself, raised TypeError"),
    ],
)
def test_a_reset_that_does_something_else_is_reported_by_its_name(reset: Callable[..., object], told: str) -> None:
    model = on_meta(lambda: Resetting(reset))
    text = refused(fs.init_params, model, fs.plan(model, fs.simulated_mesh(2)))
    assert "reset_parameters" in text
    assert told in text


def test_a_reset_that_fills_other_modules_too_is_overruled_by_their_own() -> None:
    values = initialized(on_meta(lambda: Resetting(lambda m: [p.data.fill_(3) for p in m.parameters()])))
    assert (values["weight"] == 3).all()
    assert torch.equal(
        values["fc.weight"], initialized(on_meta(lambda: nn.ModuleDict({"fc": nn.Linear(3, 2)})))["fc.weight"]
    )
