"""``apply``: call a model with buffers as a pure function that returns the new buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import name_problems, reject
from ..layout.planning import aliases_of, named_tensors
from ..layout.trees import Sharded
from ..sharding.gather import gather
from ..torch_internals.autograd import marks_every_batch
from .bind import bind


def apply(
    model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Call a model with the given parameters and buffers; return its output and the new buffers.

    ``functional_call`` for models whose forward updates buffers, such as BatchNorm. Updates, in place or by assignment,
    are returned: neither ``buffers`` nor the model are written to. ``model.train()`` and ``model.eval()`` have their
    usual meaning. A model that checkpoints itself is recomputed with these parameters, as by :func:`bind`; each batch
    updates the buffers once.

    Args:
        model: called as ``model(*args, **kwargs)``; its own values are not used, so it may be on the meta device.
        params: every parameter by name: a ``Full``, a mapping, or a ``Sharded``, which is gathered. Tied parameters
            under any of their names.
        buffers: every buffer by name, for example ``dict(model.named_buffers())`` or the result of
            :func:`init`.
        args, kwargs: for the model.

    Returns:
        ``(output, new_buffers)``, a dict with the names of ``buffers``: statistics of this rank's own samples. Use
        ``collectives.pmean`` to average them over ranks. Both are differentiable if the model is. On simulated ranks,
        inside ``spmd``, every new buffer is a per-rank value.

    Raises:
        TypeError: ``model`` is not a module, or a buffer is not a tensor.
        ValueError: parameters or buffers are missing, or the model does not have them; all of them are listed. Or the
            model added or removed a buffer while it ran.
        RuntimeError: on batched simulated ranks, BatchNorm with ``momentum=None``, which divides by a number that it
            reads from a buffer.

    Cost:
        Those of :func:`bind`, and two copies of the buffers.

    Example:
        >>> mesh, model = fs.simulated_mesh(2), nn.BatchNorm1d(1, affine=False, momentum=0.5)
        >>> rows = torch.tensor([[[1.0], [3.0]], [[5.0], [9.0]]])   # row r = rank r's samples
        >>> mean = lambda x: apply(model, {}, dict(model.named_buffers()), x)[1]["running_mean"]
        >>> mesh.spmd(mean)(rows), model.running_mean
        (tensor([[1.0000],
                [3.5000]]), tensor([0.]))
    """
    params = gather(params) if isinstance(params, Sharded) else params
    _check(model, params, buffers)
    bound = bind(model, params, {name: _copy(model, name, x) for name, x in buffers.items()})
    output = bound(*args, **kwargs)
    after = dict(bound.named_buffers(remove_duplicate=False))
    _check_after(model, after)
    return output, {name: after[name].clone() for name in buffers}  # recomputation in backward writes to the bound ones


def _copy(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """A copy that the model may write to in place, also with batched values."""
    x = x.detach() if _has_no_derivative(model, name) else x
    mark = marks_every_batch(x.device)
    return x.clone() if mark is None else torch.where(mark, x, x)


_BATCH_NORMS = {nn.BatchNorm1d.forward, nn.InstanceNorm1d.forward, nn.SyncBatchNorm.forward}  # those of 2d and 3d too


def _has_no_derivative(model: nn.Module, name: str) -> bool:
    """Whether torch refuses that these statistics require grad, as results of :func:`remat` may."""
    owner, _, leaf = name.rpartition(".")
    return leaf in ("running_mean", "running_var") and type(model.get_submodule(owner)).forward in _BATCH_NORMS


def _check(model: nn.Module, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: model: got {type(model).__name__}, expected an nn.Module")
    for what, tensors in (("params", params), ("buffers", buffers)):
        if not isinstance(tensors, Mapping):
            raise TypeError(f"apply: {what}: got {type(tensors).__name__}, expected a mapping name -> tensor")
    every = named_tensors(model)
    aliases = aliases_of(every)
    first = [aliases.get(name, name) if name in every else name for name in params]
    problems = name_problems(first, [name for name in every if name not in aliases], where="the model's parameters")
    problems += name_problems(buffers, [name for name, _ in model.named_buffers()], where="the model's buffers")
    advice = "Pass every parameter, and every buffer as dict(model.named_buffers()) lists them."
    reject("apply", problems, advice)
    wrong = [f"{name!r}: got {type(x).__name__}" for name, x in buffers.items() if not isinstance(x, Tensor)]
    reject("apply", wrong, "Buffers are tensors.", TypeError)


def _check_after(model: nn.Module, after: Mapping[str, Tensor]) -> None:
    every = dict(model.named_buffers(remove_duplicate=False))
    problems = [f"{name!r}: removed" for name in every if name not in after]
    problems += [f"{name!r}: added" for name in after if name not in every]
    problems += [
        f"{alias!r}: tied to {name!r}, but the model assigned to one of them"
        for alias, name in aliases_of(every).items()
        if alias in after and name in after and after[alias] is not after[name]
    ]
    reject(
        "apply", problems, "A model may change the values of its buffers while it runs, but not add or remove buffers."
    )
