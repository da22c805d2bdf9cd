"""Offloading: shards may be stored on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from ..collectives.sinks import refuse_derivatives
from ..layout.trees import take_tensors
from .memory_kind import MemoryKind


def offload(tree: Any, where: str = "cpu") -> Any:
    """Move the tensors of a tree to memory of the CPU, pinned if there is an accelerator.

    Computation stays on the mesh's device: :func:`gather` copies the shard of each unit there, ahead of its use.
    Tensors made from a shard have its memory kind: gradients of the lazy gather, the state of ``opt.init``, the results
    of ``opt.step``, which runs on the CPU. With ``donate=True`` the step writes into the memory itself.

    Args:
        tree: any pytree: ``Sharded`` trees, optimizer state, plain tensors; with rank dims or without, outside
            transforms. Leaves that are not tensors are passed through.
        where: ``"cpu"``.

    Returns:
        The same tree of detached tensors with the same values. A tensor that is in such memory is passed through.

    Raises:
        ValueError: ``where`` is something else.
        RuntimeError: inside a transform, or of what ``fs.grad`` differentiates by.

    Cost:
        No collectives, one copy.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params, grads = (fs.shard({"fc.w": torch.tensor(x)}, layout) for x in ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
        >>> opt, away = fs.optimizer(torch.optim.SGD, lr=1.0), offload(params, "cpu")
        >>> _ = opt.step(away, grads=grads, state=opt.init(away), donate=True)
        >>> away["fc"]   # row r = rank r
        tensor([[0., 1.],
                [2., 0.]])

    Replaces FSDP2's ``CPUOffloadPolicy`` and FSDP1's ``CPUOffload``.
    """
    if where != "cpu":
        raise ValueError(f"offload: where: got {where!r}, expected 'cpu'. The mesh has a device of its own.")
    tensors, put_back = take_tensors(tree)
    refuse_derivatives("offload", tensors)
    pinned = MemoryKind(torch.device("cpu"), pinned=torch.accelerator.is_available())
    return put_back([pinned.put(x.detach()) for x in tensors])
