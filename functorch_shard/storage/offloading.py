"""Offloading: shards may be stored on the CPU or in memory-mapped files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import refuse_derivatives
from ..errors import local_path
from ..layout.trees import participants_of, take_tensors
from .memory_kind import MemoryKind

_CPU = torch.device("cpu")


def offload(tree: Any, where: str | os.PathLike[str]) -> Any:
    """Move the tensors of a tree to the CPU or to memory-mapped files.

    Computation stays on the mesh's device: :func:`gather` copies the shard of each unit there, ahead of its use.
    Tensors made from a shard have its memory kind: gradients of the lazy gather, the state of ``opt.init``, the results
    of ``opt.step``, which runs on the CPU. With ``donate=True`` the step writes into the memory itself.

    ``"cpu"``: memory of the CPU, pinned if there is an accelerator. A tensor that is in such memory is passed through.

    A directory: each tensor in a memory-mapped file without a name, freed with its tensor. The system keeps in memory
    what fits, so trees may be larger than that. It is memory, not a checkpoint: another process cannot open it.

    Args:
        tree: any pytree: ``Sharded`` trees, optimizer state, plain tensors; with rank dims or without, outside
            transforms. Leaves that are not tensors are passed through.
        where: ``"cpu"``, or a directory, which is made if it does not exist. Ranks may share it, or have disks of their
            own. On real ranks every rank offloads the same tree at the same time.

    Returns:
        The same tree of detached tensors with the same values. Copies and pickles of mapped ones are plain tensors.

    Raises:
        ValueError: ``where`` names a device.
        OSError: the directory is not writable, or the disk is full; with the bytes needed. While training, the disk is
            full for a gradient.
        RuntimeError: another rank failed, every rank reports which one and why; or inside a transform, or of what
            ``fs.grad`` differentiates by.

    Cost:
        ``"cpu"``: no collectives, one copy. A directory: a write of all bytes, two small all-gathers per axis.

    Example:
        >>> import tempfile
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params, grads = (fs.shard({"fc.w": torch.tensor(x)}, layout) for x in ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
        >>> opt = fs.optimizer(torch.optim.SGD, lr=1.0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     mapped = offload(params, directory)
        ...     _ = opt.step(mapped, grads=grads, state=opt.init(mapped), donate=True)
        ...     print(mapped["fc"])   # row r = rank r
        tensor([[0., 1.],
                [2., 0.]])

    Replaces FSDP2's ``CPUOffloadPolicy`` and FSDP1's ``CPUOffload``, and parameters on disk as in ZeRO-Infinity.
    """
    tensors, put_back = take_tensors(tree)
    refuse_derivatives("offload", tensors)
    if where == "cpu":
        pinned = MemoryKind(_CPU, pinned=torch.accelerator.is_available())
        return put_back([pinned.put(x.detach()) for x in tensors])
    kind = MemoryKind(_CPU, directory=_directory(where))

    def mapped() -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            return [kind.copy(x) for x in tensors]

    return put_back(participants_of(tree).agree("offload", mapped, lambda _: []))


def _directory(where: str | os.PathLike[str]) -> Path:
    with suppress(RuntimeError):
        if isinstance(where, str) and torch.device(where):
            advice = f"'cpu', or a directory; Path({where!r}) for one of this name"
            raise ValueError(f"offload: where: got {where!r}, expected {advice}. The mesh has a device of its own.")
    return local_path("offload: where", where).resolve()
