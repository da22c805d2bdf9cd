"""The value of one rank on all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..communication.axis import Axis
from .operands import aside


def of_rank(x: Tensor, axis: Axis, rank: int, kind: str, numel: int) -> Tensor:
    """The ``x`` of one rank of a simulated axis, on every rank: bitwise, whatever the others hold.

    Recorded as a collective ``kind`` of ``numel`` elements, which does this on real ranks. Not differentiable.
    """
    return _OfRank.apply(x, axis.backend.index(), axis, rank, kind, numel)


class _OfRank(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor, axis: Axis, rank: int, kind: str, numel: int) -> Tensor:
        raise AssertionError(f"no level of axis {axis.name!r} around this")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor, axis: Axis, rank: int, kind: str, numel: int) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _OfRank.apply(x, index, axis, rank, kind, numel), batch_dim
        axis.announce(kind, numel, x.dtype)
        return x if in_dims[0] is None else x.select(in_dims[0], rank), None
