"""Which classes of other libraries an optimizer takes, and whether they train as they do without shards.

``python -m tests.benchmarks.optimizers`` tries every class of torch.optim, timm, pytorch-optimizer, schedulefree,
lion-pytorch, torchao and bitsandbytes that is installed: the optimizer is made, and what is accepted takes 100 steps on
two gloo ranks and by itself on whole tensors. It prints a line for each class and its options. ``--whole`` tries them
on matrices with ``whole=True``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import check_elementwise, run_ranks
from tests.benchmarks.tools import command_line
from tests.support.steps import by_shards, by_torch

LIBRARIES = (
    "torch.optim",
    "timm.optim",
    "pytorch_optimizer",
    "schedulefree",
    "lion_pytorch",
    "torchao.optim",
    "bitsandbytes.optim",
)
SHAPES = {"a.matrix": (192, 64), "a.bias": (67,), "b.conv": (8, 5, 3, 3), "b.scale": (), "c.large": (8192,)}
MATRICES = {"a.tall": (24, 8), "a.wide": (5, 21), "b.square": (16, 16)}  # of --whole
NUM_STEPS = 100
# Options beside the defaults that make another algorithm of a class.
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"weight_decay": 0.1}, {"caution": True}, {"momentum": 0.9})


def classes(library: str) -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    """Those that a library exports; timm's without the rest of timm's dependencies."""
    if library.startswith("timm"):
        sys.modules.setdefault("timm", _package_without_code("timm"))
        vars(sys.modules.setdefault("timm.models", types.ModuleType("timm.models")))["group_parameters"] = None
    module = importlib.import_module(library)
    for name in sorted(name for name in vars(module) if not name.startswith("_")):
        found = getattr(module, name)
        is_class = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
        if (
            is_class
            and found.__module__.startswith("torch.optim") == (library == "torch.optim")
            and name != "Optimizer"
        ):
            yield name, found


def _package_without_code(name: str) -> types.ModuleType:
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or [])
    return package


def variants(cls: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    known = inspect.signature(cls).parameters
    for extra in VARIANTS:
        if all(name in known and known[name].default != value for name, value in extra.items()):
            yield {"lr": 1e-3, **extra} if "lr" in known else extra


def values(seed: int, whole: bool) -> dict[str, Tensor]:
    generator, scale = torch.Generator().manual_seed(seed), 0.1 + seed * 7 % 5
    shapes = MATRICES if whole else SHAPES
    return {n: scale * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def tried(cls: type[torch.optim.Optimizer], options: dict[str, Any], mesh: fs.Mesh, whole: bool) -> str:
    """``refused: why``, or how far apart the two are in float64, in parts of the way from the start."""
    of_step = partial(values, whole=whole)
    start = of_step(0)
    try:
        if not whole:
            check_elementwise(cls, **options)
        opt = fs.optimizer(cls, whole=whole, elementwise=True, **options)
        actual = by_shards(opt, mesh, of_step, NUM_STEPS)
        expected = by_torch(of_step, NUM_STEPS, (cls, start, options))
    except Exception as error:
        return (
            f"refused: {error}"
            if isinstance(error, (TypeError, AssertionError))
            else f"{type(error).__name__}: {error}"
        )
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    apart = max(float((expected[name] - actual[name]).abs().max()) for name in start)
    return f"equal: {apart / moved:.0e}" if apart <= 1e-6 * moved else f"WRONG: {apart / moved:.0e} of the way"


def sweep(libraries: list[str], whole: bool) -> list[tuple[str, str, str, str]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh, found = fs.init_mesh(), []
    for library in libraries:
        try:
            every = list(classes(library))
        except ImportError as error:
            found.append((library, "", "", f"not installed: {error}"))
            continue
        for name, cls in every:
            for options in variants(cls):
                outcome = " ".join(tried(cls, options, mesh, whole).split())
                chosen = ", ".join(f"{k}={v}" for k, v in options.items() if k != "lr")
                found.append((library, name, chosen, outcome))
                if mesh.rank == 0:
                    print(library, f"{name}({chosen})", outcome, flush=True)
    return found


def main() -> None:
    chosen = command_line(__doc__, libraries=[*LIBRARIES], whole=False, json=None)
    first, second = run_ranks(sweep, 2, chosen.libraries, chosen.whole, timeout=3600)
    different = [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]]
    assert not different, f"the ranks disagree: {different}"
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(first, file, indent=1)


if __name__ == "__main__":
    main()
