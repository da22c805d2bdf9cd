"""``call``: call a model with the given parameters, which stay valid until backward is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..layout.trees import Sharded
from ..sharding.gather import gather
from ..torch_internals.parameter_swap import Swap
from ..torch_internals.recomputation import checkpoints_explained


def call(model: nn.Module, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``model(*args, **kwargs)`` with ``params`` as its parameters, which stay valid until backward is done.

    ``functional_call`` for any model, including models that checkpoint themselves: ``gradient_checkpointing_enable()``
    of transformers, ``set_grad_checkpointing()`` of timm, any module that calls ``torch.utils.checkpoint``. Backward
    recomputes with the parameters and buffers of the forward, also if the model was called with others in between. The
    gradient is that of the model without checkpointing.

    Between forward and backward, and after an error, the model has its own parameters; they are never written to.

    Args:
        model: called as ``model(*args, **kwargs)``. It may be on the meta device, where ``params`` has every parameter
            and the model no buffers (:func:`apply` takes buffers too).
        params: parameters by name: a ``Sharded``, which is gathered, a ``Full``, or any mapping. Tied parameters under
            any of their names. For parameters that are left out the model's own are used, as in ``functional_call``,
            and so are its buffers: forward writes to them, recomputation does not.
        args, kwargs: for the model.

    Returns:
        What the model returns.

    Raises:
        TypeError: ``model`` is not a module, or ``params`` is not a mapping of tensors.
        ValueError: names that the model does not have, or two tensors for one tied parameter; all of them are listed.
        RuntimeError: the model checkpoints with ``use_reentrant=True``, or runs in another thread at the same time.
        NotImplementedError: the model checkpoints itself on simulated ranks or inside a transform of ``torch.func``.

    Cost:
        For a ``Sharded``, the collectives of :func:`gather`: as many as without checkpointing, and one more all-gather
        for every further unit that one checkpoint spans. A copy of the buffers that checkpointed parts read.

    Example:
        >>> class Checkpointed(nn.Sequential):
        ...     def forward(self, x):
        ...         return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        >>> model = Checkpointed(nn.Linear(2, 1, bias=False))
        >>> params = fs.shard({"0.weight": torch.tensor([[1.0, 2.0]])}, fs.plan(model, fs.init_mesh()))
        >>> loss = lambda params, x: call(model, params, x).square().sum()
        >>> fs.grad(loss)(params, torch.tensor([[1.0, 3.0]]))["0"]
        tensor([14., 42.])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"call: model: got {type(model).__name__}, expected an nn.Module")
    if not isinstance(params, Mapping):
        raise TypeError(f"call: params: got {type(params).__name__}, expected a Sharded, or a mapping name -> tensor")
    full = gather(params) if isinstance(params, Sharded) else params
    if torch.compiler.is_compiling():  # recomputation is traced with the rest
        return functional_call(model, dict(full), args, kwargs)
    with checkpoints_explained("call"), Swap("call", model, full, keep=True).running():
        return model(*args, **kwargs)
