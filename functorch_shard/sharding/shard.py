"""``shard``: this rank's part of whole parameters; ``partition`` and ``merge``: trainable and frozen parts of a tree.

Whole buffers become shards here: each rank cuts its own, or one rank sends everybody theirs. Outside ``spmd`` the
shards of all simulated ranks are stacked, and become whole buffers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.rules import Encoding, LinearMap, linear_map_of
from ..collectives.sinks import prepare, without_derivative
from ..layout.buffers import Buffer, Slot, of_rank
from ..layout.layout import Layout, merged, select_buffers, shard_index
from ..layout.planning import named_tensors
from ..layout.trees import Sharded, check_layout, check_sharded, pack
from ..layout.validation import check_whole, local_part
from ..mesh.agreement import value_lines
from ..storage.memory_kind import to_working_device
from ..torch_internals.autograd import Function, eager, is_functorch_wrapped_tensor


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
            ranks pass as ``source`` is not looked at: ``None``, or the model on the meta device. ``None``: every rank
            has the same values.

    Returns:
        A ``Sharded`` of new 1-D tensors of ``buffer.shard_numel`` elements on the mesh's device, with zeros for
        padding. On a simulated mesh: of all ranks, stacked, with one leading rank dim per axis.

    Raises:
        TypeError: ``source`` is already sharded, or ``layout`` is not a layout.
        ValueError: names, shapes or dtypes that do not fit, or meta tensors on a mesh of another device; all of them at
            once. Or there is no rank ``from_rank``. With it, and of a module, an error on one real rank comes on all.
        NotImplementedError: the result is differentiated by ``source``: in backward, or in forward mode here.
        RuntimeError: a module has other values on another rank: on all ranks, with the first parameter that differs. Or
            the ranks disagree about ``from_rank``.

    Cost:
        The memory of the shards. Of a mapping no collectives. Of a module on several real ranks its values are read
        once, and there is one all-gather of a 32-byte digest per axis: all ranks have to call this. With ``from_rank``
        also one broadcast per buffer and axis; each rank has two whole buffers more at a time.

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


@eager
def partition(params: Sharded) -> tuple[Sharded, Sharded]:
    """``(trainable, frozen)``: two trees that :func:`merge` makes one again.

    Differentiate by the first alone: no gradient, optimizer memory or traffic is spent on the second.
    ``gather(trainable, frozen)`` gathers both.

    Args:
        params: any ``Sharded`` with one leaf per buffer of its layout.

    Returns:
        Two ``Sharded`` that share the leaves of ``params``, each with the layout of its own buffers.

    Raises:
        TypeError: ``params`` is not a ``Sharded``.

    Cost:
        Nothing is copied or communicated.

    Example:
        >>> values = {"fc.w": torch.zeros(3), "fc.steps": torch.tensor(7)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> trainable, frozen = partition(params)
        >>> list(trainable), list(frozen)
        (['fc/float32'], ['fc/int64/frozen'])
    """
    check_sharded("partition", params)
    layout = params.layout
    trainable = {key: buffer.trainable for key, buffer in layout.buffers.items()}
    frozen = {key: not flag for key, flag in trainable.items()}
    halves = (select_buffers(layout, keep) for keep in (trainable, frozen))
    mine, others = (Sharded({key: params[key] for key in half.buffers}, half) for half in halves)
    return mine, others


@eager
def merge(tree: Sharded, *more: Sharded) -> Sharded:
    """One tree of the buffers of several: the inverse of :func:`partition`.

    ``merge(*partition(params))`` has the leaves and the layout of ``params``.

    Args:
        tree, more: parts of one model, as :func:`partition` returns them, or those of several models planned on one
        mesh.

    Returns:
        A ``Sharded`` that shares the leaves of the parts, in the order of the whole layout.

    Raises:
        TypeError: a part is not a ``Sharded``.
        ValueError: two parts have a buffer in common, or were planned for other ranks or with other options.

    Cost:
        Nothing is copied or communicated.

    Example:
        >>> values = {"fc.w": torch.zeros(3), "fc.steps": torch.tensor(7)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> trainable, frozen = partition(params)
        >>> merge(trainable, frozen).layout == params.layout
        True
    """
    trees = (tree, *more)
    for part in trees:
        check_sharded("merge", part)
    if not more:
        return tree
    layout = merged(tree.layout, [part.layout for part in more])
    leaves = {key: part[key] for part in trees for key in part}
    return Sharded({key: leaves[key] for key in layout.buffers}, layout)


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
    if not 0 <= from_rank < mesh.size:
        raise ValueError(f"shard: from_rank: got {from_rank}, expected 0 <= from_rank < {mesh.size}, a rank of {mesh}")
    return _checked(source, layout) if mesh.is_simulated or mesh.rank == from_rank else {}


def cut_buffer(tensors: Mapping[str, Tensor], buffer: Buffer, layout: Layout) -> Tensor:
    """This rank's shard of ``tensors``; outside ``spmd``, of all simulated ranks, stacked."""
    mesh = layout.mesh
    transformed = any(is_functorch_wrapped_tensor(tensors[slot.name]) for slot in buffer.slots)
    if mesh.in_spmd and (mesh.is_simulated or transformed):  # not written into plain tensors
        return _own_row(to_working_device(pack(tensors, buffer).detach(), mesh.device), buffer, layout)
    rows = blank_rows(buffer, layout)
    for slot in buffer.slots:
        fill_rows(rows, slot, tensors[slot.name], buffer, layout)
    return shard_of_rows(rows, buffer, layout)


def blank_rows(buffer: Buffer, layout: Layout) -> Tensor:
    """Zeros for :func:`fill_rows`: a row for each shard that is made here."""
    numbers = _numbers(buffer, layout)
    return torch.zeros(len(numbers), buffer.shard_numel, dtype=buffer.dtype, device=layout.mesh.device)


def fill_rows(rows: Tensor, slot: Slot, value: Tensor, buffer: Buffer, layout: Layout) -> None:
    """Write the parts of one parameter into the rows of :func:`blank_rows`."""
    flat = value.detach().reshape(-1)
    for row, number in zip(rows, _numbers(buffer, layout), strict=True):
        _, offset, numel, start = buffer.part(slot, number)
        row[offset : offset + numel] = flat[start : start + numel]


def shard_of_rows(rows: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    """What :func:`cut_buffer` returns, from rows that were filled parameter by parameter."""
    mesh = layout.mesh
    if mesh.in_spmd:
        return _own_row(rows.flatten(), buffer, layout) if mesh.is_simulated else rows[0]
    copies, sizes = copy_dims(buffer, layout), [*mesh.axes.values()]
    shards = [1 if dim in copies else size for dim, size in enumerate(sizes)]
    return rows.view(*shards, -1).expand(*sizes, -1).contiguous()


def _numbers(buffer: Buffer, layout: Layout) -> Sequence[int]:
    """The shards that are made here; simulated ranks choose theirs among all of them."""
    own = layout.mesh.in_spmd and not layout.mesh.is_simulated
    return [int(shard_index(buffer, layout))] if own else range(buffer.num_shards)


def receive_buffer(tensors: Mapping[str, Tensor], buffer: Buffer, layout: Layout, source: int) -> Tensor:
    """This rank's shard of the ``tensors`` of rank ``source``; other real ranks need to have none."""
    mesh = layout.mesh
    if not mesh.in_spmd or mesh.size == 1:
        return cut_buffer(tensors, buffer, layout)  # one process has the values of all
    at = [*product(*map(range, mesh.axes.values()))][source]
    if mesh.is_simulated or mesh.rank == source:
        flat = to_working_device(pack(tensors, buffer).detach(), mesh.device)
    else:
        flat = torch.zeros(buffer.numel, dtype=buffer.dtype, device=mesh.device)
    for axis, index in zip(mesh, at, strict=True):  # after each axis, the ranks of one more have it
        flat = linear_map_of(flat, LinearMap(axis, "broadcast", "psum", source=index))
    return _own_row(flat, buffer, layout)


def _own_row(flat: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    if buffer.num_shards == 1:
        return flat
    index, rows = shard_index(buffer, layout), flat.view(buffer.num_shards, -1)
    return of_rank(rows, index) if isinstance(index, Tensor) else rows[index].clone()  # without the memory of others


def copy_dims(buffer: Buffer, layout: Layout) -> list[int]:
    """The rank dims of a stacked tree along which there are copies of a shard of ``buffer``."""
    names = enumerate(layout.mesh.axes)
    return [i for i, name in names if buffer.num_shards == 1 or name not in layout.shard_axes]


def whole_of_stack(x: Tensor, buffer: Buffer, layout: Layout, codec: Encoding | None) -> Tensor:
    """The whole buffer from the shards of all ranks; of copies, the first."""
    copies = frozenset(dim for dim in copy_dims(buffer, layout) if x.shape[dim] > 1)
    return (_FirstCopies.apply(x, copies, codec) if copies or codec else x).flatten()


class _FirstCopies(Function):
    """Of equal copies along rank dims the first. Every copy gets the whole gradient, as if each rank returned it.

    Where ``fs.grad`` sums over the copies, Note [Boundary], the first one alone gets it. It is that without ``codec``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: Set[int], codec: Encoding | None) -> Tensor:
        first = x[tuple([slice(1 if dim in dims else None) for dim in range(x.ndim)])]
        return codec.recode(first) if codec else first

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dims, _ = inputs
        ctx.sizes = x.shape
        prepare(ctx, bool(ctx.dims), mean_is_transpose=not ctx.dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averages, (grad,) = ctx.sink.start(ctx, [grad]) if ctx.averages else (False, [grad])
        for dim in ctx.dims:
            others = grad if averages else torch.zeros_like(grad)
            grad = torch.cat([grad, others.repeat_interleave(ctx.sizes[dim] - 1, dim)], dim)
        return grad, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _FirstCopies.apply(tangent, ctx.dims, None)
