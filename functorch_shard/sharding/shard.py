"""``shard``: this rank's part of whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.sinks import without_derivative
from ..layout.layout import Layout
from ..layout.planning import named_tensors
from ..layout.trees import Sharded, check_layout
from ..layout.validation import check_whole, local_part
from ..mesh.fingerprints import value_lines
from ..torch_internals.autograd import is_functorch_wrapped_tensor
from .slicing import cut_buffer, receive_buffer


def shard(source: nn.Module | Mapping[str, Tensor] | None, layout: Layout, *, from_rank: int | None = None) -> Sharded:
    """This rank's part of whole parameters: slices, no reduction. The inverse of :func:`gather`.

    ``gather(shard(source, layout))`` has the values of ``source`` bitwise, and ``shard(gather(params), layout)`` those
    of ``params``. FSDP's write-back after ``summon_full_params`` is ``shard(edited, layout)``, and its
    ``sync_module_states=True`` is ``from_rank=0``.

    Each real rank cuts its part out of *its own* source, so all of them need the same values. Seed every rank alike
    before the model is built, ``torch.manual_seed(0)``, and apart afterwards, ``torch.manual_seed(1 + mesh.rank)``, so
    that dropout differs between ranks. The values of a module are compared between ranks; those of a mapping are not,
    so that a write-back sends nothing.

    Args:
        source: the model, a mapping name -> tensor, or a ``Full``: names, shapes and dtypes of ``layout``, and DTensors
            where it has them. Tied parameters may be listed under all their names.
        layout: from :func:`plan`.
        from_rank: take the values of this rank alone, counted in row-major order of the mesh's axes. What other real
            ranks pass as ``source`` is not looked at: ``None``, or the model on the meta device. They receive no more
            than their shard. ``None``: every rank has the same values.

    Returns:
        A ``Sharded`` of new 1-D tensors of ``buffer.shard_numel`` elements on the mesh's device, with zeros for
        padding. On a simulated mesh: of all ranks, stacked, with one leading rank dim per axis.

    Raises:
        TypeError: ``source`` is already sharded, ``layout`` is not a layout, or ``from_rank`` not an int.
        ValueError: names, shapes or dtypes that do not fit, or meta tensors on a mesh of another device; all of them at
            once. Or there is no rank
            ``from_rank``. With it, and of a module, an error on one real rank comes on all.
        NotImplementedError: the result is differentiated by ``source``: in backward, or in forward mode here.
        RuntimeError: a module has other values on another rank: on all ranks, with the first parameter that differs. Or
            the ranks disagree about ``from_rank``.

    Cost:
        The memory of the shards. Of a mapping no collectives. Of a module on several real ranks its values are read
        once, and there is one all-gather of a 32-byte digest per axis: all ranks have to call this. With ``from_rank``:
        per buffer one scatter from that rank to the other shards and one broadcast to the copies, each rank receiving
        its shard; that rank holds one whole buffer more.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    check_layout("shard", layout)
    if torch.is_inference_mode_enabled():  # whose tensors do not count writes
        with torch.inference_mode(False), torch.no_grad():
            return shard(source, layout, from_rank=from_rank)
    if from_rank is None:
        tensors = _the_same(source, layout) if isinstance(source, nn.Module) else _checked(source, layout)
        shards = {key: cut_buffer(tensors, buffer, layout) for key, buffer in layout.buffers.items()}
        return Sharded(without_derivative(_NO_DERIVATIVE, shards, _computed(tensors.values())), layout)
    lines = [f"from_rank={from_rank}"]
    tensors = layout.mesh.agree("shard", lambda: _of_source(source, layout, from_rank), lambda _: lines)
    shards = {key: receive_buffer(tensors, buffer, layout, from_rank) for key, buffer in layout.buffers.items()}
    return Sharded(shards, layout)


_NO_DERIVATIVE = (
    "shard: new shards have no derivative by the tensors that they were cut from. Compute with the shards, by "
    "tree_map, or with gathered parameters; gradients become shards by scatter_grads, which has derivatives. Or detach "
    "the source."
)


def _computed(tensors: Iterable[Tensor]) -> list[Tensor]:
    """All but the leaves of the program, such as the parameters of a module, which are its constants."""
    return [x for x in tensors if is_functorch_wrapped_tensor(x) or not x.is_leaf]


def _the_same(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The parameters of ``model``, which are those of every rank: parts of different models make none."""
    advice = (
        "Each rank shards the model that it built itself. Seed all ranks alike before that, torch.manual_seed(0), and "
        "apart after shard. Or take the values of one, shard(model, layout, from_rank=0), or make them by fs.init."
    )
    describe = lambda tensors: value_lines(tensors, layout.slots)  # noqa: E731
    return layout.mesh.agree("shard", lambda: _checked(model, layout), describe, advice)


def _checked(source: Any, layout: Layout) -> dict[str, Tensor]:
    tensors = named_tensors(source)
    check_whole(tensors, layout)
    return {name: local_part(tensor) for name, tensor in tensors.items()}


def _of_source(source: Any, layout: Layout, from_rank: int) -> dict[str, Tensor]:
    """What this rank sends: nothing, unless it is the source."""
    mesh = layout.mesh
    if not isinstance(from_rank, int) or isinstance(from_rank, bool):
        raise TypeError(f"shard: from_rank: got {from_rank!r}, expected the number of a rank, or None")
    if not 0 <= from_rank < mesh.size:
        raise ValueError(f"shard: from_rank: got {from_rank}, expected 0 <= from_rank < {mesh.size}, a rank of {mesh}")
    return _checked(source, layout) if mesh.is_simulated or mesh.rank == from_rank else {}
