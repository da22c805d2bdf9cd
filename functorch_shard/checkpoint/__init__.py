"""Sharded checkpoints, in the format of ``torch.distributed.checkpoint``, which any number of ranks can load.

Parameters are saved under their own names and in their original shapes, each rank's regions in its own file. So
``dcp.load`` reads them in a plain or an FSDP2 program, and ``load`` reads what those have saved. Nothing is gathered.

``saving`` and ``loading``: trees to files and back. ``leaves``: trees as named leaves, and these as regions of tensors.
``format`` and ``reader``: the directory of a checkpoint, whose files are untrusted; ``staging``: how it becomes visible
at once. ``digests``: one number for whole values, and where two runs differ. ``safetensors``: the other format.
Imports ``sharding`` and below; only the top and ``cli`` import it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .digests import digest
from .loading import load_into
from .reader import Reader
from .safetensors import export_safetensors, import_safetensors
from .saving import save_tree
from .staging import local_path, ordered

__all__ = ["digest", "export_safetensors", "import_safetensors", "latest", "load", "save", "verify"]


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    keep: int | None = None,
    async_save: bool = False,
) -> Future[Path]:
    """Write a tree to a new directory, which becomes visible when it is complete and synced to the disk.

    ``load(path, tree)`` equals ``tree`` bitwise, and so does a load into any other layout of the same parameters, name
    by name. A save that fails or is killed, at any point, leaves earlier checkpoints unchanged.

    Args:
        path: the directory of this checkpoint, for example ``"runs/step-0100"``, on a file system that all ranks share.
            It must not exist.
        tree: a dict of ``Sharded`` trees, optimizer states, tensors, numbers, strings. ``{"model": params, "optim":
            opt.state_dict(state, params)}`` has the names that torch's ``get_model_state_dict`` and
            ``get_optimizer_state_dict`` give. A tuple of trees is one dict: ``"model": (params, buffers)``. Tensors and
            plain values are saved by the first rank. On a simulated mesh, the stacked trees outside ``spmd``.
        keep: the number of checkpoints to keep in the parent directory, including this one. The oldest of those begun
            earlier are removed; checkpoints of other programs are not. ``None``: all.
        async_save: copy the values of this rank to the host, and write them in a thread. Tensors on an accelerator are
            copied by its current stream, which the host does not wait for; later steps may donate them. A process that
            ends finishes its saves.

    Returns:
        A ``concurrent.futures.Future`` of the path. It is done when the checkpoint of all ranks is complete; without
        ``async_save`` at once.

    Raises:
        FileExistsError: ``path`` exists; it was not overwritten.
        TypeError: a value that ``torch.load(weights_only=True)`` does not read back.
        ValueError: two leaves of one name, trees of other ranks, a hidden ``path`` or a URL, or ``keep`` below 1.
        OSError: for example a full disk; this checkpoint is removed.
        RuntimeError: inside a transform; or another rank failed: every rank reports which one and why.

    Cost:
        No gather: each rank writes the regions of its shards, at most ``2 * ndim - 1`` for a parameter; replicas are
        written once. Memory: one region; with ``async_save`` a copy of this rank's shards. Four all-gathers of 32 bytes
        per axis; two with ``async_save``, whose threads see by the files when the other ranks are done.

    Example:
        >>> import tempfile
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params = fs.shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)
        >>> three = fs.shard({"fc.w": torch.zeros(3)}, fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(3)))
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = save(f"{runs}/step-7", {"model": params, "step": 7})
        ...     loaded = load(latest(runs), {"model": three, "step": 0})
        >>> loaded["step"], loaded["model"]["fc"]    # row r = rank r
        (7, tensor([[1.],
                [2.],
                [3.]]))
    """
    return save_tree(path, tree, keep, async_save)


def load(path: str | os.PathLike[str], like: Any, *, donate: bool = False) -> Any:
    """Read a checkpoint into a tree like ``like``, which may have other ranks, units, labels and strategies.

    Args:
        path: a directory that :func:`save` or ``dcp.save`` has written.
        like: a tree with the names to load, for example of ``shard`` and ``opt.init``. It gives structure, shapes,
            dtypes and layout. Its values are not used, except for padding; a tensor on the meta device is allocated on
            the mesh's device. Other names of the checkpoint are ignored.
        donate: load into the memory of ``like``, which must not be used again, also after an error.

    Returns:
        A tree like ``like``. ``None`` in an optimizer's state, for what a gradient has not made yet, becomes a shard
        where the checkpoint has one.

    Raises:
        FileNotFoundError: ``path`` is not a checkpoint.
        ValueError: parameters that the checkpoint does not have, or in another shape or dtype; all of them at once.
        RuntimeError: files that are missing, truncated, altered or links; metadata that would execute code; inside a
            transform; or another rank failed: every rank reports which one and why.

    Cost:
        Each rank reads the values that contain elements of its shards. Memory: the tree and one value. Two all-gathers
        of 32 bytes per axis.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = save(f"{runs}/step-7", {"scale": torch.tensor(2.0), "step": 7})
        ...     load(f"{runs}/step-7", {"scale": torch.zeros((), device="meta")})
        {'scale': tensor(2.)}
    """

    return load_into("load", like, lambda: Reader.open(local_path("load: path", path)), donate)


def latest(path: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """Find the newest complete checkpoint in a directory, in the order in which they were begun.

    Args:
        path: the directory that contains the checkpoints of ``save``; it need not exist.
        verify: read every byte, compare the checksums, and skip damaged checkpoints.

    Returns:
        The directory of the checkpoint, for ``load``; ``None`` without one.

    Cost:
        Lists a directory; with ``verify`` reads all bytes of a checkpoint, on every rank that calls it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     for step in (8, 9, 10):
        ...         _ = save(f"{runs}/step-{step}", {"step": step}, keep=2)
        ...     sorted(os.listdir(runs)), latest(runs).name
        (['step-10', 'step-9'], 'step-10')
    """
    folders = [folder for _, folder in ordered(local_path("latest: path", path))]
    return next((folder for folder in reversed(folders) if not verify or not _problems(folder)), None)


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of a checkpoint, and list what is wrong.

    Args:
        path: the directory of one checkpoint.

    Returns:
        A sentence for each problem, with the file; empty if the checkpoint is valid. A directory that is not a
        checkpoint is one problem.

    Cost:
        Reads all bytes of the checkpoint, on every rank that calls it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = save(f"{runs}/step-8", {"step": 8})
        ...     verify(f"{runs}/step-8"), len(verify(f"{runs}/step-9"))
        ([], 1)
    """
    return _problems(local_path("verify: path", path))


def _problems(path: Path) -> list[str]:
    try:
        return Reader.open(path).verify()
    except (OSError, RuntimeError) as error:
        return [str(error)]
