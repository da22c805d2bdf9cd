"""What is gathered together: every form of ``units``, and what is said to a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.layout.planning import Units

MESH = fs.simulated_mesh(3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.mlp = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))


class Model(nn.Module):
    """The usual: embedding, a stack of blocks with stacks inside, a head tied to the embedding, a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight


def units_of(source: Any, units: Units = "auto") -> dict[str, list[str]]:
    """Unit name -> names of its parameters, without the labels and dtypes of its buffers."""
    layout = fs.plan(source, MESH, units=units)
    return {unit.name: [slot.name for buffer in unit.buffers for slot in buffer.slots] for unit in layout.units}


def outline(source: Any, units: Units = "auto") -> dict[str, int]:
    return {unit: len(names) for unit, names in units_of(source, units).items()}


def inside(name: str, child: nn.Module) -> nn.Module:
    module = nn.Module()
    module.add_module(name, child)
    return module


def test_auto_makes_a_unit_of_each_entry_of_a_stack_and_of_each_other_module() -> None:
    assert units_of(Model()) == {
        "(root)": ["scale"],
        "embed": ["embed.weight"],
        "blocks.0": [f"blocks.0.{name}" for name in dict(Block().named_parameters())],
        "blocks.1": [f"blocks.1.{name}" for name in dict(Block().named_parameters())],
        "head": ["head.bias"],
    }


def linears(num: int) -> list[nn.Module]:
    return [nn.Linear(2, 3) for _ in range(num)]


