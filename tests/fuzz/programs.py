"""A program as a value, and how one is drawn from an integer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.models import CLASSES, INPUTS, PARTS, REPEATS, Stack

Whole = dict[str, Tensor]

# Those whose first result is a tree like the parameters, that an optimizer may take for a gradient.
BASIC = ("grad", "grad", "grad", "aux", "by inputs too")
HIGHER = ("hvp", "grad of grad", "grad of jvp", "maml", "per sample", "both trees")
FORWARD = ("value", "jvp", "vmap over models")
BY = ("fs.grad", "torch.func.grad", "backward", "scatter")  # what takes a plain gradient
# Not Rprop, which goes by the signs of gradients, also of those that are zero but for rounding.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True},
    "RMSprop": {"lr": 0.01, "eps": 1e-3, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 0.01, "eps": 1e-3},
    "ASGD": {"lr": 0.1, "t0": 1.0},
}


# Shards, most of the time; replicas; and both.
AXES = [*[(("shard", n),) for n in (2, 1, 3, 4, 5, 6)] * 2, (("replicate", 2),)]
AXES += [(("replicate", r), ("shard", s)) for r, s in ((2, 1), (2, 2), (2, 3), (3, 2))]


def drawn(*choices: Any) -> Any:
    """A field that is one of ``choices``, the first by default."""
    return field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True)
class Program:
    """A model, a loss, a derivative of it by sharded parameters, and steps with what it returns."""

    seed: int = 0  # of all values
    axes: tuple[tuple[str, int], ...] = drawn(*AXES)
    width: int = drawn(3, 1, 4, 7)
    samples: int = drawn(2, 4)  # of a rank
    parts: tuple[str, ...] = ()
    frozen: tuple[int, ...] = ()  # of the parts
    loss: str = drawn("mse", "cross entropy", "root", "centered")
    penalties: tuple[str, ...] = ()
    by_hand: bool = drawn(
        False, True
    )  # the derivative by inputs of a penalty: requires_grad_() and torch.autograd.grad
    derivative: str = drawn(*BASIC, *HIGHER, *FORWARD)
    by: str = drawn(*BY)
    trees: str = drawn("one", "one", "sum", "two gathers", "twice")
    call: str = drawn("functional_call", "bind")
    meta: bool = drawn(False, False, False, False, True)  # the model, once it is sharded
    lazy: bool | None = drawn(None, None, True, False)
    remat: bool = drawn(False, False, False, False, True)
    partition: bool = drawn(False, True)
    units: str = drawn("auto", "blocks", "one", "bytes", "each")
    align: int = drawn(16, 16, 0)
    reshard: bool = drawn(True, True, False)
    reduction: str = drawn("mean", "mean", "sum")
    steps: int = drawn(0, 0, 1, 2)
    optimizer: str = drawn(*OPTIMIZERS)
    schedule: bool = drawn(False, True)
    donate: bool = drawn(False, True)
    inside: bool = drawn(True, False)  # steps, of spmd
    clip: bool = drawn(False, True)
    scale: bool = drawn(False, True)
    accumulate: bool = drawn(False, True)

    @property
    def size(self) -> int:
        return prod(n for _, n in self.axes)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Stack(self.parts, self.width, self.frozen).double().eval()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Of all ranks, which are dim 0."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.size, self.samples)
        x = torch.randn(*shape, INPUTS, generator=generator, dtype=torch.float64)
        return x, torch.randint(CLASSES, shape, generator=generator)

    def direction(self, like: Whole, scale: float, salt: int) -> Whole:
        """Random values for what has derivatives, and zeros for the rest."""
        generator = torch.Generator().manual_seed(self.seed + salt)

        def one(x: Tensor) -> Tensor:
            known = x.dtype in (torch.float64, torch.complex128)
            return scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) if known else torch.zeros_like(x)

        return {name: one(x.detach()) for name, x in like.items()}

    @property
    def plain_numbers(self) -> bool:
        return "constants" not in self.parts and not self.frozen

    def __str__(self) -> str:
        """What differs from the simplest one."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Program({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


def draw(seed: int) -> Program:
    """The program of ``seed``, always the same."""
    rng = random.Random(seed)
    chosen = {each.name: rng.choice(each.metadata["choices"]) for each in fields(Program) if each.metadata}
    parts = tuple(rng.choice([*PARTS, "linear", "linear", *REPEATS]) for _ in range(rng.randint(0, 5)))
    frozen = tuple(i for i, name in enumerate(parts) if name not in REPEATS and rng.random() < 0.15)
    penalties = tuple(name for name in ("inputs", "weights", "norm") if rng.random() < 0.15)
    return sensible(Program(seed=seed, parts=parts, frozen=frozen, penalties=penalties, **chosen))


def sensible(p: Program) -> Program:
    """``p`` without what cannot go together: what torch has no derivative of, or what would be another program."""
    if "again" in p.parts:
        p = replace(p, call="bind")  # torch's functional_call does not put back a module that stands twice
    if "conv" in p.parts or ("tied" in p.parts and (p.call == "functional_call" or p.trees == "two gathers")):
        p = replace(p, meta=False)  # buffers would be on meta too, and to("meta") unties parameters
    if p.derivative != "grad":
        p = replace(p, by="fs.grad", scale=False)
    if p.by == "scatter" or p.derivative == "aux":
        p = replace(p, trees="one")
    if p.by == "scatter":
        p = replace(p, remat=False)
    if p.by != "fs.grad" or p.derivative == "per sample":  # there a norm counts once a shard
        p = replace(p, penalties=tuple(name for name in p.penalties if name != "norm"))
    if "inputs" not in p.penalties or p.derivative not in ("grad", "aux") or p.by not in ("fs.grad", "scatter"):
        p = replace(p, by_hand=False)
    if p.derivative == "both trees" and p.trees not in ("sum", "two gathers"):
        p = replace(p, trees="sum")
    if p.derivative not in BASIC or "norm" in p.penalties or p.by == "torch.func.grad":
        p = replace(p, partition=p.partition or not p.plain_numbers)
    if "complex" in p.parts and p.derivative == "grad of grad":
        p = replace(p, derivative="hvp")  # inner products are complex
    if p.derivative in FORWARD:
        p = replace(p, steps=0)
    if not p.steps:
        p = replace(p, **dict.fromkeys(("schedule", "donate", "clip", "scale", "accumulate"), False), inside=True)
        p = replace(p, optimizer="SGD")
    return p
