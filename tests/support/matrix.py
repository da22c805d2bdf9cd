"""Training steps of whole parameters: by their owners, and by torch on unsharded ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support import homemade
from tests.support.steps import by_torch

# A matrix in several shards, several in one, one of one element; vectors, a scalar, an empty one for another class.
SHAPES: dict[str, tuple[int, ...]] = {
    "a.w": (12, 8),
    "a.b": (12,),
    "b.w": (6, 12),
    "b.v": (7, 5),
    "b.scale": (),
    "c.w": (8, 8),
    "c.one": (1, 1),
    "c.no": (0, 3),
}
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.1}),
    "muon_as_adamw": (torch.optim.Muon, {"lr": 0.1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "foreach": False}),
    "shampoo": (homemade.Shampoo, {"lr": 0.1}),
    "soap": (homemade.Soap, {"lr": 0.1}),
    "trust_ratio": (homemade.TrustRatio, {"lr": 0.1}),
    "lists": (homemade.Lists, {"lr": 0.1}),
    "first_gradient": (homemade.FromTheFirst, {"lr": 0.1}),
    "counts_in_groups": (homemade.HalvesItsRate, {"lr": 0.1}),
    "wide": (homemade.WideMomentum, {"lr": 0.1}),
}
REST: dict[str, Any] = {"lr": 0.01, "foreach": False}
NUM_STEPS = 5


def is_whole(name: str) -> bool:
    return len(SHAPES[name]) == 2 and name != "c.no"  # torch's own Adafactor divides by the size


def values(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for n, shape in SHAPES.items()}


def planned(mesh: fs.Mesh, dtype: torch.dtype = torch.float64, **options: Any) -> fs.Layout:
    return fs.plan(values(dtype=dtype), mesh, labels=lambda name, x: None if is_whole(name) else "rest", **options)


def optimizer(case: str) -> fs.Optimizer:
    cls, options = CASES[case]
    return fs.optimizer(cls, whole=True, labels={"rest": fs.optimizer(torch.optim.AdamW, **REST)}, **options)


def trained(
    params: fs.Sharded,
    state: Any,
    opt: fs.Optimizer,
    steps: range = range(NUM_STEPS),
    donate: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[fs.Sharded, Any]:
    """Some steps, each inside of ``spmd``; the gradients of a step are those of its number."""
    layout = params.layout
    step = layout.mesh.spmd(lambda p, g, s: opt.step(p, grads=g, state=s, donate=donate))
    for i in steps:
        params, state = step(params, fs.shard(values(i + 1, dtype), layout), state)
    return params, state


def unsharded(case: str, num_steps: int = NUM_STEPS, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same by torch."""
    cls, options = CASES[case]
    whole, rest = ([name for name in SHAPES if is_whole(name) == wanted] for wanted in (True, False))
    groups = (cls, whole, options), (torch.optim.AdamW, rest, REST)
    return by_torch(lambda i: values(i, dtype), num_steps, *groups)


def assert_unsharded(full: Any, case: str, num_steps: int = NUM_STEPS, dtype: torch.dtype = torch.float64) -> None:
    """Whole parameters bitwise; of the others a vectorized kernel may fuse a product and a sum.

    Soap's bases are column-major where torch makes them and row-major where they were kept: other products.
    """
    expected, eps = unsharded(case, num_steps, dtype), torch.finfo(dtype).eps
    exact = [name for name in SHAPES if is_whole(name) and case != "soap"]
    wrong = [name for name in exact if not same_bits(full[name], expected[name])]
    assert wrong == [], wrong
    assert_trees_close(dict(full), expected, rtol=16 * eps, atol=16 * eps)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
