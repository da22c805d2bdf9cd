"""What a module's own reset may do to its parameters, and how one that leaves some of them unfilled is reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import functorch_shard as fs
from tests.support.models import initialized, on_meta
from tests.support.ranks import Ranks, gloo
from tests.support.refusals import refused, text_of


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64], ids=str)
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
    text = refused(fs.init, model, fs.plan(model, fs.simulated_mesh(1)))
    assert "'x': 1 of 3 elements left unfilled by reset_parameters of Counts, the model itself" in text


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
        text = refused(fs.init, model, fs.plan(model, fs.simulated_mesh(2), units=units))
        assert text.startswith("ValueError: init: 9 problems")
        for line in (
            "'a.partial': 4 of 12 elements left unfilled by reset_parameters of Careless 'a'",
            "'a.forgotten': not filled by reset_parameters of Careless 'a': 2 elements",
            "'a.small': not filled by reset_parameters of Careless 'a': 3 elements",
            "'a.count': 1 of 4 elements left unfilled by reset_parameters of Careless 'a'",
            "'a.flag': not filled by reset_parameters of Careless 'a': 2 elements",
            "'b.gate': neither Bare 'b' nor a module around it has a reset",
            "'b.list.0': neither ParameterList 'b.list' nor a module around it has a reset",
            "'c.parametrizations.weight.original0': not filled by reset_parameters of ParametrizedLinear 'c': 2",
            "'c.parametrizations.weight.original1': not filled by reset_parameters of ParametrizedLinear 'c': 4",
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
        (lambda m: m.weight.data.copy_(m.fc.weight), "6 of 6 elements left unfilled by reset_parameters of Resetting"),
        (lambda m, std: None, "TypeError raised by reset_parameters"),
    ],
)
def test_a_reset_that_does_something_else_is_reported_by_its_name(reset: Callable[..., object], told: str) -> None:
    model = on_meta(lambda: Resetting(reset))
    text = refused(fs.init, model, fs.plan(model, fs.simulated_mesh(2)))
    assert "reset_parameters" in text
    assert told in text


def test_the_reset_of_a_module_around_has_the_last_word_as_in_constructors() -> None:
    values = initialized(on_meta(lambda: Resetting(lambda m: [nn.init.eye_(p) for p in (m.weight, m.fc.weight)])))
    assert torch.equal(values["weight"], torch.eye(2, 3))
    assert torch.equal(values["fc.weight"], torch.eye(2, 3))
    assert values["fc.bias"].any()


def test_buffers_that_nothing_fills_are_refused_and_kept_when_they_have_values() -> None:
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    model: Any = on_meta(lambda: nn.ModuleDict({"rope": Rope(), "fc": nn.Linear(2, 2)}))
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init, model, layout)
    assert "'rope.table': neither Rope 'rope' nor a module around it has a reset" in text
    assert "give the model the values of buffers that __init__ computes" in text
    model["rope"] = Rope()
    assert fs.init(model, layout)[1]["rope.table"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2


def errors(mesh: fs.Mesh) -> list[str]:
    """A reset that is broken on rank 1, seeds that differ, and a rank without a model."""
    make = lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))  # noqa: E731
    model, broken = on_meta(make), on_meta(make)
    layout = fs.plan(model, mesh)
    if mesh.rank == 1:
        broken[1].reset_parameters = lambda: None
    told = [
        text_of(fs.init, broken, layout),
        text_of(fs.init, model, layout, seed=mesh.rank),
        text_of(fs.init, None if mesh.rank else model, layout),
    ]
    dist.barrier()  # nobody is left in a collective
    return told


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_init_fails_on_all_ranks_or_none(ranks: Ranks) -> None:
    first, second = ranks.run(errors)
    assert "'1.weight': not filled by reset_parameters of LayerNorm '1': 2 elements" in second[0]
    assert first[0].startswith("RuntimeError: init failed on rank 1, so no rank can go on. There:\nValueError")
    assert first[1] == second[1]
    assert "rank 1: seed=1" in first[1]
    assert second[2].startswith("TypeError: init: model: got NoneType")
    assert "failed on rank 1" in first[2]


def test_arguments_of_the_wrong_kind_and_another_model_are_refused() -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init, on_meta(lambda: nn.Sequential(nn.Linear(3, 2))), layout)
    assert "'weight': missing" in text
    assert "'0.weight': not in the layout" in text
    assert "'weight': got shape (2, 4)" in refused(fs.init, on_meta(lambda: nn.Linear(4, 2)), layout)
    assert "TypeError: init: model: got dict" in refused(fs.init, {}, layout)
    assert "TypeError: init: layout: got Mesh" in refused(fs.init, model, layout.mesh)
    for seed in (1.5, True, torch.tensor(3), None):
        assert "seed: got" in refused(fs.init, model, layout, seed=seed)
