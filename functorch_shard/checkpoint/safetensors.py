"""Imports shards from Hugging Face's safetensors files, and exports them, by the library ``safetensors``, an extra."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import refuse_derivatives
from ..errors import reject
from ..layout.layout import Layout, rank_dims
from ..layout.trees import Sharded, check_layout, check_sharded, check_shards
from .digests import digest_of
from .format import Entry, Region, Value
from .leaves import leaves_of
from .loading import load_into
from .reader import Reader
from .staging import StagingDirectory, local_path, sync

StrPath = str | os.PathLike[str]
_IMPORT, _EXPORT = "import_safetensors", "export_safetensors"


def import_safetensors(path: StrPath, layout: Layout) -> Sharded:
    """Read parameters from safetensors files; each rank reads only the elements of its own shards.

    ``import_safetensors(path, layout)`` after ``export_safetensors(path, params)`` equals ``params`` bitwise, name by
    name, for any ranks, units and labels of the two layouts. Needs ``pip install functorch_shard[safetensors]``.

    Args:
        path: a file, or a directory, all of whose files that end in ``.safetensors`` are read.
        layout: from :func:`plan`. The files contain every parameter in its shape, a tied one under one of its names, or
            under several with equal values. Other tensors in the files, for example a module's buffers, are ignored.

    Returns:
        A ``Sharded`` like that of :func:`shard`: on the mesh's device, and stacked on simulated ranks. Tensors of
        another floating-point dtype are cast to the layout's.

    Raises:
        ValueError: files that are missing or invalid; missing names, other shapes, dtypes that are not cast, tied
            parameters with different values; all of them at once. Every rank raises if one does.
        RuntimeError: the ranks see different files, or it is called inside ``spmd`` on simulated ranks.

    Cost:
        Two all-gathers of 32 bytes per axis. Every rank reads all headers, the data of its shards, and tied parameters
        that the files have under several names.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> values = {"fc.w": torch.tensor([1.0, 2.0, 3.0])}
        >>> one, two = (fs.plan(values, fs.simulated_mesh(n)) for n in (1, 2))
        >>> with TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/model", fs.shard(values, one))
        ...     params = import_safetensors(f"{folder}/model", two)
        >>> params["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    check_layout(_IMPORT, layout)
    dims, buffers = rank_dims(layout), layout.buffers.items()
    like = {key: torch.empty(*dims, b.shard_numel, dtype=b.dtype, device="meta") for key, b in buffers}
    with ExitStack() as opened:
        return load_into(_IMPORT, Sharded(like, layout), lambda: _opened(path, layout, opened))


def export_safetensors(path: StrPath, params: Sharded) -> None:
    """Write whole parameters to a safetensors file, as Hugging Face's ``save_pretrained`` does.

    Parameters are gathered buffer by buffer, and rank 0 writes. The directory becomes visible when it is complete and
    synced to the disk, or never. Needs ``pip install functorch_shard[safetensors]``.

    Args:
        path: of the new directory, which gets ``model.safetensors``.
        params: parameters, or any ``Sharded`` of their shape, for example averages; stacked on simulated ranks. Tied
            parameters are written under each of their names.

    Raises:
        FileExistsError: ``path`` exists, or another process is writing it.
        ValueError: shards that do not fit their layout.
        KeyError: a dtype that the format does not have.
        OSError: rank 0 could not write, for example to a full disk. Nothing is left.
        RuntimeError: rank 0 failed, which the others report; or it is called inside ``spmd`` on simulated ranks.
        NotImplementedError: the layout has DTensors.

    Cost:
        One all-gather per sharded buffer, in the stored dtype, and one of 32 bytes per axis. Memory on every rank: one
        buffer; on the host of rank 0 also all parameters.

    Example:
        >>> import os
        >>> from tempfile import TemporaryDirectory
        >>> values = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> with TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/model", params)
        ...     os.listdir(f"{folder}/model")
        ['model.safetensors']
    """
    check_sharded(_EXPORT, params)
    layout, mesh = params.layout, params.layout.mesh
    refuse_derivatives(_EXPORT)
    if layout.tensor_meshes:
        raise NotImplementedError(f"{_EXPORT}: DTensors. Gather them, full_tensor(), and plan whole tensors.")

    def write() -> None:
        check_shards(_EXPORT, params, layout)
        whole = dict[str, Tensor]()
        for names, x in (found for leaf in leaves_of(params) for found in leaf.wholes()):  # on all ranks
            whole |= {name: x.detach().to("cpu", copy=True) for name in names if mesh.rank == 0}
        if mesh.rank == 0:
            write_file(local_path(f"{_EXPORT}: path", path), whole)

    mesh.agree(_EXPORT, write, lambda _: [])


def write_file(target: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file in a directory that appears when it is complete."""
    from safetensors.torch import save_file

    staging = StagingDirectory(target)
    staging.open()
    try:
        file = staging.folder / "model.safetensors"
        save_file(tensors, file, {"format": "pt"})
        sync(file)
        staging.publish()
    finally:
        staging.abandon()


@dataclass(frozen=True)
class _Files(Reader):
    """Open files, of whose tensors slices are read."""

    slices: Mapping[str, Any] = field(default_factory=dict)

    def tensor(self, name: str, value: Value) -> Any:
        return self.slices[name]


def _opened(path: StrPath, layout: Layout, opened: ExitStack) -> Reader:
    from safetensors import safe_open

    folder, problems = local_path(f"{_IMPORT}: path", path), list[str]()
    slices, entries = dict[str, Any](), dict[str, Entry]()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    for file in files:
        try:
            handle = opened.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # the library's own class is not an OSError
            problems.append(f"{file}: {error}")
            continue
        for name in handle.keys():  # noqa: SIM118
            problems += [f"{name!r}: in two files, the second is {file}"] if name in entries else []
            x = slices[name] = handle.get_slice(name)
            region = Region.whole(x.get_shape())
            dtype = x[tuple(slice(0, 0) for _ in region.sizes)].dtype
            value = Value(region, file.name, 0, region.numel * dtype.itemsize)
            entries[name] = Entry(region.sizes, dtype, (value,))
    for name, aliases in layout.aliases_of.items():
        tied = [one for one in (name, *aliases) if one in entries]
        if len({digest_of(slices[one][entries[one].values[0].region.index]) for one in tied}) > 1:
            problems.append(f"{name!r}: tied in the layout, but the values of {tied} differ")
    reject(_IMPORT, problems, "Pass a safetensors file, or a directory; plan a layout without such ties.")
    lines = [f"{name!r}: {entry} in {entry.values[0].file}" for name, entry in sorted(entries.items())]
    identity = hashlib.sha256("\n".join(lines).encode()).hexdigest()  # directories may differ between ranks
    return _Files(folder, entries, {}, identity, True, slices)
