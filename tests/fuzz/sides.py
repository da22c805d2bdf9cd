"""A program's loss and its derivatives, written once for both sides: as one rank of several, and as the whole batch.

Tensors of the twin have the ranks in dim 0, and so a loss only reduces dims that it counts from the end. What the twin
differentiates is the mean over ranks (or the sum) of what each of them returns.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

import functorch_shard as fs
from tests.fuzz.models import CLASSES
from tests.fuzz.programs import Program

Tree = Any
Results = dict[str, Any]
tree_map: Any = optree.tree_map


@dataclass(frozen=True)
class Side:
    """What both sides have; ``p`` is a tree of parameters, ``full`` whole ones."""

    full: ClassVar[Callable[..., Tree]]  # of p
    out: ClassVar[Callable[..., Tensor]]  # of full and inputs
    norm: ClassVar[Callable[..., Tensor]]  # of p
    grad: ClassVar[Callable[..., Callable[..., Tree]]]  # the derivative of a function by trees
    by_both: ClassVar[Callable[..., list[Any]]]  # by a tree, and by a tree or a tensor

    program: Program
    model: nn.Module
    frozen: Tree  # parameters that ``p`` leaves out
    delta: Tree  # like p
    scale: Any = None  # of the loss

    def loss(self, p: Tree, x: Tensor, y: Tensor) -> Tensor:
        value = self.loss_of_full(self.full(p), x, y)
        if self.program.trees == "twice":
            value = (value + self.loss_of_full(self.full(p), x.flip(-1), y)) / 2
        if "norm" in self.program.penalties:
            value = value + 0.1 * self.norm(p)
        return self.scale(value) if self.scale else value

    def loss_of_full(self, full: Tree, x: Tensor, y: Tensor) -> Tensor:
        out = self.out(full, x)
        value = LOSSES[self.program.loss](self, out, y)
        if "inputs" in self.program.penalties:
            by_x = self.by_inputs(lambda x: self.out(full, x).square().sum(), x)
            value = value + 0.1 * by_x.square().mean((-2, -1))
        if "weights" in self.program.penalties:
            values = [w for w in full.values() if w.is_floating_point() and w.numel()]
            value = value + 0.1 * torch.stack([w.double().square().mean() for w in values]).sum()
        return value

    def by_inputs(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.func.grad(fn)(x)

    def gradient(self, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
        return self.grad(lambda p: f(p, x, y))(p)

    def derivative(self, p: Tree, v: Tree, x: Tensor, y: Tensor) -> Results:
        loss = fs.remat(self.loss) if self.program.remat and isinstance(self, Rank) else self.loss
        return DERIVATIVES[self.program.derivative](self, loss, p, v, x, y)

    def sum_of_trees(self, p: Tree) -> Tree:
        return tree_map(torch.add, p, self.delta) if self.program.trees == "sum" else p


@dataclass(frozen=True)
class Rank(Side):
    """One of the ranks, by this library."""

    mesh: Any = None

    def full(self, p: Tree) -> Tree:
        lazy = self.program.lazy
        full = fs.gather(self.sum_of_trees(p), *self.frozen, lazy=lazy)
        if self.program.trees != "two gathers":
            return full
        delta = fs.gather(self.delta, lazy=lazy)
        return {name: x + delta[name] if name in delta else x for name, x in full.items()}

    def out(self, full: Tree, x: Tensor) -> Tensor:
        if self.program.call == "bind":
            return fs.bind(self.model, full)(x)
        return functional_call(self.model, full, (x,))

    def by_inputs(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.program.by_hand:
            return super().by_inputs(fn, x)
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fn(x), x, create_graph=True)[0]

    def pmean(self, x: Tensor) -> Tensor:
        return fs.collectives.pmean(x, self.mesh)

    def norm(self, p: Tree) -> Tensor:
        return fs.global_norm(p)

    def dot(self, a: Tree, b: Tree) -> Tensor:
        return fs.curvature.vdot(a, b)

    def grad(self, fn: Callable[..., Tensor]) -> Callable[..., Tree]:
        return fs.grad(fn)

    def by_both(self, fn: Callable[..., Tensor], p: Tree, other: Any) -> list[Any]:
        return [*fs.grad(fn, (0, 1))(p, other)]

    def gradient(self, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
        if self.program.by == "scatter":
            scale = self.scale or (lambda value: value)
            full = fs.gather(p, *self.frozen, lazy=self.program.lazy)
            grads = fs.scatter_grads(fs.grad(lambda full: scale(self.loss_of_full(full, x, y)))(full))
            return fs.Sharded({key: grads[key] for key in p}, p.layout)
        if self.program.by == "backward":
            leaves = {k: t.detach().requires_grad_(p.layout.buffers[k].trainable) for k, t in p.items()}
            wanted = {k: t for k, t in leaves.items() if t.requires_grad}
            value = f(fs.Sharded(leaves, p.layout), x, y)
            grads = torch.autograd.grad(value, [*wanted.values()], allow_unused=True, materialize_grads=True)
            return fs.Sharded({**dict.fromkeys(p), **dict(zip(wanted, grads, strict=True))}, p.layout)
        return {"fs.grad": fs.grad, "torch.func.grad": torch.func.grad}[self.program.by](f)(p, x, y)

    def with_aux(self, f: Any, p: Tree, x: Tensor, y: Tensor) -> Results:
        def loss(p: Tree) -> tuple[Tensor, Tensor]:
            return f(p, x, y), self.out(self.full(p), x)

        grads, (value, aux) = fs.grad_and_value(loss, has_aux=True)(p)
        return {"grad": grads, "value": value, "aux": aux}

    def of_samples(self, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
        return vmap(torch.func.grad(lambda p, x, y: f(p, x[None], y[None])), (None, 0, 0))(p, x, y)


@dataclass(frozen=True)
class Twin(Side):
    """All ranks at once, by torch alone."""

    def full(self, p: Tree) -> Tree:
        added = self.program.trees == "two gathers"
        return {**self.frozen, **(tree_map(torch.add, p, self.delta) if added else self.sum_of_trees(p))}

    def out(self, full: Tree, x: Tensor) -> Tensor:
        model = deepcopy(self.model)  # functional_call does not put back a module that stands twice
        return functional_call(model, full, (x.flatten(0, 1),)).unflatten(0, x.shape[:2])

    def pmean(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True).expand_as(x)

    def norm(self, p: Tree) -> Tensor:
        parts = [
            torch.view_as_real(w) if w.is_complex() else w for w in p.values()
        ]  # abs has no second derivative at 0
        return torch.stack([w.square().sum() for w in parts]).sum().sqrt().expand(self.program.size)

    def dot(self, a: Tree, b: Tree) -> Tensor:
        return torch.stack([(a[name] * b[name]).sum() for name in a]).sum().expand(self.program.size)

    def reduced(self, values: Tensor) -> Tensor:
        return values.mean(0) if self.program.reduction == "mean" else values.sum(0)

    def grad(self, fn: Callable[..., Tensor]) -> Callable[..., Tree]:
        return torch.func.grad(lambda *args: self.reduced(fn(*args)))

    def by_both(self, fn: Callable[..., Tensor], p: Tree, other: Any) -> list[Any]:
        """A tensor is of each rank, which differentiates its own loss by it."""
        reduced = self.reduced if isinstance(other, dict) else torch.sum
        return [self.grad(fn)(p, other), torch.func.grad(lambda p, d: reduced(fn(p, d)), 1)(p, other)]

    def with_aux(self, f: Any, p: Tree, x: Tensor, y: Tensor) -> Results:
        return {"grad": self.gradient(f, p, x, y), "value": f(p, x, y), "aux": self.out(self.full(p), x)}

    def of_samples(self, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
        one = [self.gradient(f, p, x[:, i : i + 1], y[:, i : i + 1]) for i in range(x.shape[1])]
        return tree_map(lambda *gs: torch.stack(gs), *one)


ONE_HOT = torch.eye(CLASSES, dtype=torch.float64)
LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mse": lambda s, out, y: (out - ONE_HOT[y]).square().mean((-2, -1)),
    "cross entropy": lambda s, out, y: (out.logsumexp(-1) - (out * ONE_HOT[y]).sum(-1)).mean(-1),
    "root": lambda s, out, y: ((out - ONE_HOT[y]).square().mean((-2, -1)) + 1).sqrt(),
    "centered": lambda s, out, y: (out.mean((-2, -1)) - s.pmean(out.mean((-2, -1))) - y.double().mean(-1)).square(),
}


def stepped(s: Any, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
    return tree_map(lambda a, g: a - 0.1 * g, p, s.grad(lambda p: f(p, x, y))(p))


def weighted(tree: Tree) -> Tree:
    """A sum over dim 0, of samples."""
    w = torch.tensor([0.5, -1.0, 2.0, 1.5], dtype=torch.float64)
    return tree_map(lambda g: (w[: len(g)].reshape(-1, *[1] * (g.ndim - 1)) * g).sum(0), tree)


# Of a side, its loss, parameters, a direction like them, inputs and targets.
DERIVATIVES: dict[str, Callable[..., Results]] = {
    "value": lambda s, f, p, v, x, y: {"value": f(p, x, y)},
    "grad": lambda s, f, p, v, x, y: {"grad": s.gradient(f, p, x, y)},
    "aux": lambda s, f, p, v, x, y: s.with_aux(f, p, x, y),
    "by inputs too": lambda s, f, p, v, x, y: dict(
        zip(("grad", "by x"), s.by_both(lambda p, x: f(p, x, y), p, x), strict=True)
    ),
    "both trees": lambda s, f, p, v, x, y: dict(
        zip(("grad", "by delta"), s.by_both(lambda p, d: replace(s, delta=d).loss(p, x, y), p, s.delta), strict=True)
    ),
    "hvp": lambda s, f, p, v, x, y: {"hvp": jvp(s.grad(lambda p: f(p, x, y)), (p,), (v,))[1]},
    "grad of grad": lambda s, f, p, v, x, y: {"hvp": s.grad(lambda p: s.dot(s.grad(lambda p: f(p, x, y))(p), v))(p)},
    "grad of jvp": lambda s, f, p, v, x, y: {"hvp": s.grad(lambda p: jvp(lambda p: f(p, x, y), (p,), (v,))[1])(p)},
    "maml": lambda s, f, p, v, x, y: {"grad": s.grad(lambda p: f(stepped(s, f, p, x, y), x.flip(-2), y.flip(-1)))(p)},
    "jvp": lambda s, f, p, v, x, y: dict(zip(("value", "tangent"), jvp(lambda p: f(p, x, y), (p,), (v,)), strict=True)),
    "vmap over models": lambda s, f, p, v, x, y: {
        "values": vmap(lambda p: f(p, x, y), out_dims=-1)(tree_map(lambda a, b: torch.stack([a, a + b]), p, v))
    },
    "per sample": lambda s, f, p, v, x, y: {"grad": weighted(s.of_samples(f, p, x, y))},
}
