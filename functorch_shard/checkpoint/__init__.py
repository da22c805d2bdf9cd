"""Checkpoints of sharded trees, in the format of ``torch.distributed.checkpoint``: for any ranks and other programs.

Parameters lie there under their own names, in their true shapes, each rank's boxes in its own file; so ``dcp.load``
reads them in a plain or an FSDP2 program, and ``load`` reads what those have saved. Nothing is gathered.

``saving`` and ``loading``: how a tree becomes files, and files a tree. ``names`` and ``chunks``: the names of leaves in
files, and the parts of them that are here; ``regions``: a flat range of a tensor as boxes. ``dcp`` and ``safetensors``:
the two formats. Imports ``sharding`` and below; nothing but the top imports it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..layout.rank_trees import party_of
from ..storage.atomic_directory import in_order
from .dcp.stored import Stored, order_of
from .loading import Loading
from .names import PerRank
from .safetensors.files import export_safetensors, import_safetensors
from .saving import Saving

__all__ = ["PerRank", "Saving", "verify", "export_safetensors", "import_safetensors", "latest", "load", "save"]


def save(path: str | os.PathLike[str], tree: Any, *, keep: int | None = None, async_save: bool = False) -> Saving:
    """Write a tree to a new directory, which becomes visible when it is complete and on the disk.

    ``load(path, tree)`` equals ``tree`` bitwise, and so does a load into any other layout of the same parameters, name
    by name. Whatever ends a save, at whatever moment, earlier checkpoints are as they were.

    Args:
        path: the checkpoint's own directory, as ``"runs/step-0100"``, on a disk that all ranks share. It must not be
            there yet.
        tree: a dict of ``Sharded`` trees, optimizer states, tensors, numbers, texts. ``{"model": params, "optim":
            opt.state_dict(state, params)}`` has the names that torch's ``get_model_state_dict`` and
            ``get_optimizer_state_dict`` give. A tuple of trees is one dict: ``"model": (params, buffers)``. Tensors and
            plain values are the first rank's; :class:`PerRank` ones are each rank's own. On a simulated mesh, the
            stacked trees outside ``spmd``.
        keep: how many checkpoints the directory above is to have afterwards, this one with them; of those that were
            begun earlier the oldest are removed, those of other programs are not touched. ``None``: all.
        async_save: write in a thread of its own while the program goes on. The tensors must stay as they are until
            ``done()``; a step without ``donate=True`` leaves them so, and no tensor is copied.

    Returns:
        A :class:`Saving`: its ``result()`` waits for all ranks and returns the path. Without ``async_save`` all is
        done already.

    Raises:
        FileExistsError: ``path`` is there already; nothing was overwritten.
        TypeError: a value that cannot be read back without executing code.
        ValueError: two leaves of one name, trees of other ranks, a hidden ``path``, or ``keep`` below 1.
        OSError: no room, say; nothing is left of this checkpoint.
        RuntimeError: inside a transform; or another rank failed: every rank is told which one and why.

    Cost:
        No gather: each rank writes the boxes that its shards consist of, at most ``2 * ndim - 1`` a parameter; copies
        are written once. Beside the tree, one box is in memory. Three all-gathers of 32 bytes per axis.

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
    saving = Saving.begin(Path(path).absolute(), tree, keep, async_save)
    if async_save:
        return saving.start()
    saving.result()
    return saving


def load(path: str | os.PathLike[str], like: Any, *, donate: bool = False) -> Any:
    """The tree that a checkpoint holds, in the form of ``like``: any ranks, units, labels and strategies.

    Args:
        path: what ``save`` was given, or a directory that ``dcp.save`` has written.
        like: a tree with the names to load, which gives structure, shapes, dtypes and places: what ``shard`` and
            ``opt.init`` make. What else the checkpoint has is left alone. Its values are not used, but for padding; a
            tensor on the meta device is made on the mesh's device.
        donate: load into the memory of ``like``, which must not be used again; after an error it holds no tree.

    Returns:
        A tree like ``like``. ``None`` in an optimizer's state, which stands for what no gradient has made yet, becomes
        a shard where the checkpoint has one.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: parameters that the checkpoint has not, or in another shape or dtype; all of them at once.
        RuntimeError: files that are missing, truncated, altered or links; metadata that would execute code; inside a
            transform; or another rank failed: every rank is told which one and why.

    Cost:
        Each rank reads the values that it has elements of, one at a time: beside the tree, one value is in memory. Two
        all-gathers of 32 bytes per axis.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = save(f"{runs}/step-7", {"scale": torch.tensor(2.0), "step": 7})
        ...     load(f"{runs}/step-7", {"scale": torch.zeros((), device="meta")})
        {'scale': tensor(2.)}
    """
    party = party_of(like)
    loading = party.agree("load", lambda: Loading.of(_existing(path), like, party, donate), Loading.lines)
    return loading.tree(party.agree("load", loading.read, lambda _: []))


def _existing(path: str | os.PathLike[str] | None) -> Path:
    if path is None:
        raise FileNotFoundError("load: path: got None, as latest() returns where there is no checkpoint: start afresh.")
    return Path(path).absolute()


def latest(path: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """The newest complete checkpoint of a directory, by the order in which they were begun.

    Args:
        path: the directory in which ``save`` made checkpoints; it need not be there.
        verify: read every byte and compare the checksums, and go back to the newest one that is good.

    Returns:
        Its directory, as ``load`` takes it; ``None`` where there is none, or no good one.

    Cost:
        The names of a directory; with ``verify`` all bytes of a checkpoint, on every rank that asks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     for step in (8, 9, 10):
        ...         _ = save(f"{runs}/step-{step}", {"step": step}, keep=2)
        ...     sorted(os.listdir(runs)), latest(runs).name
        (['step-10', 'step-9'], 'step-10')
    """
    folders = in_order(Path(path).absolute(), order_of)[::-1]
    return next((folder for folder in folders if not verify or not _problems(folder)), None)


def verify(path: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a checkpoint, file by file: every byte is read. An empty list means that it is good.

    Args:
        path: the directory of one checkpoint.

    Returns:
        A sentence for each problem, which names the file. A directory that is not a checkpoint is one problem.

    Cost:
        Reads all bytes of the checkpoint, on every rank that asks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = save(f"{runs}/step-8", {"step": 8})
        ...     verify(f"{runs}/step-8"), len(verify(f"{runs}/step-9"))
        ([], 1)
    """
    return _problems(Path(path).absolute())


def _problems(path: Path) -> list[str]:
    try:
        return Stored.open(path).verify()
    except (OSError, RuntimeError) as error:
        return [str(error)]
