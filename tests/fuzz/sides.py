"""A program's loss and its derivatives, written once for both sides: as one rank of several, and as the whole batch.

Tensors of the twin have the ranks in dim 0, and so a loss only reduces dims that it counts from the end. What the twin
differentiates is the mean over ranks (or the sum) of what each of them returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

import functorch_shard as fs
from tests.fuzz.models import CLASSES
from tests.fuzz.programs import Program

Tree = Any
Results = dict[str, Any]
tree_map: Any = optree.tree_map


@dataclass(frozen=True)
class Side(ABC):
    """What both sides have; ``p`` is a tree of parameters, ``full`` whole ones."""

    program: Program
    model: nn.Module
    frozen: Tree  # parameters that ``p`` leaves out
    delta: Tree  # like p
    scale: Any = None  # of the loss

    @abstractmethod
    def full(self, p: Tree) -> Tree: ...

    @abstractmethod
    def out(self, full: Tree, x: Tensor) -> Tensor: ...

    @abstractmethod
    def norm(self, p: Tree) -> Tensor: ...

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

    def derivative(self, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
        f = fs.remat(self.loss) if self.program.remat else self.loss
        return OF_RANKS.get(self.program.derivative, DERIVATIVES.get(self.program.derivative))(self, f, p, v, x, y, w)  # type: ignore[misc]


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

    def derivative(self, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
        fn = OF_TWIN.get(self.program.derivative, DERIVATIVES.get(self.program.derivative))
        return fn(self, self.loss, p, v, x, y, w)  # type: ignore[misc]


ONE_HOT = torch.eye(CLASSES, dtype=torch.float64)
LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mse": lambda s, out, y: (out - ONE_HOT[y]).square().mean((-2, -1)),
    "cross entropy": lambda s, out, y: (out.logsumexp(-1) - (out * ONE_HOT[y]).sum(-1)).mean(-1),
    "root": lambda s, out, y: ((out - ONE_HOT[y]).square().mean((-2, -1)) + 1).sqrt(),
    "centered": lambda s, out, y: (out.mean((-2, -1)) - s.pmean(out.mean((-2, -1))) - y.double().mean(-1)).square(),
}


def of_weights(tree: Tree, w: Tensor) -> Tree:
    """The sum over dim 0, weighted."""
    return tree_map(lambda g: (w.reshape(-1, *[1] * (g.ndim - 1)) * g).sum(0), tree)


def both(s: Side, p: Tree, delta: Tree, x: Tensor, y: Tensor) -> Tensor:
    return replace(s, delta=delta).loss(p, x, y)


def stepped(s: Any, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
    return tree_map(lambda a, g: a - 0.1 * g, p, s.grad(lambda p: f(p, x, y))(p))


CONTRACTION = torch.tensor([0.5, -1.0, 2.0, 1.5], dtype=torch.float64)  # of rows of a Jacobian, or of samples
# Of a side, its loss, parameters, a direction like them, inputs, targets, and a weight of each rank.
DERIVATIVES: dict[str, Callable[..., Results]] = {
    "value": lambda s, f, p, v, x, y, w: {"value": f(p, x, y)},
    "grad": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y))(p)},
    "torch grad": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y))(p)},
    "backward": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y))(p)},
    "scatter": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y))(p)},
    "grad and value": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y))(p), "value": f(p, x, y)},
    "aux": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y))(p), "aux": s.out(s.full(p), x)},
    "hvp": lambda s, f, p, v, x, y, w: {"hvp": jvp(s.grad(lambda p: f(p, x, y)), (p,), (v,))[1]},
    "hessian": lambda s, f, p, v, x, y, w: {"hvp": jvp(s.grad(lambda p: f(p, x, y)), (p,), (v,))[1]},
    "grad of grad": lambda s, f, p, v, x, y, w: {"hvp": s.grad(lambda p: s.dot(s.grad(lambda p: f(p, x, y))(p), v))(p)},
    "grad of jvp": lambda s, f, p, v, x, y, w: {"hvp": s.grad(lambda p: jvp(lambda p: f(p, x, y), (p,), (v,))[1])(p)},
    "maml": lambda s, f, p, v, x, y, w: {
        "grad": s.grad(lambda p: f(stepped(s, f, p, x, y), x.flip(-2), y.flip(-1)))(p)
    },
    "jvp": lambda s, f, p, v, x, y, w: dict(
        zip(("value", "tangent"), jvp(lambda p: f(p, x, y), (p,), (v,)), strict=True)
    ),
    "vmap over models": lambda s, f, p, v, x, y, w: {
        "values": vmap(lambda p: f(p, x, y), out_dims=-1)(tree_map(lambda a, b: torch.stack([a, a + b]), p, v))
    },
    "vmap over directions": lambda s, f, p, v, x, y, w: {
        "hvp": of_weights(
            vmap(lambda v: jvp(s.grad(lambda p: f(p, x, y)), (p,), (v,))[1])(
                tree_map(lambda a, b: torch.stack([b, a * b]), p, v)
            ),
            CONTRACTION[:2],
        )
    },
}


def by_backward(s: Rank, f: Any, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
    buffers = p.layout.buffers
    leaves = {k: t.detach().requires_grad_() if buffers[k].trainable else t for k, t in p.items()}
    wanted = {k: t for k, t in leaves.items() if buffers[k].trainable}
    value = f(fs.Sharded(leaves, p.layout), x, y)
    grads = torch.autograd.grad(value, [*wanted.values()], allow_unused=True, materialize_grads=True)
    found = dict(zip(wanted, grads, strict=True))
    return {"grad": fs.Sharded({k: found.get(k) for k in p}, p.layout)}


def scattered(s: Rank, f: Any, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
    full = fs.gather(p, *s.frozen, lazy=s.program.lazy)
    scale = s.scale or (lambda value: value)
    grads = fs.scatter_grads(fs.grad(lambda full: scale(s.loss_of_full(full, x, y)))(full))
    return {"grad": fs.Sharded({key: grads[key] for key in p}, p.layout)}


def samples_apart(s: Rank, f: Any, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
    one = torch.func.grad(lambda p, x, y: f(p, x[None], y[None]))
    return {"grad": of_weights(vmap(one, (None, 0, 0))(p, x, y), CONTRACTION[: x.shape[0]])}


def with_aux(s: Rank, f: Any, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
    def loss(p: Tree) -> tuple[Tensor, Tensor]:
        return f(p, x, y), s.out(s.full(p), x)

    grads, aux = fs.grad(loss, has_aux=True)(p)
    return {"grad": grads, "aux": aux}


def with_value(s: Rank, f: Any, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
    grads, value = fs.grad_and_value(f)(p, x, y)
    return {"grad": grads, "value": value}


def pulled(s: Rank, f: Any, p: Tree, v: Tree, x: Tensor, y: Tensor, w: Tensor) -> Results:
    value, pull, *_ = vjp(lambda p: f(p, x, y), p)
    return {"grad": pull(w)[0], "value": value}


OF_RANKS: dict[str, Callable[..., Results]] = {
    "torch grad": lambda s, f, p, v, x, y, w: {"grad": torch.func.grad(f)(p, x, y)},
    "backward": by_backward,
    "scatter": scattered,
    "grad and value": with_value,
    "aux": with_aux,
    "per sample": samples_apart,
    "vjp": pulled,
    "by inputs too": lambda s, f, p, v, x, y, w: dict(zip(("grad", "by x"), fs.grad(f, (0, 1))(p, x, y), strict=True)),
    "both trees": lambda s, f, p, v, x, y, w: dict(
        zip(("grad", "by delta"), fs.grad(lambda p, d: both(s, p, d, x, y), (0, 1))(p, s.delta), strict=True)
    ),
    "hessian": lambda s, f, p, v, x, y, w: {"hvp": fs.curvature.hessian(f)(p, x, y) @ v},
    "jacrev": lambda s, f, p, v, x, y, w: {
        "grad": of_weights(fs.jacrev(lambda p: s.out(s.full(p), x).mean(-2))(p), CONTRACTION[:3])
    },
}


def _each_sample(s: Twin, f: Any, p: Tree, x: Tensor, y: Tensor) -> Tree:
    one = [s.grad(lambda p, i=i: f(p, x[:, i : i + 1], y[:, i : i + 1]))(p) for i in range(x.shape[1])]
    return tree_map(lambda *gs: torch.stack(gs), *one)


OF_TWIN: dict[str, Callable[..., Results]] = {
    "per sample": lambda s, f, p, v, x, y, w: {
        "grad": of_weights(_each_sample(s, f, p, x, y), CONTRACTION[: x.shape[1]])
    },
    "vjp": lambda s, f, p, v, x, y, w: {"grad": s.grad(lambda p: f(p, x, y) * w)(p), "value": f(p, x, y)},
    "by inputs too": lambda s, f, p, v, x, y, w: {
        "grad": s.grad(lambda p: f(p, x, y))(p),
        "by x": torch.func.grad(lambda x: f(p, x, y).sum())(x),
    },
    "both trees": lambda s, f, p, v, x, y, w: dict(
        zip(
            ("grad", "by delta"),
            torch.func.grad(lambda p, d: s.reduced(both(s, p, d, x, y)), (0, 1))(p, s.delta),
            strict=True,
        )
    ),
    "jacrev": lambda s, f, p, v, x, y, w: {
        "grad": of_weights(jacrev(lambda p: s.reduced(s.out(s.full(p), x).mean(-2)))(p), CONTRACTION[:3])
    },
}
