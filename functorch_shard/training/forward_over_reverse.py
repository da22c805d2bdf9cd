"""Gradients inside of ``torch.func.jvp`` with the memory of ``backward()``: Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import nodes, requires_grad_anywhere

# The backward of these operators has a derivative in forward mode that is right without a graph of it. That of others
# may have none (SiLU, dropout on a device), or a wrong one in silence (linalg.solve, det, slogdet).
_NAMES = """Add Sub Mul Div Neg Pow Sqrt Rsqrt Exp Log Abs Sin Cos Tanh Sigmoid Relu Gelu Softmax LogSoftmax NllLoss
MseLoss NativeLayerNorm Mm Bmm Addmm Dot Mv Embedding Sum Mean Cat Stack Where MaskedFill T Transpose Permute View
UnsafeView ReshapeAlias Expand Squeeze Unsqueeze Clone Select Slice Split SplitWithSizes Unbind AsStrided ToCopy"""
_NEED_NO_GRAPH = {f"{name}Backward{i}" for name in _NAMES.split() for i in range(3)}


def grad_and_value_freeing(fn: Callable[[Sequence[Tensor]], Any]) -> Callable[[Sequence[Tensor]], Any]:
    """``torch.func.grad_and_value`` with aux, which frees activations as it proceeds if nothing needs a graph.

    Forward mode around it goes through backward as it goes through forward; nothing has to be kept for it.
    """

    def gradient_and_value(inputs: Sequence[Tensor]) -> Any:
        keep = False

        def looked_at(inputs: Sequence[Tensor]) -> Any:
            nonlocal keep
            value, aux = fn(inputs)
            keep = any(not needs_no_graph(node) for node in nodes(value.grad_fn))
            return value, aux

        of_value: Any = torch.func.vjp(looked_at, inputs, has_aux=True)
        value, pull, aux = of_value
        keep = keep or (torch.is_grad_enabled() and requires_grad_anywhere(value))  # plain autograd records it
        (grads,) = pull(torch.ones_like(value), retain_graph=keep, create_graph=keep)
        return grads, (value, aux)

    return gradient_and_value


def needs_no_graph(node: Any) -> bool:
    own = hasattr(node, "context")  # a Function of this package
    return own or hasattr(node, "variable") or node.name() in _NEED_NO_GRAPH