class Scaled(nn.ModuleList):
    """A stack with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(linears(2))
        self.scale = nn.Parameter(torch.ones(3))


AUTO: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "the model is a stack": (lambda: nn.Sequential(*linears(2)), {"0": 2, "1": 2}),
    "outermost of nested stacks": (
        lambda: nn.Sequential(nn.Sequential(*linears(2)), nn.Linear(2, 2)),
        {"0": 4, "1": 2},
    ),
    "next to a stack in a submodule": (
        lambda: nn.ModuleDict({"body": nn.ModuleDict({"stack": nn.ModuleList(linears(1)), "norm": nn.LayerNorm(3)})}),
        {"body.stack.0": 2, "body.norm": 2},
    ),
    "a dict is no stack": (lambda: inside("towers", nn.ModuleDict({"a": nn.Linear(2, 3)})), {"towers": 2}),
    "a stack with a parameter": (lambda: inside("stack", Scaled()), {"stack": 1, "stack.0": 2, "stack.1": 2}),
    "a dict of one class": (
        lambda: nn.ModuleDict({"towers": nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})}),
        {"towers.a": 2, "towers.b": 2},
    ),
    "a dict with numbers as keys": (
        lambda: inside("layers", nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.Sequential(*linears(2))})),
        {"layers.0": 2, "layers.1": 4},
    ),
    "numbered attributes": (
        lambda: inside("net", nn.ModuleDict({"block1": Block(), "block2": Block(), "head": nn.Linear(3, 3)})),
        {"net.block1": 6, "net.block2": 6, "net.head": 2},
    ),
    "numbered stages of blocks": (
        lambda: nn.ModuleDict({f"layer{i}": nn.Sequential(Block(), Block()) for i in (1, 2)}),
        {f"layer{i}.{j}": 6 for i in (1, 2) for j in (0, 1)},
    ),
    "an entry of more than a quarter with a stack of blocks inside": (
        lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(3, 3)),
        {"0.0": 6, "0.1": 6, "1": 2},
    ),
}


@pytest.mark.parametrize("case", AUTO)
def test_auto_finds_the_outermost_stacks(case: str) -> None:
    make, expected = AUTO[case]
    assert outline(make()) == expected


def layers(number: int, width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(number)))


def test_auto_merges_small_neighbours_up_to_a_16th_of_the_model() -> None:
    units = units_of(layers(200, 8))
    assert list(units) == [str(i) for i in range(0, 200, 12)]
    assert [name for names in units.values() for name in names] == [f"{i}.weight" for i in range(200)]
    assert list(units_of(layers(200, 8), "blocks")) == [str(i) for i in range(200)]


def test_auto_keeps_units_that_have_a_precision_by_name() -> None:
    model, half = layers(40, 4), fs.MixedPrecision(torch.bfloat16)
    assert len(fs.plan(model, MESH, precision=half).units) == 20
    layout = fs.plan(model, MESH, precision={"3": half}.get)
    assert [unit.name for unit in layout.units if unit.precision == half] == ["3"]


def test_auto_takes_a_number_in_the_names_of_a_mapping_for_an_entry_of_a_stack() -> None:
    names = ["w", "a.w", "a.b.w", "m.0.w", "m.0.1.w", "m.10.w", "m.norm.w", "layer3.w", "0"]
    units = {"(root)": 2, "a": 2, "m.0": 2, "m.10": 1, "m.norm": 1, "layer3": 1}
    assert outline({name: torch.zeros(2) for name in names}) == units


def test_of_several_classes_the_innermost_module_wins() -> None:
    assert outline(Model(), (Block, nn.LayerNorm, nn.Embedding)) == {
        "(root)": 2,
        "embed": 1,
        "blocks.0.norm": 2,
        "blocks.0": 4,
        "blocks.1.norm": 2,
        "blocks.1": 4,
    }


def test_a_callable_chooses_by_name_and_module() -> None:
    def chosen(name: str, module: nn.Module) -> bool:
        return name.endswith(".0") and isinstance(module, nn.Linear)

    assert outline(Model(), chosen) == {"(root)": 11, "blocks.0.mlp.0": 2, "blocks.1.mlp.0": 2}
    assert outline(Model(), lambda name, module: not name) == {"(root)": 15}


def test_a_parameter_tied_across_units_is_in_the_unit_of_its_first_name() -> None:
    stack = nn.ModuleList(linears(3))
    stack[2].weight = stack[0].weight
    assert units_of(stack) == {"0": ["0.weight", "0.bias"], "1": ["1.weight", "1.bias"], "2": ["2.bias"]}
    assert outline(nn.ModuleList([stack[0], stack[1], stack[0]]), nn.Linear) == {"0": 2, "1": 2}


def test_lists_of_names_take_parameters_and_modules_and_leave_the_rest_in_the_root() -> None:
    units = units_of(Model(), [["embed", "head.bias"], ["blocks.1"], []])
    assert {unit: len(names) for unit, names in units.items()} == {"(root)": 7, "embed": 2, "blocks.1": 6}
    assert units["embed"] == ["embed.weight", "head.bias"]
    assert outline(Model(), ()) == {"(root)": 15}
    assert outline(TENSORS, [["a", "b"], ["b.w"]]) == {"a": 1, "b.w": 1}  # the innermost
    assert units_of({"layer1.w": torch.ones(1), "layer10.w": torch.ones(1)}, [["layer1"]])["layer1"] == ["layer1.w"]


def test_bytes_fill_units_in_order_and_a_larger_parameter_stands_alone() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(9), "d": torch.zeros(0), "e": torch.zeros(3)}
    assert units_of(tensors, 12) == {"a": ["a", "b"], "c": ["c"], "d": ["d", "e"]}
    assert units_of(tensors, 10**9) == {"a": list("abcde")}
    assert units_of(tensors, 1) == {"a": ["a"], "b": ["b"], "c": ["c"], "d": ["d"], "e": ["e"]}


TENSORS = {"a.w": torch.zeros(2), "b.w": torch.zeros(2)}
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "word": (TENSORS, "all", TypeError, r"plan: units: got 'all', expected 'auto', 'blocks'"),
    "unknown": (TENSORS, [["a.w", "nope"]], ValueError, r"'nope': no parameter or module of that name"),
    "list of classes": (nn.Linear(2, 3), [nn.Linear], TypeError, r"or lists of names"),
    "class for a mapping": (TENSORS, nn.Linear, TypeError, r"need an nn.Module as source; got a m"),
    "absent class": (Model(), nn.Conv2d, ValueError, r"no module was chosen"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_units_are_refused(case: str) -> None:
    source, units, kind, match = WRONG[case]
    with pytest.raises(kind, match=match):
        fs.plan(source, MESH, units=units)
