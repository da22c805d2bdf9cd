"""Results whose derivative raises: what is computed by copies into new memory, of values that may be differentiated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..torch_internals.transforms import is_functorch_wrapped_tensor


def without_derivative(message: str, results: Mapping[str, Tensor], sources: Iterable[Tensor]) -> dict[str, Tensor]:
    """``results`` of ``sources``: a derivative by these, which would be zero, raises ``message``."""
    tracked = [x for x in sources if x.requires_grad or is_functorch_wrapped_tensor(x)]
    if not tracked or not results:
        return dict(results)
    return dict(zip(results, _Refused.apply(message, len(results), *results.values(), *tracked), strict=True))


class _Refused(Function):
    """The identity of the first tensors, as functions of the others too."""

    @staticmethod
    def forward(message: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:number])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def vmap(info: Any, in_dims: Any, message: str, number: int, *tensors: Tensor) -> Any:
        return _Refused.apply(message, number, *tensors), in_dims[2 : 2 + number]
