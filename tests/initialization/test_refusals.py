"""What a reset, or a function of a module, leaves unfilled or does elsewhere is reported, by name and on every rank."""

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


class Careless(nn.Module):
    """Resets a part of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.partial = nn.Parameter(torch.empty(4, 3))
        self.forgotten = nn.Parameter(torch.empty(2, dtype=torch.complex64))
        self.small = nn.Parameter(torch.empty(3, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.count = nn.Parameter(torch.empty(4, dtype=torch.int32), requires_grad=False)
        self.unsigned = nn.Parameter(torch.empty(3, dtype=torch.uint16), requires_grad=False)
        self.flag = nn.Parameter(torch.empty(2, dtype=torch.bool), requires_grad=False)
        self.fine = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.partial[:, 1:] = 1
            self.count[:3] = torch.tensor([0, 1, 7], dtype=torch.int32)
            self.unsigned.data[:2] = torch.tensor([0, 100], dtype=torch.uint16)
            self.fine.zero_()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(2))
        self.list = nn.ParameterList([torch.empty(2)])
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_everything_that_nothing_fills_is_named() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"a": Careless(), "b": Bare(), "c": nn.Linear(2, 2)}))
    nn.utils.parametrizations.weight_norm(model["c"])
    for units in ("auto", 1):
        text = refused(fs.init, model, fs.plan(model, fs.simulated_mesh(2), units=units))
        assert text.startswith("ValueError: init: 11 problems")
        for line in (
            "'a.partial': 4 of 12 elements left unfilled by reset_parameters of Careless 'a'",
            "'a.forgotten': not filled by reset_parameters of Careless 'a': 2 elements",
            "'a.small': not filled by reset_parameters of Careless 'a': 3 elements",
            "'a.count': 1 of 4 elements left unfilled by reset_parameters of Careless 'a'",
            "'a.unsigned': 1 of 3 elements left unfilled by reset_parameters of Careless 'a'",
            "'a.flag': not filled by reset_parameters of Careless 'a': 2 elements",
            "'b.gate': neither Bare 'b' nor a module around it has a reset",
            "'b.list.0': neither ParameterList 'b.list' nor a module around it has a reset",
            "'b.table': neither Bare 'b' nor a module around it has a reset",
            "'c.parametrizations.weight.original0': not filled by reset_parameters of ParametrizedLinear 'c': 2",
            "'c.parametrizations.weight.original1': not filled by reset_parameters of ParametrizedLinear 'c': 4",
        ):
            assert line in text
        assert "give the model the values of buffers that __init__ computes" in text
        assert "shard(model, layout, from_rank=0)" in text


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


def linear(module: Any) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)


def the_others_weight(module: Any) -> None:
    linear(module)
    for peer in getattr(module, "peers", ()):
        peer.weight.data.normal_()  # by .data, which has a version of its own
        torch.add(peer.bias, 1, out=peer.bias)


def another_parameter(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Sequential):
        module[1].weight = nn.Parameter(torch.ones(3, 2))
        module[0].register_parameter("extra", nn.Parameter(torch.ones(1)))


def half(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Linear):
        module.weight.data = torch.full_like(module.weight, float("nan"))
        module.weight.data[0] = 1.0
        module.bias = nn.Parameter(torch.ones(7))


def on_the_meta_device(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"))


def parts_from_outside(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Sequential):
        parts: list[Any] = [*module.children()]
        parts[0].weight[0].zero_()
        parts[1].weight.data.mul_(2)


REFUSED: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "nothing": (
        lambda module: None,
        ["'0.weight': not filled by init, called with Linear '0': 6 elements", "'1.bias'"],
    ),
    "others": (
        the_others_weight,
        [f"{name!r}: written to by init, called with Linear '0'" for name in ("1.weight", "1.bias")],
    ),
    "another": (another_parameter, ["'1.weight': replaced in another call than that of Linear '1'", "'0.extra'"]),
    "half": (
        half,
        [
            "'0.weight': 3 of 6 elements left unfilled by init, called with Linear '0'",
            "'1.bias': put a tensor of shape (7,), torch.float32 there, expected (3,)",
        ],
    ),
    "parts": (
        parts_from_outside,
        [
            "'0.weight': 3 of 6 elements left unfilled by init, called with Sequential, the model itself",
            "'1.weight': 6 of 6 elements left unfilled by init, called with Sequential, the model itself",
        ],
    ),
    "meta": (on_the_meta_device, ["'1.weight': put a tensor without values there, on the meta device by init"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case: str) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
    model[0].peers = [model[1]]  # hidden in a list: not a module inside
    layout = fs.plan(model, fs.simulated_mesh(2))
    init, texts = REFUSED[case]
    text = refused(fs.init, model, layout, init=init)
    assert text.startswith("ValueError: init: ")
    assert all(expected in text for expected in texts), text


def test_a_write_to_a_model_with_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init, model, layout, init=lambda module: linear(module) or linear(model[0]))
    assert "'0.weight': written to by init, called with Sequential, the model itself" in text


def errors(mesh: fs.Mesh) -> list[str]:
    """What this rank is told of values and seeds that differ, and of what fails on rank 1 only."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    layout, own = fs.plan(model, mesh), torch.Generator().manual_seed(mesh.rank)

    def drawn(module: Any) -> None:
        for x in module.parameters(recurse=False):
            x.data.normal_(generator=own)

    def fails(module: Any) -> None:
        if not isinstance(module, nn.Sequential):
            module.nothing() if mesh.rank else module.reset_parameters()

    told = [text_of(fs.init, model, layout, init=init) for init in (drawn, fails)]
    told += [text_of(fs.init, model, layout, seed=mesh.rank), text_of(fs.init, None if mesh.rank else model, layout)]
    fs.init(model, layout)
    dist.barrier()  # nobody is left in a collective
    return told


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_init_fails_on_all_ranks_or_none(ranks: Ranks) -> None:
    first, second = ranks.run(errors)
    assert first[0] == second[0]
    assert "rank 0: '0.weight': values of bit sum" in first[0]
    assert first[0].endswith("init may not draw from generators of its own.")
    assert first[1].startswith("RuntimeError: init failed on rank 1, so no rank can go on. There:\nRuntimeError")
    assert "AttributeError raised by init, called with Linear '0'" in second[1]
    assert first[2] == second[2]
    assert "rank 1: seed=1" in first[2]
    assert second[3].startswith("TypeError: init: model: got NoneType")
    assert "failed on rank 1" in first[3]


def test_arguments_of_the_wrong_kind_and_another_model_are_refused() -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    layout = fs.plan(model, fs.simulated_mesh(2))
    assert "'0.weight': not in the layout" in refused(fs.init, on_meta(lambda: nn.Sequential(nn.Linear(3, 2))), layout)
    assert "'weight': got shape (2, 4)" in refused(fs.init, on_meta(lambda: nn.Linear(4, 2)), layout)
    assert "TypeError: init: layout: got Mesh" in refused(fs.init, model, layout.mesh)
    for seed in (1.5, True, torch.tensor(3), None):
        assert "seed: got" in refused(fs.init, model, layout, seed=seed)
