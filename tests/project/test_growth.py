"""What is done for twice as many units, names or wrong names is twice as much, and not four times.

Nothing here looks at a clock: the interpreter's instructions are counted. Names are compared by Python code, so that a
search in a list counts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from tests.support.refusals import refused

FEW, MANY, AT_MOST = 25, 50, 2.2  # what is linear takes 2, or less where something is done once
MESH = fs.simulated_mesh({"replicate": 2, "shard": 2})
ONE = fs.init_mesh(device="cpu")
NOT_OURS = (str(Path(torch.__file__).parent), str(Path(optree.__file__).parent))


Task = Callable[[int], Callable[[], Any]]  # gets everything ready for a number, and returns what is counted


class Name(str):
    """A name whose comparisons are counted."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def instructions(fn: Callable[[], Any]) -> int:
    """What Python executes for ``fn``, without what torch does in Python."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename.startswith(NOT_OURS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count


def growth(task: Task) -> float:
    """What ``MANY`` cost in terms of ``FEW``."""
    instructions(task(3))  # what is done at first; and Python 3.13 counts from a function's second call on
    few, many = instructions(task(FEW)), instructions(task(MANY))
    assert few > FEW
    return many / few


def tensors_of(n: int) -> dict[str, Tensor]:
    """One parameter a unit, every fifth of them tied to another, and a frozen one in between."""
    tensors: dict[str, Tensor] = {}
    for i in range(n):
        tensors[Name(f"blocks.{i}.w")] = torch.zeros(3)
        if i % 5 == 0:
            tensors[Name(f"blocks.{i}.tied")] = tensors[f"blocks.{i}.w"]
            tensors[Name(f"blocks.{i}.frozen")] = nn.Parameter(torch.zeros(2), requires_grad=False)
    return tensors


def model_of(n: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))


def planned(n: int, mesh: fs.Mesh = MESH) -> fs.Layout:
    return fs.plan(tensors_of(n), mesh, units="blocks")


def of_tree(fn: Callable[[fs.Sharded], Any], mesh: fs.Mesh = MESH) -> Task:
    return lambda n: partial(fn, fs.shard(tensors_of(n), planned(n, mesh)))


def planning(option: str, value: Callable[[int], Any]) -> Task:
    return lambda n: partial(fs.plan, tensors_of(n), MESH, **{option: value(n)})


def loss(params: fs.Sharded) -> Tensor:
    return torch.stack([x.sum() for name, x in fs.gather(params).items() if not name.endswith("frozen")]).sum()


def saved_and_loaded(params: fs.Sharded) -> None:
    with TemporaryDirectory() as directory:
        fs.checkpoint.save(f"{directory}/all", params)
        fs.checkpoint.load(f"{directory}/all", params)
        fs.checkpoint.export_safetensors(f"{directory}/exported", params)
        assert fs.checkpoint.digest(params) == fs.checkpoint.digest(f"{directory}/all")


def initialization(n: int) -> Callable[[], Any]:
    model = model_of(n)
    return partial(fs.init, model, fs.plan(model, MESH))


TASKS: dict[str, Task] = {
    "plan lists of parameters": planning("units", lambda n: [[Name(f"blocks.{i}.w") for i in range(n)]]),
    "plan labels": planning("labels", lambda n: {Name(f"blocks.{i}.w"): "decay" for i in range(0, n, 2)}),
    "plan ignored names": planning("ignored", lambda n: [Name(f"blocks.{i}") for i in range(0, n, 2)]),
    "plan a model": lambda n: partial(fs.plan, model_of(n), MESH),
    "slices": lambda n: partial(planned(n).slices, 1),
    "shard": of_tree(lambda params: fs.shard(fs.gather(params), params.layout)),
    "gather lazily": of_tree(lambda params: fs.gather(params, lazy=True)),
    "grad": of_tree(MESH.spmd(fs.grad(loss))),
    "reshard": of_tree(lambda x: fs.reshard(x, planned(len(x.layout.units), fs.simulated_mesh(3)))),
    "files": of_tree(saved_and_loaded),
    "a lazy step": of_tree(fs.grad(loss), ONE),
    "init": initialization,
    "an error of wrong names": of_tree(
        lambda params: refused(fs.shard, {f"module.{name}": x for name, x in fs.gather(params).items()}, params.layout)
    ),
}


@pytest.mark.parametrize("task", [pytest.param(task, marks=[pytest.mark.slow] * (task == "files")) for task in TASKS])
def test_twice_as_much_takes_twice_the_instructions(task: str) -> None:
    assert growth(TASKS[task]) < AT_MOST


def test_of_many_wrong_names_the_first_are_shown_and_the_rest_is_counted() -> None:
    names = [f"model.layers.{i // 10}.self_attn.p{i % 10}.weight" for i in range(4000)]
    layout = fs.plan({name: torch.zeros(1) for name in names}, fs.simulated_mesh(2), units=1 << 20)
    text = refused(fs.shard, {f"module.{name}": torch.zeros(1) for name in names}, layout)
    first, _, guess, *lines = text.splitlines()
    assert first == "ValueError: shard: 8,000 problems"
    assert guess.endswith("not in the layout (did you mean 'model.layers.0.self_attn.p0.weight'?)")
    assert (len(lines), lines[-2]) == (20, "  ... and 7,980 more")
