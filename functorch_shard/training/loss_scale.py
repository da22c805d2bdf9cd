"""Loss scaling for float16: pure, state in, state out.

Small gradients vanish in float16. So the loss is multiplied by a scale before it is differentiated, and the gradients
are divided by it; where they overflowed the step is skipped, on all ranks or on none. The form is that of jmp
(https://github.com/google-deepmind/jmp), the rule of the dynamic scale that of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ..containers import Static
from ..errors import reject
from ..layout.ranks import rank_dims
from ..layout.trees import Sharded, map_items
from ..layout.validation import check_sharded, check_shards
from ..storage.memory_kind import to_memory_kind_of
from .finite import all_finite
from .norms import wide

State = dict[str, Tensor]
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class LossScale(Static):
    """How a loss is scaled: made by :meth:`dynamic`, :meth:`static` or :meth:`none`. It holds numbers and no state.

    All three have the same methods, and states of the same form, ``{"scale": float32, "good_steps": int32}``; so a step
    is written once:

    ``grads, finite = scaling.unscale(fs.grad(lambda p: scaling.scale(loss_fn(p), s))(params), s)``, then
    ``params, state = scaling.select(finite, opt.step(params, grads=grads, state=state), (params, state))``, then
    ``s = scaling.update(s, finite)``.

    Example:
        >>> scaling = LossScale.dynamic(initial=8.0)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([8.0, 16.0, float("inf")])}, layout)
        >>> grads, finite = scaling.unscale(grads, scaling.init(grads))
        >>> grads["fc"], finite      # one rank overflowed, and every rank knows
        (tensor([[1., 2.],
                [inf, 0.]]), tensor([False, False]))
        >>> scaling.update(scaling.init(grads), finite)["scale"]
        tensor([4., 4.])
    """

    initial: float

    def __post_init__(self) -> None:
        reject("LossScale", self._problems(), "LossScale.dynamic() has the defaults of torch.amp.GradScaler.")

    @staticmethod
    def dynamic(
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        floor: float = 1.0,
    ) -> LossScale:
        """As large as float16 bears: smaller at once when gradients overflow, larger after a while without.

        Args:
            initial: the first scale.
            growth: what the scale is multiplied by after ``interval`` finite steps in a row, above 1.
            backoff: what it is multiplied by after a step that was not finite, between 0 and 1.
            interval: in steps.
            floor: what it never falls below.

        Raises:
            ValueError: numbers out of their ranges, all of them at once.
        """
        return DynamicLossScale(initial, growth, backoff, interval, floor)

    @staticmethod
    def static(value: float) -> LossScale:
        """Always ``value``; steps that are not finite are skipped."""
        return LossScale(value)

    @staticmethod
    def none() -> LossScale:
        """No scale: losses and gradients stay as they are, nothing is looked at, sent or skipped."""
        return NoLossScale(1.0)

    def init(self, params: Sharded) -> State:
        """The state before the first step.

        Args:
            params: the parameters, for their ranks and their device; this rank's or stacked.

        Returns:
            ``{"scale": float32, "good_steps": int32}`` of shape ``()``, with rank dims where ``params`` have them.
        """
        check_sharded("LossScale.init: params", params)
        layout = params.layout
        scale = torch.full(rank_dims(layout), self.initial, dtype=torch.float32, device=layout.mesh.device)
        return {"scale": scale, "good_steps": torch.zeros_like(scale, dtype=torch.int32)}

    def scale(self, loss: Tensor, state: State) -> Tensor:
        """``loss`` times the scale, in float32 at least: in float16 it would overflow for nothing.

        What comes back into a float16 loss is the scale itself, and 65536 is infinite there: compute the loss from
        ``logits.float()``, or a dynamic scale skips its first step.
        """
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * state["scale"]

    def unscale(self, grads: Sharded, state: State) -> tuple[Sharded, Tensor]:
        """``grads`` divided by the scale, and whether all of them were finite, on all ranks.

        Args:
            grads: gradients of a scaled loss, reduced and sharded; inside ``spmd`` or, with rank dims, outside.
            state: from :meth:`init` or :meth:`update`.

        Returns:
            ``(grads, finite)``: the gradients in their dtypes, ``None`` and integers passed through; bool of shape
            ``()`` (outside ``spmd`` with rank dims), the same on every rank of every axis.

        Raises:
            TypeError: ``grads`` is no ``Sharded``.
            ValueError: shards that do not fit their layout.

        Cost:
            One all-reduce of a number per axis, and a copy of the gradients.
        """
        check_sharded("LossScale.unscale: grads", grads)
        check_shards("LossScale.unscale: grads", grads, grads.layout, allow_none=True, gradients=True)
        if not grads.layout.mesh.in_spmd:
            return grads.layout.mesh.spmd(self.unscale)(grads, state)
        inverse = state["scale"].double().reciprocal().float()  # rounded once, as torch.amp.GradScaler does
        buffers = grads.layout.buffers

        def unscaled(key: str, x: Any) -> Any:
            if x is None or not buffers[key].differentiable:
                return x
            return to_memory_kind_of((wide(x) * inverse.to(x.device)).to(x.dtype), x)

        return map_items(unscaled, grads), all_finite(grads)

    def update(self, state: State, finite: Tensor) -> State:
        """The state for the next step, inside ``spmd`` or outside."""
        return state

    def select(self, finite: Tensor, new: Tree, old: Tree) -> Tree:
        """``new`` where the step was finite, else ``old``, bitwise: a step that is skipped.

        Args:
            finite: from :meth:`unscale`.
            new: parameters, optimizer state, any pytree, after the step; not of one with ``donate=True``, which has
                overwritten what ``old`` was.
            old: the same before it. ``None`` counts as zeros where ``new`` has a tensor: the momentum of SGD, which
                comes with the first step, and which is nothing until one is taken. With ``dampening`` torch takes that
                first step undamped, and after a skipped one it is damped: let the first scale be one that fits.

        Returns:
            The tree of ``new``.

        Raises:
            ValueError: the trees differ: in structure, or in what is no tensor.

        Cost:
            No collectives; the memory of the result.
        """
        trees: Any = (new, old)
        chosen: Any = optree.tree_map(lambda a, b: _choose(finite, a, b), *trees, none_is_leaf=True)
        return chosen

    def _problems(self) -> list[str]:
        fits = 0 < self.initial <= torch.finfo(torch.float32).max
        return [] if fits else [f"initial: got {self.initial}, expected a positive number that float32 can hold"]


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """``torch.amp.GradScaler``: grows after steps in a row that were finite, falls at once otherwise."""

    growth: float
    backoff: float
    interval: int
    floor: float

    def update(self, state: State, finite: Tensor) -> State:
        scale, good = state["scale"], (state["good_steps"] + 1) * finite
        ripe = good >= self.interval
        grown = (scale.double() * self.growth).float()
        grown = torch.where(torch.isfinite(grown), grown, scale)
        fallen = (scale.double() * self.backoff).float().clamp(min=self.floor)
        return {
            "scale": torch.where(finite, torch.where(ripe, grown, scale), fallen),
            "good_steps": good * ~ripe,
        }

    def _problems(self) -> list[str]:
        ranges = [
            (self.growth > 1 and isfinite(self.growth), f"growth: got {self.growth}, expected a number above 1"),
            (0 < self.backoff < 1, f"backoff: got {self.backoff}, expected a number between 0 and 1"),
            (
                isinstance(self.interval, int) and self.interval >= 1,
                f"interval: got {self.interval}, expected 1 or more steps",
            ),
            (0 <= self.floor <= self.initial, f"floor: got {self.floor}, expected 0 or more, not above {self.initial}"),
        ]
        return super()._problems() + [text for fits, text in ranges if not fits]


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """The null object: the arithmetic of nobody."""

    def scale(self, loss: Tensor, state: State) -> Tensor:
        return loss

    def unscale(self, grads: Sharded, state: State) -> tuple[Sharded, Tensor]:
        check_sharded("LossScale.unscale: grads", grads)
        return grads, torch.ones(rank_dims(grads.layout), dtype=torch.bool, device=grads.layout.mesh.device)

    def select(self, finite: Tensor, new: Tree, old: Tree) -> Tree:
        return new


def _choose(finite: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, Tensor):
        where = finite.reshape((*finite.shape, *[1] * (new.ndim - finite.ndim))).to(new.device)
        return to_memory_kind_of(torch.where(where, new, torch.zeros_like(new) if old is None else old), new)
    if isinstance(old, Tensor) or (new is not old and new != old):
        raise ValueError(f"LossScale.select: got {new!r} and {old!r}: only tensors can differ between the trees.")
    return new
