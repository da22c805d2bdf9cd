"""Trees as flat vectors: all trainable parameters in the order of the model, whatever the ranks, units and labels."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import without_derivative
from ..errors import reject
from ..layout.layout import Layout, as_stored, rank_dims, select_buffers
from ..layout.trees import Sharded, check_layout, check_sharded, check_shards
from ..mesh.fingerprints import value_lines
from ..sharding.gather import gather
from ..sharding.shard import shard


def to_vector(tree: Sharded) -> Tensor:
    """The whole tree as one vector: every trainable parameter, flattened, in the order of the model.

    The same for any number of ranks, units and labels: no padding, tied parameters once, frozen ones not at all. As
    ``torch.nn.utils.parameters_to_vector`` of the unsharded model's trainable parameters.

    Args:
        tree: a ``Sharded`` of one rank, or a stacked one outside ``spmd``: parameters, gradients, directions. ``None``
            counts as zeros.

    Returns:
        A tensor of shape ``(n,)`` on every rank: float32, or wider if a parameter is.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``.
        ValueError: shards that do not fit the layout; or DTensors or complex parameters, which such a vector does not
            have.

    Cost:
        One all-gather for each buffer; memory for all trainable parameters on every rank, twice.

    Example:
        >>> values = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0])}
        >>> to_vector(fs.shard(values, fs.plan(values, fs.simulated_mesh(2))))
        tensor([1., 2., 3., 4., 5.])
    """
    check_sharded("to_vector", tree)
    check_shards("to_vector", tree, tree.layout, allow_none=True, gradients=True)
    layout = vector_layout("to_vector", tree.layout)
    shards = {key: _filled(tree[key], key, layout) for key in layout.buffers}
    full = gather(Sharded(shards, as_stored(layout)), lazy=False)
    dtype = vector_dtype(layout)
    parts = [full[name].reshape(-1).to(dtype) for name in layout.slots]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=layout.mesh.device)


def from_vector(vector: Any, layout: Layout) -> Sharded:
    """The tree of a flat vector: the inverse of :func:`to_vector`.

    Args:
        vector: a tensor, or an array that ``torch.tensor`` takes, of shape ``(n,)``: the same on every rank, which real
            ranks compare.
        layout: from :func:`plan`, for example ``params.layout``.

    Returns:
        A ``Sharded`` of ``layout`` with the values in each parameter's dtype, and ``None`` for frozen buffers. On a
        simulated mesh, outside ``spmd``: of all ranks, stacked.

    Raises:
        TypeError: ``layout`` is not a layout.
        ValueError: ``vector`` does not have one element for each trainable element; or DTensors or complex parameters.
        NotImplementedError: the result is differentiated by ``vector``.
        RuntimeError: ranks pass different vectors.

    Cost:
        The memory of the shards. On several real ranks one all-gather of a 32-byte digest per axis.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> from_vector(torch.tensor([1.0, 2.0, 3.0]), layout)["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    check_layout("from_vector", layout)
    x, wanted = layout.mesh.agree("from_vector", lambda: _checked(vector, layout), _lines, _ADVICE)
    slots = wanted.slots.values()
    parts = zip(slots, x.split([slot.numel for slot in slots]), strict=True)
    shards = shard({slot.name: part.reshape(slot.shape).to(slot.dtype) for slot, part in parts}, wanted)
    sources = [vector] if isinstance(vector, Tensor) else []
    found = without_derivative(_NO_DERIVATIVE, dict(shards.items()), sources)
    return Sharded({key: found.get(key) for key in layout.buffers}, layout)


_NO_DERIVATIVE = (
    "from_vector: the tree has no derivative by the vector. Compute with Sharded trees, or detach the vector."
)


_ADVICE = (
    "An iteration outside of the ranks has to take the same course on all of them: pass the same starting vector and "
    "the same seeds, for example eigsh(..., v0=...)."
)


def vector_layout(verb: str, layout: Layout) -> Layout:
    """The layout of the trainable buffers, which have to be real and not of DTensors."""
    wanted = select_buffers(layout, {key: buffer.trainable for key, buffer in layout.buffers.items()})
    kinds = {name: "a DTensor" for name, slot in wanted.slots.items() if slot.dtensor}
    kinds |= {name: f"{slot.dtype}" for name, slot in wanted.slots.items() if slot.dtype.is_complex}
    problems = [f"{name!r}: {kind}, expected a real tensor" for name, kind in kinds.items()]
    reject(verb, problems, "Flat vectors and curvature operators are of whole, real parameters.")
    return wanted


def vector_dtype(layout: Layout) -> torch.dtype:
    """The dtype of a flat vector, which numpy has too."""
    return reduce(torch.promote_types, (slot.dtype for slot in layout.slots.values()), torch.float32)


def _filled(x: Tensor | None, key: str, layout: Layout) -> Tensor:
    buffer = layout.buffers[key]
    if x is not None:
        return x.to(buffer.dtype)
    return torch.zeros(*rank_dims(layout), buffer.shard_numel, dtype=buffer.dtype, device=layout.mesh.device)


def _checked(vector: Any, layout: Layout) -> tuple[Tensor, Layout]:
    x = vector.detach() if isinstance(vector, Tensor) else torch.tensor(vector)
    wanted = vector_layout("from_vector", layout)
    numel = sum(slot.numel for slot in wanted.slots.values())
    if tuple(x.shape) != (numel,):
        raise ValueError(f"from_vector: got shape {tuple(x.shape)}, expected ({numel},): all trainable elements, once")
    return x, wanted


def _lines(given: tuple[Tensor, Layout]) -> list[str]:
    return value_lines({"the vector": given[0]}, ["the vector"])
