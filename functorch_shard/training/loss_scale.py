"""Loss scaling for float16: pure functions of an explicit state.

Small gradients underflow in float16. So the loss is multiplied by a scale before it is differentiated, and the
gradients are divided by it; if they overflowed the step is skipped, on all ranks or on none. The interface is that of
jmp (https://github.com/google-deepmind/jmp), the rule of the dynamic scale that of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ..containers import Static
from ..layout.layout import rank_dims
from ..layout.trees import Sharded, check_shards
from ..storage.memory_kind import to_memory_kind_of
from .norms import all_finite, scaled

State = dict[str, Tensor]
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class LossScale(Static):
    """A loss scale: made by :meth:`dynamic` or :meth:`static`. It holds options, and no state.

    A step is: ``grads, finite = scaling.unscale(fs.grad(lambda p: scaling.scale(loss_fn(p), s))(params), s)``, then
    ``params, state = scaling.select(finite, opt.step(params, grads=grads, state=state), (params, state))``, then
    ``s = scaling.update(s, finite)``.

    Example:
        >>> scaling = LossScale.dynamic(initial=8.0)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> grads = fs.shard({"fc.w": torch.tensor([8.0, 16.0, float("inf")])}, layout)
        >>> grads, finite = scaling.unscale(grads, scaling.init(grads))
        >>> grads["fc"], finite      # one rank overflowed; the flag is the same on every rank
        (tensor([[1., 2.],
                [inf, 0.]]), tensor([False, False]))
        >>> scaling.update(scaling.init(grads), finite)["scale"]
        tensor([4., 4.])
    """

    initial: float
    growth: float = 1.0
    backoff: float = 1.0
    interval: int = 1

    @staticmethod
    def dynamic(initial: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
        """Make a scale that shrinks when gradients overflow, and grows after ``interval`` finite steps in a row.

        Args:
            initial: the first scale.
            growth: the factor after ``interval`` finite steps in a row, above 1.
            backoff: the factor after a step that was not finite, between 0 and 1.
            interval: a number of steps.
        """
        if not (0 < backoff < 1 < growth < inf and interval >= 1):
            got = f"growth={growth}, backoff={backoff}, interval={interval}"
            raise ValueError(f"LossScale: got {got}, expected 0 < backoff < 1 < growth, and 1 or more steps")
        return replace(LossScale.static(initial), growth=growth, backoff=backoff, interval=interval)

    @staticmethod
    def static(value: float) -> LossScale:
        """Make a scale that is always ``value``; steps that are not finite are skipped."""
        if not 0 < value <= torch.finfo(torch.float32).max:
            raise ValueError(f"LossScale: got {value}, expected a positive number that float32 can hold")
        return LossScale(value)

    def init(self, params: Sharded) -> State:
        """Return the state before the first step.

        Args:
            params: the parameters, for their ranks and device; this rank's or stacked.

        Returns:
            ``{"scale": float32, "good_steps": int32}`` of shape ``()``, with rank dims where ``params`` have them.
        """
        layout = params.layout
        scale = torch.full(rank_dims(layout), self.initial, dtype=torch.float32, device=layout.mesh.device)
        return {"scale": scale, "good_steps": torch.zeros_like(scale, dtype=torch.int32)}

    def scale(self, loss: Tensor, state: State) -> Tensor:
        """Multiply ``loss`` by the scale, in float32 or wider, since the product may overflow in float16.

        The gradient with respect to a float16 loss is the scale itself, and 65536 is infinite in float16: compute the
        loss from ``logits.float()``, otherwise a dynamic scale skips its first step.
        """
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * state["scale"]

    def unscale(self, grads: Sharded, state: State) -> tuple[Sharded, Tensor]:
        """Divide ``grads`` by the scale; also return whether all of them were finite, on all ranks.

        Args:
            grads: gradients of a scaled loss, reduced and sharded; inside ``spmd`` or, with rank dims, outside.
            state: from :meth:`init` or :meth:`update`.

        Returns:
            ``(grads, finite)``: the gradients in their dtypes, with ``None`` and integers unchanged; a bool tensor of
            shape ``()`` (outside ``spmd`` with rank dims), the same on every rank of every axis.

        Cost:
            One all-reduce of a number per axis, and a copy of the gradients.
        """
        check_shards("LossScale.unscale: grads", grads, grads.layout, gradients=True)
        if not grads.layout.mesh.in_spmd:
            return grads.layout.mesh.spmd(self.unscale)(grads, state)
        # rounded once, as torch.amp.GradScaler does
        inverse = state["scale"].double().reciprocal().float()
        return scaled(grads, inverse), all_finite(grads)

    def update(self, state: State, finite: Tensor) -> State:
        """Return the state for the next step, inside ``spmd`` or outside, by the rule of ``torch.amp.GradScaler``."""
        scale, good = state["scale"], (state["good_steps"] + 1) * finite
        ripe = good >= self.interval
        grown = (scale.double() * self.growth).float()
        grown = torch.where(ripe & torch.isfinite(grown), grown, scale)
        fallen = (scale.double() * self.backoff).float()
        return {"scale": torch.where(finite, grown, fallen), "good_steps": good * ~ripe}

    def select(self, finite: Tensor, new: Tree, old: Tree) -> Tree:
        """Return ``new`` if the step was finite, else ``old``, bitwise: the step is skipped.

        Args:
            finite: from :meth:`unscale`.
            new: parameters, optimizer state, or any pytree, after the step; not from a step with ``donate=True``, which
                overwrites ``old``.
            old: the same before the step. ``None`` stands for zeros where ``new`` has a shard, such as SGD's momentum,
                which the first step creates. That first step is another one with ``dampening``, and where a class of
                yours starts from other values: choose an initial scale that does not overflow.

        Returns:
            A tree with the structure of ``new``.

        Raises:
            ValueError: the trees differ in structure, or in a leaf that is not a tensor; or ``old`` has ``None`` for a
                number, such as the step count of ASGD.

        Cost:
            No collectives; memory for the result.
        """
        trees: Any = (new, old)
        there = cache(finite.to)
        chosen: Any = optree.tree_map(lambda a, b: _choose(there, a, b), *trees, none_is_leaf=True)
        return chosen


def _choose(finite: Callable[[torch.device], Tensor], new: Any, old: Any) -> Any:
    if isinstance(new, Tensor):
        where = finite(new.device)
        if old is None and new.ndim == where.ndim:
            raise ValueError("LossScale.select: the first step makes a number: it cannot be skipped.")
        where = where.reshape((*where.shape, *[1] * (new.ndim - where.ndim)))
        return to_memory_kind_of(torch.where(where, new, torch.zeros_like(new) if old is None else old), new)
    if isinstance(old, Tensor) or (new is not old and new != old):
        raise ValueError(f"LossScale.select: got {new!r} and {old!r}: only tensors can differ between the trees.")
    return new
