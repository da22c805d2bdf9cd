"""The value of one rank on all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..communication.axis import Axis
from ..torch_internals.autograd import Function
from .operands import aside, fold, place_of, stack


def of_rank(x: Tensor, axis: Axis, rank: int, kind: str) -> Tensor:
    """What one rank of a simulated axis has in ``x``, bitwise, whatever the others hold. Not differentiable.

    By a ``"broadcast"`` every rank gets its ``x``, by a ``"scatter"`` rank r row r of it.
    """
    return _OfRank.apply(x, *place_of(axis), axis, rank, kind)


class _OfRank(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor, others: Tensor | None, axis: Axis, rank: int, kind: str) -> Tensor:
        raise AssertionError(f"no level of axis {axis.name!r} around this")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, index: Tensor, others: Tensor | None, axis: Axis, rank: int, kind: str
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0], -1)  # rows stay in dim 0
            axis = fold(axis, info, in_dims)
            return _OfRank.apply(x, index, others, axis, rank, kind), batch_dim
        received = axis.issue(kind, stack(x, in_dims[0], axis), source=rank).wait()
        return received, 0 if kind == "scatter" else None
