"""Optimizers of our own, each with one habit that classes out in the world have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


class Base(torch.optim.Optimizer):
    """``lr`` is required; a subclass says how one parameter moves, if not against its gradient."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, param.grad, self.state[param], group)

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad)


class Averaged(Base):
    """Elementwise, with a step count that is a Python number."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["mean"] = 0, torch.zeros_like(param)
        state["step"] += 1
        state["mean"].add_((grad - state["mean"]) / state["step"])
        param.sub_(group["lr"] * state["mean"].sign() * state["mean"].square())


class CountsSteps(Base):
    """As pytorch-optimizer: the step count of all parameters is in their group."""

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param))
        mean.lerp_(grad, 0.1)
        param.sub_(group["lr"] * mean / (1 - 0.9 ** group["step"]))


class HalvesItsRate(CountsSteps):
    """As schedules inside of optimizers: a number that depends on the steps alone, and a flag."""

    def begin(self, group: dict[str, Any]) -> None:
        super().begin(group)
        group["scale"] = group.get("scale", 1.0) / 2
        group["warm"] = group["step"] > 3

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        super().move(param, grad * group["scale"] * (2 if group["warm"] else 1), state, group)


class CountsIfAsked(Base):
    """Its step count depends on an option."""

    def __init__(self, params: Any, lr: float, counts: bool = False) -> None:
        super().__init__(params, lr, counts=counts)

    def begin(self, group: dict[str, Any]) -> None:
        if group["counts"]:
            group["step"] = group.get("step", 0) + 1


class Estimates(Base):
    """As Prodigy: the distance that all parameters have come makes the rate of all of them."""

    def begin(self, group: dict[str, Any]) -> None:
        dots = [(p.grad * p).sum().item() for p in group["params"] if p.grad is not None]
        group["d"] = max(group.get("d", 1e-6), *(abs(x) for x in dots))

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * group["d"] * grad)


class EstimatesSlowly(Base):
    """As D-Adaptation: the distance, a tensor in the group, does not grow before steps are large."""

    def begin(self, group: dict[str, Any]) -> None:
        dots = [group["lr"] * p.grad.norm() for p in group["params"] if p.grad is not None]
        group["d"] = max(group.get("d", torch.tensor(0.5)), *dots)

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        param.sub_(1e-3 * group["d"] * grad)


class TrustRatio(Base):
    """As LAMB: the step of an element depends on the norm of all."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad * param.norm() / grad.norm())


class Cautious(Base):
    """As ``caution=True``: what remains under a mask is scaled by the mean of the mask."""

    def __init__(self, params: Any, lr: float, caution: bool = False) -> None:
        super().__init__(params, lr, caution=caution)

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param))
        mean.lerp_(grad, 0.1)
        if group["caution"]:
            mask = (mean * grad > 0).to(grad.dtype)
            mean = mean * mask / mask.mean().clamp(min=1e-3)
        param.sub_(group["lr"] * mean)


class FlipsMatrices(Base):
    """No operator makes fewer elements; they only change their places."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (grad.flip(0) if grad.ndim else grad))


class OfTheHessian(Base):
    """As AdaHessian: derivatives of gradients, of parameters that require them."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        if param.requires_grad:
            (curvature,) = torch.autograd.grad(grad, param, torch.ones_like(grad))
            param.sub_(group["lr"] * grad / curvature)


class Lists(Base):
    """As AggMo: a list of momentums."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        momentums = state.setdefault("momentums", [torch.zeros_like(param) for _ in range(2)])
        for beta, x in zip((0.5, 0.9), momentums, strict=True):
            param.sub_(group["lr"] * x.mul_(beta).add_(grad))


class FromTheFirst(Base):
    """As Adopt: the first step makes state of its gradient, and moves nothing."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        if not state:
            state["square"] = torch.zeros_like(param)
            state["square"].addcmul_(grad, grad)
            return
        param.sub_(group["lr"] * grad / state["square"].sqrt().clamp(min=1e-3))
        state["square"].lerp_(grad * grad, 0.1)


class OnItself(Base):
    """What it remembers is on the optimizer."""

    count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] / self.count * grad)


class ChangesItsRate(Base):
    """The learning rate in its group is its own to change."""

    def begin(self, group: dict[str, Any]) -> None:
        group["lr"] *= 0.9


class HasModes(CountsSteps):
    """As schedule-free optimizers."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


class WritesGradients(Base):
    """As many: weight decay is added to the gradient in place."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        grad.add_(param, alpha=0.1)
        param.sub_(group["lr"] * grad)


class Shampoo(Base):
    """Two preconditioners for a matrix, of its rows and of its columns, which begin as multiples of the identity."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        if not state:
            state["rows"], state["columns"] = (0.1 * torch.eye(n, dtype=grad.dtype) for n in grad.shape)
        state["rows"].add_(grad @ grad.T)
        state["columns"].add_(grad.T @ grad)
        left, right = (self.root(state[name]) for name in ("rows", "columns"))
        param.sub_(group["lr"] * left @ grad @ right)

    def root(self, x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(x)
        return vectors @ torch.diag(values.clamp(min=1e-9) ** -0.25) @ vectors.T


class Soap(Base):
    """Its first step makes lists of matrices and moves nothing; an inner dict has what Adam has."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        grams = [grad @ grad.mT, grad.mT @ grad]
        if not state:
            state["step"], state["grams"], state["no"] = 0, grams, None
            state["bases"] = [torch.linalg.eigh(x)[1] for x in grams]
            state["adam"] = {"mean": torch.zeros_like(grad), "square": torch.zeros_like(grad)}
            return
        state["step"] += 1
        for kept, x in zip(state["grams"], grams, strict=True):
            kept.lerp_(x, 0.1)
        left, right = state["bases"]
        mean, square = state["adam"]["mean"].lerp_(grad, 0.1), state["adam"]["square"]
        turned = left.T @ grad @ right
        square.lerp_(turned * turned, 0.1)
        moved = left.T @ mean @ right / (square.sqrt() + 1e-8) / (1 - 0.9 ** state["step"])
        param.sub_(group["lr"] * left @ moved @ right.T)
        state["bases"] = [
            torch.linalg.qr(x @ basis)[0] for x, basis in zip(state["grams"], state["bases"], strict=True)
        ]


class WideMomentum(Base):
    """Its state is in float32, whatever its parameters are in; and the update divides by a norm."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param, dtype=torch.float32))
        mean.lerp_(grad.float(), 0.1)
        param.add_((-group["lr"] * mean / mean.norm().clamp(min=1e-6)).to(param.dtype))


class GrowsLater(Base):
    """From its second step on it keeps one more tensor."""

    def move(self, param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        if "first" in state:
            state["second"] = grad.clone()
        state["first"] = grad.clone()
        param.sub_(group["lr"] * grad)
