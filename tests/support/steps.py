"""Training steps by the optimizer on shards, and by torch on plain parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close

# Smaller than the number of ranks, a matrix row cut in two, a scalar, an empty tensor; frozen and integer ones.
SHAPES: dict[str, tuple[int, ...]] = {
    "a.w": (3, 5),
    "a.b": (5,),
    "b.w": (7,),
    "b.scale": (),
    "c.one": (1,),
    "c.no": (0, 3),
}
FROZEN: dict[str, Tensor] = {"b.steps": torch.tensor(3), "b.mask": torch.tensor([True, False, True])}
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_dampened": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam_foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adamw_maximize": (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 1.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
NUM_STEPS = 7  # RAdam rectifies from the sixth on


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


def whole(seed: int = 0) -> dict[str, Tensor]:
    return {**values(seed), **FROZEN}


def planned(mesh: fs.Mesh, **options: Any) -> fs.Layout:
    return fs.plan(whole(), mesh, **options)


def sharded_grads(layout: fs.Layout, seed: int) -> fs.Sharded:
    """Gradients as ``scatter_grads`` returns them: nothing for what is not trainable."""
    shards = fs.shard(whole(seed), layout)
    return fs.Sharded({key: x if layout.buffers[key].trainable else None for key, x in shards.items()}, layout)


def stepping(opt: fs.Optimizer, **options: Any) -> Callable[..., Any]:
    """``opt.step`` of three trees in a row, as a transform takes them."""
    return lambda params, grads, state: opt.step(params, grads=grads, state=state, **options)


def run(
    opt: fs.Optimizer,
    layout: fs.Layout,
    num_steps: int = NUM_STEPS,
    wrap: Any = lambda step: step,
    options: Callable[[int], dict[str, Any]] = lambda i: {},
) -> fs.Sharded:
    """The parameters after some steps with different gradients; ``options`` are those of each step."""
    params = fs.shard(whole(), layout)
    state = wrap(opt.init)(params)
    for i in range(num_steps):
        params, state = wrap(stepping(opt, **options(i)))(params, sharded_grads(layout, i + 1), state)
    return params


def by_torch(
    values: Callable[[int], dict[str, Tensor]],
    num_steps: int,
    *groups: tuple[Any, Iterable[str], dict[str, Any]],
    lr: Callable[[int], float] | None = None,
) -> dict[str, Tensor]:
    """Plain parameters after some steps, from ``values(0)`` with gradients ``values(1)`` and on.

    A group has a class, the names that it updates, and its options; ``lr`` is a factor for each step.
    """
    params = {name: x.clone().requires_grad_() for name, x in values(0).items()}
    optimizers = [cls([params[name] for name in names], **options) for cls, names, options in groups]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lr) for each in optimizers] if lr else []
    for each in optimizers:
        getattr(each, "train", list)()
    for i in range(num_steps):
        for name, grad in values(i + 1).items():
            params[name].grad = grad
        for each in (*optimizers, *schedules):
            each.step()
    return {name: x.detach() for name, x in params.items()}


def by_shards(opt: fs.Optimizer, mesh: fs.Mesh, values: Callable[[int], dict[str, Tensor]], num_steps: int) -> fs.Full:
    """The same on a mesh."""
    params = fs.shard(values(0), fs.plan(values(0), mesh))
    state = opt.init(params)
    for i in range(num_steps):
        params, state = opt.step(params, grads=fs.shard(values(i + 1), params.layout), state=state)
    return fs.gather(params, lazy=False)


def stock(
    case: str, num_steps: int = NUM_STEPS, lr: Callable[[int], float] | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The same as :func:`run` by torch, on plain parameters."""
    cls, options = CASES[case]
    there = lambda i: {name: x.to(device) for name, x in values(i).items()}  # noqa: E731
    return by_torch(there, num_steps, (cls, SHAPES, options), lr=lr)


def optimizer(case: str, **more: Any) -> fs.Optimizer:
    cls, options = CASES[case]
    return fs.optimizer(cls, **options, **more)


def assert_equal_stock(params: fs.Sharded, expected: Mapping[str, Tensor]) -> None:
    assert_trees_close(fs.gather(params), {**expected, **FROZEN}, rtol=1e-12, atol=1e-13)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def copied(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree, none_is_leaf=True)


def structure(tree: Any) -> Any:
    return optree.tree_structure(tree, none_is_leaf=True)


def padding_of(tree: fs.Sharded) -> list[Tensor]:
    """The gaps between the parameters of a tree on one simulated axis."""
    shards = [(x, tree.layout.buffers[key]) for key, x in tree.items() if x.ndim > 1]
    gaps = (gap for x, buffer in shards for gap in x.flatten().split(buffer.split_sizes)[::2])
    return [gap for gap in gaps if len(gap)]
