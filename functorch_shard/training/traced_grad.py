"""``fs.grad`` as Dynamo traces it: the function under ``torch.func``, and what is around it in opaque calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ..layout.trees import Sharded
from ..opaque import DIFFERENTIATED, opaque
from ..sharding.reduction import mean_at_end_of_grad
from ..torch_internals.pytree import torch_pytree
from ..torch_internals.transforms import current_level
from .argnums import Argnums, as_asked, check_scalar, positions
from .differentiated_leaves import carried_wider, is_sharded, wanted_leaves


def traced_grad_and_value(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """What ``fs.grad_and_value`` does, for Dynamo."""

    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        chosen = positions(argnums, len(args))
        leaves, treedef = torch_pytree.tree_flatten([args[i] for i in chosen])
        wanted = _wanted_of_all([args[i] for i in chosen])

        def scalar(tensors: Sequence[Tensor]) -> Any:
            rest = iter(tensors)
            given = [next(rest) if use else x for x, use in zip(leaves, wanted, strict=True)]
            call = list(args)
            for i, tree in zip(chosen, torch_pytree.tree_unflatten(given, treedef), strict=True):
                call[i] = tree
            DIFFERENTIATED.append(_level_here())
            value, aux = check_scalar(fn(*call, **kwargs), has_aux)
            DIFFERENTIATED.pop()
            return value, aux if has_aux else ()

        picked = [x for x, use in zip(leaves, wanted, strict=True) if use]
        grads, (value, aux) = torch.func.grad_and_value(scalar, has_aux=True)(picked)
        rest = iter(grads)
        filled = [next(rest) if use else None for use in wanted]
        trees = _averaged(torch_pytree.tree_unflatten(filled, treedef))
        return as_asked(trees, argnums), (value, aux) if has_aux else value

    return gradient_and_value


def traced_grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """What ``fs.grad`` does, for Dynamo."""
    both = traced_grad_and_value(fn, argnums, has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        grads, value = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


@opaque
def _level_here() -> int:
    return current_level()


@opaque
def _wanted_of_all(trees: Sequence[Any]) -> list[bool]:
    if any(flag for tree in trees for flag in carried_wider(tree)):
        raise NotImplementedError("fs.grad with MixedPrecision: decorate the step with @mesh.spmd, or use fs.compile.")
    return [flag for tree in trees for flag in wanted_leaves(tree)]


@opaque
def _averaged(trees: Sequence[Any]) -> list[Any]:
    """``trees`` with the mean over ranks taken of the gradients with respect to ``Sharded`` arguments."""

    def at_end(x: Any) -> Any:
        return Sharded(mean_at_end_of_grad(x, x.layout), x.layout) if isinstance(x, Sharded) else x

    return [optree.tree_map(at_end, tree, is_leaf=is_sharded, none_is_leaf=True) for tree in trees]
