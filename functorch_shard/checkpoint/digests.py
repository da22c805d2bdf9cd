"""SHA-256 digests of whole values, the same for any layout and number of ranks; where two runs begin to differ.

Note [Digests]: a tensor's digest is that of its dtype, its shape and its elements, row by row, as their bytes are: NaN
by its bits, and no padding. A plain value's is that of its ``repr``, in which sets are sorted. That of a tree or a
checkpoint is the digest of ``{name: digest}`` as JSON with sorted keys; names are those of a checkpoint, and a tied
parameter has several.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..collectives.sinks import refuse_derivatives
from ..layout.layout import Layout
from .format import saved
from .leaves import Leaf, leaves_of
from .reader import Reader
from .staging import local_path


def digest(source: Any) -> str:
    """Return one SHA-256 of all that a checkpoint or a tree contains, which does not depend on layout or ranks.

    A checkpoint has the digest of the tree that it was saved from, and of what ``load`` makes of it on any ranks.

    Args:
        source: as in :func:`functorch_shard.debug.digests`, which gives one digest for each name.

    Returns:
        64 hexadecimal digits, ``sha256(json.dumps(fs.debug.digests(source), sort_keys=True))``.

    Raises:
        As :func:`functorch_shard.debug.digests`.

    Cost:
        That of :func:`functorch_shard.debug.digests`.

    Example:
        >>> values = {"fc.w": torch.tensor([1.0, 2.0, 3.0])}
        >>> one, two = (fs.shard(values, fs.plan(values, fs.simulated_mesh(n))) for n in (1, 2))
        >>> digest({"model": one, "step": 7}) == digest({"model": two, "step": 7})
        True
    """
    return hashlib.sha256(json.dumps(digests(source), sort_keys=True).encode()).hexdigest()


def digests(source: Any) -> dict[str, str]:
    """Return the SHA-256 of each whole parameter, tensor and plain value, by the name that it has in a checkpoint.

    Args:
        source: the directory of a checkpoint; or a tree that could be saved, of ``Sharded`` trees, gradients too,
            optimizer states, tensors and plain values; on simulated ranks outside ``spmd``.

    Returns:
        ``{name: hexadecimal digits}``, of a tree in its order. Of copies on several ranks, of tensors and of plain
        values each rank takes its own, and a checkpoint has those of one rank: where ranks differ, digests do.

    Raises:
        FileNotFoundError, RuntimeError: as :func:`functorch_shard.checkpoint.load`; or it is called inside a transform.
        Exception: of ``torch.load``, for a value that :func:`functorch_shard.checkpoint.save` does not take.

    Cost:
        Of a checkpoint: reads all values. Of a tree: the all-gathers of one :func:`gather` for each ``Sharded``, in the
        stored dtypes; all ranks call it. Memory: one tensor of the checkpoint, or one gathered buffer.

    Example:
        >>> values = {"a.w": torch.ones(3), "b.w": torch.ones(3)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> found = digests({"model": params, "step": 7})
        >>> [*found], found["model.a.w"] == found["model.b.w"]
        (['model.a.w', 'model.b.w', 'step'], True)
    """
    if isinstance(source, (str, os.PathLike)):
        reader = Reader.open(local_path("digest: path", source))
        read = {name: reader.whole if entry.dtype else reader.plain for name, entry in reader.entries.items()}
        return {name: digest_of(value(name)) for name, value in read.items()}
    refuse_derivatives("digest")
    with torch.no_grad():
        return {name: made for leaf in leaves_of(source) for name, made in _of_leaf(leaf)}


def _of_leaf(leaf: Leaf) -> Iterator[tuple[str, str]]:
    if leaf.is_plain:
        saved(leaf.value)  # of others a repr may be the same for different values
    elif leaf.tensor is None:  # nothing yet, and nothing in a checkpoint
        return
    for names, value in leaf.wholes():
        yield from dict.fromkeys(names, digest_of(value)).items()


def digest_of(x: Any) -> str:
    """Return the digest of a tensor or of a plain value."""
    if isinstance(x, Tensor):
        x = x.detach().cpu().contiguous().resolve_conj().resolve_neg()
        made = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}\n".encode())
        made.update((ctypes.c_char * x.nbytes).from_address(x.data_ptr()) if x.nbytes else b"")
        return made.hexdigest()
    leaves, structure = optree.tree_flatten(x, none_is_leaf=True)
    return hashlib.sha256(f"{structure} {[*map(_text, leaves)]}".encode()).hexdigest()


def _text(x: Any) -> str:
    if isinstance(x, (set, frozenset)):
        return f"{type(x).__name__} {sorted(map(repr, x))}"
    return digest_of(x) if isinstance(x, Tensor) else repr(x)


class Difference(NamedTuple):
    """The first step at which two runs differ, and the unit and parameter of the first of the ``names`` that do.

    ``before``: the last step before it that both recorded.
    """

    step: Any
    before: Any
    unit: str | None
    parameter: str | None
    names: tuple[str, ...]

    def __str__(self) -> str:
        name, *more = self.names
        of_unit = f", parameter {self.parameter!r} of unit {self.unit!r}" if self.parameter else ""
        others = f", and {len(more)} more names" if more else ""
        return f"step {self.step}: {name!r}{of_unit}{others}; equal at step {self.before}"


def first_difference(
    run_a: Iterable[Mapping[str, Any]], run_b: Iterable[Mapping[str, Any]], layout: Layout | None = None
) -> Difference | None:
    """Find the first step, unit and parameter at which two runs differ, from the digests that they recorded.

    Args:
        run_a: records in the order of steps, ``{"step": step, "digests": fs.debug.digests(tree)}``, which is a line of
            JSON: ``map(json.loads, file)``. In ``{"grads": grads, "model": params, "optim": state}`` gradients are
            compared first, which is the order in which an error goes on.
        run_b: those of the other run, on any ranks. Steps that one run alone recorded are left out.
        layout: gives the unit and the parameter that a name belongs to.

    Returns:
        A ``Difference``, whose ``str`` is a sentence; None where all that both recorded is equal.

    Raises:
        ValueError: no step is in both runs.

    Cost:
        The memory of the records of ``run_b``.

    Example:
        >>> run = lambda *digits: [{"step": i, "digests": {"model.w": x, "loss": "0"}} for i, x in enumerate(digits)]
        >>> layout = fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> print(first_difference(run("a", "b", "c"), run("a", "b", "d"), layout))
        step 2: 'model.w', parameter 'w' of unit '(root)'; equal at step 1
    """
    others, before = {record["step"]: record["digests"] for record in run_b}, None
    for step, mine in ((record["step"], record["digests"]) for record in run_a):
        if step not in others:
            continue
        if names := tuple(name for name in {**mine, **others[step]} if mine.get(name) != others[step].get(name)):
            slots = [(u.name, slot.name) for u in layout.units for b in u.buffers for slot in b.slots] if layout else []
            places = (x for x in slots if f".{x[1]}." in f".{names[0]}.")  # optim.state.<parameter>.exp_avg
            return Difference(step, before, *max(places, key=lambda x: len(x[1]), default=(None, None)), names)
        before = step
    if before is None:
        raise ValueError("first_difference: no step is in both runs. Record the same steps: {'step': 0, 'digests': {}}")
    return None
