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
from pathlib import Path
from typing import Any

from .digests import digest
from .loading import load_into
from .reader import Reader
from .safetensors import export_safetensors, import_safetensors
from .saving import save
from .staging import local_path, ordered

__all__ = ["digest", "export_safetensors", "import_safetensors", "latest", "load", "save", "verify"]


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
