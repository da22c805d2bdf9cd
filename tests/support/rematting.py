"""Losses whose parts are run again in backward, beside the same without: gathers inside of a part, and outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from tests.laws.convention import model, sharded_loss

Tree = Any
Wrap = Callable[[Any], Any]


def plainly(fn: Any) -> Any:
    """In place of ``fs.remat``: nothing is run again."""
    return fn


def twice(fn: Any) -> Any:
    """A part of a part."""
    return fs.remat(fs.remat(fn))


def _layer(i: int, p: Any, x: Tensor) -> Tensor:
    names = {"weight": p[f"{i}.weight"], "bias": p[f"{i}.bias"]}
    return functional_call(model().get_submodule(str(i)), names, (x if i == 0 else x.tanh(),))


def gathered_inside(wrap: Wrap, p: Tree, x: Tensor, y: Tensor) -> Tensor:
    """The whole loss is one part."""
    return wrap(partial(sharded_loss, lazy=None))(p, x, y)


def gathered_in_each(wrap: Wrap, p: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Two parts, each of which gathers."""
    for i in (0, 2):
        x = wrap(lambda p, x: _layer(i, fs.gather(p), x))(p, x)  # noqa: B023  (run again, too, with the i of its call)
    return ((x - y) ** 2).mean()


def gathered_outside(wrap: Wrap, p: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Two parts with whole parameters, lazy ones on real ranks, as arguments."""
    full = fs.gather(p)
    for i in (0, 2):
        x = wrap(partial(_layer, i))(full, x)
    return ((x - y) ** 2).mean()


def called(wrap: Wrap, p: Tree, x: Tensor, y: Tensor) -> Tensor:
    """A module that runs parts of itself again."""
    full = {f"inner.{n}": w for n, w in fs.gather(p).items()}
    return ((fs.bind(Wrapped(wrap, model()), full)(x) - y) ** 2).mean()


class Wrapped(torch.nn.Module):
    def __init__(self, wrap: Wrap, inner: Any) -> None:
        super().__init__()
        self.wrap, self.inner = wrap, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(self.inner[2])(self.wrap(self.inner[:2])(x))


WAYS: dict[str, Callable[[Wrap, Tree, Tensor, Tensor], Tensor]] = {
    "gathered inside": gathered_inside,
    "gathered in each": gathered_in_each,
    "gathered outside": gathered_outside,
    "called": called,
}
