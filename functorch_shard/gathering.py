"""The verbs of the library: ``shard``, ``gather``, ``scatter_grads``, ``partition``, ``materialize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.autograd import Function

from .boundary import here, takes_mean
from .checks import check_grads, check_ranked, check_shards, check_whole
from .codecs import Codec, as_codec, recode
from .collectives import all_gather, gather_encoded, gather_shards
from .containers import opened
from .data_parallel import averaged, carried, scaled_gradient
from .fingerprints import value_lines
from .homes import home_of, near, working_device
from .layout import Buffer, Layout
from .lazy import lazily
from .pack import unpack
from .planning import named_tensors
from .reduction import copies, copy_dims, reduced_and_cast, reduced_together
from .slicing import cut_buffer, receive_buffer
from .tensor_parallel import local_grads, local_part, with_dtensors
from .trees import Full, Sharded


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
        TypeError: ``source`` is already sharded, ``layout`` is no layout, or ``from_rank`` no int.
        ValueError: names, shapes or dtypes that do not fit, or meta tensors; all of them at once. Or there is no rank
            ``from_rank``. With it, and of a module, an error on one real rank comes on all.
        RuntimeError: a module has other values on another rank: on all ranks, with the first parameter that differs. Or
            the ranks disagree about ``from_rank``.

    Cost:
        The memory of the shards. Of a mapping no collectives. Of a module on several real ranks its values are read
        once, and there is one all-gather of a 32-byte digest per axis: all ranks have to call this. With ``from_rank``:
        per buffer one scatter among the shards beside that rank and one broadcast to the copies, each rank receiving
        its shard; that rank holds one whole buffer more.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"shard: layout: got {type(layout).__name__}, expected a Layout from plan().")
    if from_rank is None:
        tensors = _the_same(source, layout) if isinstance(source, nn.Module) else _checked(source, layout)
        return Sharded({key: cut_buffer(tensors, buffer, layout) for key, buffer in layout.buffers.items()}, layout)
    lines = [f"from_rank={from_rank}"]
    tensors = layout.mesh.agree("shard", lambda: _of_source(source, layout, from_rank), lambda _: lines)
    shards = {key: receive_buffer(tensors, buffer, layout, from_rank) for key, buffer in layout.buffers.items()}
    return Sharded(shards, layout)


def _the_same(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The parameters of ``model``, which are those of every rank: parts of different models make none."""
    advice = (
        "Each rank shards the model that it built itself. Seed all ranks alike before that, torch.manual_seed(0), and "
        "apart after shard. Or take the values of one, shard(model, layout, from_rank=0), or make them by init_params."
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


def gather(
    params: Sharded,
    *more: Sharded,
    lazy: bool | None = None,
    dtype: torch.dtype | None = None,
    codec: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Full:
    """The whole parameters, on every rank; differentiable. The inverse of :func:`shard`.

    The data-parallel gather: its gradient is that of **the mean over ranks of what each rank returns** (of the sum,
    with ``reduction="sum"``), reduced and sharded again. ``fs.grad`` takes that mean once, at its end; under a bare
    ``torch.func.grad`` or ``backward()`` the backward of each gather takes it, and a derivative that goes through two
    gathers, as through a training step, is refused. In forward mode the tangents are gathered.

    On real ranks the parameters are lazy: a unit is fetched when an operation first needs its data, the next one ahead
    of its use, and at most two are whole at a time; backward gathers again what it needs. So every rank has to use
    them, in the same order: what one rank alone looks at, take with ``lazy=False``. Inside of ``fs.grad``, what all
    ranks gathered and this one did not use counts as zeros in its gradient; so with ``lazy=False`` ranks may use
    different units.

    Args:
        params: parameters, or any ``Sharded`` of their shape: gradients, moments, averages.
        more: the other parts, when :func:`partition` took a tree apart.
        lazy: ``False`` gathers everything now, into plain tensors. ``True`` makes even what one rank holds whole lazy,
            ``None`` only what has to be fetched, from other ranks or from where :func:`offload` put it. Simulated ranks
            share one memory: there all is plain.
        dtype: what to gather floating-point shards in, cast before they travel; the layout's ``precision`` unless
            given. Gradients come back in the stored dtype.
        codec: ``(encode, decode)``, what floating-point shards travel as: ``fs.codecs.int8()``, say. Every rank gets
            what ``decode`` makes of the message, its own part too. Derivatives pass straight through, uncoded: the
            gradient is that of the plain gather at the decoded values. A buffer that does not travel stays exact.

    Returns:
        A ``Full``, a dict name -> tensor on the mesh's device, in the source's order: lazy tensors, or views of the
        gathered buffers. What was planned as a ``DTensor`` is one again, around this rank's part, and its gradient
        comes back in its placements. Outside ``spmd`` a stacked tree of simulated ranks gives whole parameters without
        rank dims; there its gradient is that of every rank returning the same value. A buffer that one rank holds
        whole shares its memory with ``params``.

    Raises:
        TypeError: ``params`` is a ``Full`` or no tree at all, ``dtype`` is not a floating-point one, or ``codec`` is no
            pair of functions.
        ValueError: parts of different layouts, or shards that do not fit theirs: missing, extra, of other shapes or
            dtypes; all of them at once.
        RuntimeError: a lazy parameter is asked for its memory or written to (:func:`materialize` helps), used after its
            shards were written to, or used by a model that checkpoints itself under ``functional_call``: see ``call``.
            On every rank, over gloo: ranks used different units where they may not.
        KeyError: the layout has DTensors, and its mesh is no slice of a device mesh with their axes.
        NotImplementedError: the layout has DTensors, inside a transform of ``torch.func``.

    Cost:
        One all-gather per buffer, each rank receiving ``(N - 1) / N`` of its bytes; lazy, one more in backward, but for
        the last two units of forward (and none with ``reshard_after_forward=False``). Backward: one reduce-scatter per
        buffer while it goes on, and one all-reduce of the shard where there are replicas.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, mesh)
        >>> params = shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)
        >>> rows = torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 5.0]])   # row r = what rank r multiplies with
        >>> loss = lambda params, x: (gather(params)["fc.w"] * x).sum()
        >>> mesh.spmd(torch.func.grad(loss))(params, rows)["fc"]      # the mean of both rows, and zero padding
        tensor([[2., 2.],
                [3., 0.]])

    Stands for ``_rebuild_full_params`` and ``summon_full_params`` of fairscale's ``FullyShardedDataParallel``.
    """
    trees = (params, *more)
    for tree in trees:
        if not isinstance(tree, Sharded):
            already = "; it is whole already" if isinstance(tree, Full) else ""
            raise TypeError(f"gather: got {type(tree).__name__}, expected a Sharded{already}.")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"gather: dtype: got {dtype}, expected a floating-point dtype to compute in, or None")
    codec = None if codec is None else as_codec("gather", codec)
    layout = params.layout.merge([tree.layout for tree in more]) if more else params.layout
    shards = {key: tree[key] for tree in trees for key in tree}
    check_shards("gather", shards, layout)
    stacked = not layout.mesh.in_spmd
    later = {key: x for key, x in shards.items() if _is_lazy(x, layout.buffers[key], layout, lazy)}
    whole = lazily(later, layout, dtype, codec) if later else {}
    flat = _flat_of_stack if stacked else _flat
    flats = {
        key: flat(shards[key], buffer, layout, dtype, codec)
        for key, buffer in layout.buffers.items()
        if key not in later
    }
    for key, x in (flats if stacked else reduced_together(flats, layout)).items():
        if lazy is not False:
            layout.mesh.watch(key, x, [slot.name for slot in layout.buffers[key].slots])
        whole.update(unpack(x, layout.buffers[key]))
    whole = with_dtensors(whole, layout)
    return Full({name: whole[name] for name in layout.slots}, layout)


def _is_lazy(x: Tensor, buffer: Buffer, layout: Layout, lazy: bool | None) -> bool:
    """Simulated ranks share one memory, and a compiler schedules by itself."""
    if layout.mesh.is_simulated or torch.compiler.is_compiling():
        return False
    return (buffer.num_shards > 1 or _is_elsewhere(x, layout)) if lazy is None else lazy


def _is_elsewhere(x: Tensor, layout: Layout) -> bool:
    """Whether ``x`` was offloaded: to where there may be no room for all that is made from it at once."""
    return x.device != working_device(x, layout.mesh.device) or home_of(x).directory is not None


def _flat(x: Tensor, buffer: Buffer, layout: Layout, dtype: torch.dtype | None, codec: Codec | None) -> Tensor:
    """The whole buffer from this rank's shard."""
    axis = layout.mesh[layout.shard_axis] if buffer.num_shards > 1 else None
    x = x.to(working_device(x, layout.mesh.device), non_blocking=True)
    if not buffer.differentiable:
        return all_gather(x, axis) if axis else x
    codec = codec if x.is_floating_point() else None
    dtypes = layout.travel(buffer, dtype)
    divisors = layout.divisors(dtypes.reduced)
    x = averaged(carried(x, dtypes), copies(buffer, layout), divisors, dtypes.reduced)
    if axis is None:
        return x.to(dtypes.gathered)
    x = scaled_gradient(x, divisors[0], dtypes.carried)  # backward meets the last of these lines first
    gathered = gather_encoded(x, axis, dtypes, codec) if codec else gather_shards(x, axis, dtypes)
    return scaled_gradient(gathered, 1 / divisors[0], dtypes.reduced)


def _flat_of_stack(x: Tensor, buffer: Buffer, layout: Layout, dtype: torch.dtype | None, codec: Codec | None) -> Tensor:
    """The whole buffer from the shards of all ranks; of copies, the first."""
    x = recode(x, codec) if codec and buffer.num_shards > 1 and x.is_floating_point() else x
    x = x.to(working_device(x, layout.mesh.device), layout.travel(buffer, dtype).gathered)
    for i, dim in reversed([*enumerate(copy_dims(buffer, layout))]):
        x = _FirstCopy.apply(x, dim, i == 0)
    return x.flatten().clone()


class _FirstCopy(Function):
    """One of equal copies. Every copy gets the whole gradient, as if each rank had returned the same value.

    Where ``fs.grad`` sums over the copies, Note [Boundary], the first one alone gets it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, averages: bool) -> Tensor:
        return x.select(dim, 0).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dim, ctx.averages = inputs
        ctx.size, ctx.boundary = x.shape[ctx.dim], here()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first = grad.unsqueeze(ctx.dim)
        if takes_mean(ctx, ctx.boundary):
            return first.expand(*grad.shape[: ctx.dim], ctx.size, *grad.shape[ctx.dim :]), None, None
        return torch.cat([first, *[torch.zeros_like(first)] * (ctx.size - 1)], ctx.dim), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _FirstCopy.apply(tangent, ctx.dim, ctx.averages)


def scatter_grads(grads: Mapping[str, Any], layout: Layout | None = None) -> Sharded:
    """Full gradients to reduced, sharded ones: the mean over ranks (or the sum), each rank keeping its part.

    What the gradient of :func:`gather` does, called by hand: ``scatter_grads(torch.func.grad(f)(gather(params)))``
    equals ``torch.func.grad(lambda params: f(gather(params)))(params)``. To accumulate over microbatches without
    communication (FSDP's ``no_sync``), add full gradients and scatter once. Linear, and differentiable.

    Args:
        grads: a ``Full``, or a mapping name -> tensor with ``layout``: this rank's gradients, in shapes of the
            parameters and any floating-point dtype. ``None`` counts as zeros. Frozen parameters may be left out. Those
            of DTensors are DTensors, in any placements.
        layout: where the gradients are to lie; a ``Full`` brings its own.

    Returns:
        A ``Sharded`` of gradients in the stored dtypes (with ``keep_low_precision_grads`` in those of the reduction),
        with exact zeros for padding, and ``None`` for buffers that are not trainable. Outside ``spmd``, ``grads`` of
        simulated ranks carry their rank dims, and so does the result.

    Raises:
        TypeError: ``grads`` is already sharded, or a plain mapping comes without a layout.
        ValueError: names, shapes or dtypes that do not fit; all of them at once.

    Cost:
        One reduce-scatter per trainable buffer, and one all-reduce of the shard where there are replicas. A gradient in
        other placements than its DTensor's is redistributed first.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, mesh)
        >>> rows = torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 5.0]])   # row r = rank r's gradient
        >>> mesh.spmd(lambda g: scatter_grads({"fc.w": g}, layout))(rows)["fc"]
        tensor([[2., 2.],
                [3., 0.]])
    """
    layout = layout_of_grads("scatter_grads", grads, layout)
    if not layout.mesh.in_spmd:
        check_ranked(grads, layout)
        return layout.mesh.spmd(lambda grads: scatter_grads(grads, layout))(dict(grads))
    check_grads(grads, layout)
    parts = near_grads(grads, layout)
    return Sharded(
        {key: reduced_and_cast(parts, b, layout) if b.trainable else None for key, b in layout.buffers.items()}, layout
    )


def near_grads(grads: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The local parts of full gradients, where they can be reduced."""
    parts, device = local_grads(grads, layout), layout.mesh.device
    return {name: near(x, device) if isinstance(x, Tensor) else x for name, x in parts.items()}


def layout_of_grads(verb: str, grads: Any, layout: Layout | None) -> Layout:
    """The layout that full gradients are to be scattered by."""
    if isinstance(grads, Sharded):
        raise TypeError(f"{verb}: got a Sharded, expected full gradients; these are sharded already.")
    layout = layout or (grads.layout if isinstance(grads, Full) else None)
    if layout is None or not isinstance(grads, Mapping):
        raise TypeError(f"{verb}: got {type(grads).__name__}, expected a Full, or a mapping and a layout.")
    return layout


def accumulate(total: Full | None, grads: Full) -> Full:
    """``total + grads``: full gradients of microbatches, added up in the dtype that they are reduced in.

    ``scatter_grads`` of the sum reduces once, and communicates nothing before that: FSDP's ``no_sync``.

    Args:
        total: the sum so far; ``None`` before the first microbatch.
        grads: full gradients, as ``fs.grad`` of a function of a ``Full`` returns them.

    Returns:
        A new ``Full`` in each unit's ``reduce_dtype``, or as ``grads`` come. ``None`` counts as zeros.

    Raises:
        TypeError: ``grads`` or ``total`` is no ``Full``.

    Cost:
        No collectives; the memory of one set of full gradients in that dtype.

    Example:
        >>> bf16 = fs.MixedPrecision(torch.bfloat16, torch.float32)
        >>> layout = fs.plan({"w": torch.zeros(1)}, fs.simulated_mesh(2), precision=bf16)
        >>> small, large = (fs.Full({"w": torch.full((1,), x, dtype=torch.bfloat16)}, layout) for x in (1.0, 256.0))
        >>> accumulate(accumulate(None, large), small)["w"]    # 256 in bfloat16
        tensor([257.])
    """
    for name, tree in (("total", total), ("grads", grads)):
        if not isinstance(tree, Full) and not (tree is None and name == "total"):
            raise TypeError(f"accumulate: {name}: got {type(tree).__name__}, expected a Full of gradients.")
    total = Full(dict.fromkeys(grads), grads.layout) if total is None else total
    return Full(
        {name: _add(total[name], x, _reduce_dtype(name, x, grads.layout)) for name, x in grads.items()}, grads.layout
    )


def _add(total: Tensor | None, x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if x is None:
        return total
    return x.to(dtype, copy=True) if total is None else total + x.to(total.device, dtype)


def _reduce_dtype(name: str, grad: Tensor | None, layout: Layout) -> torch.dtype | None:
    if grad is None or not grad.is_floating_point():
        return None if grad is None else grad.dtype
    return layout.precision_of[layout.key_of[name]].reduce_dtype or grad.dtype


def partition(params: Sharded) -> tuple[Sharded, Sharded]:
    """``(trainable, frozen)``: two trees that ``gather(trainable, frozen)`` puts together again.

    Differentiate by the first alone: no gradient, optimizer memory or traffic is spent on the second.

    Args:
        params: any ``Sharded`` with one leaf per buffer of its layout.

    Returns:
        Two ``Sharded`` that share the leaves of ``params``, each with the layout of its own buffers.

    Raises:
        TypeError: ``params`` is no ``Sharded``.

    Cost:
        Nothing is copied or communicated.

    Example:
        >>> values = {"fc.w": torch.zeros(3), "fc.steps": torch.tensor(7)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> trainable, frozen = partition(params)
        >>> list(trainable), list(frozen)
        (['fc/float32'], ['fc/int64/frozen'])
    """
    if not isinstance(params, Sharded):
        raise TypeError(f"partition: got {type(params).__name__}, expected a Sharded.")
    layout = params.layout
    trainable = {key: buffer.trainable for key, buffer in layout.buffers.items()}
    halves = [layout.select({key: flag == wanted for key, flag in trainable.items()}) for wanted in (True, False)]
    mine, others = (Sharded({key: params[key] for key in half.buffers}, half) for half in halves)
    return mine, others


def materialize(tree: Any) -> Any:
    """``tree`` with plain tensors that own their memory, for code that wants a data pointer or to keep a few.

    The tensors of a ``Full`` are views of one gathered buffer per unit: keeping one keeps the whole buffer.

    Args:
        tree: a ``Full``, a tensor, or any pytree; what is no tensor is passed through.

    Returns:
        The same tree with a contiguous copy of each tensor. Differentiable.

    Cost:
        No collectives; the memory of the copies.

    Example:
        >>> layout = fs.plan({"a": torch.zeros(2), "b": torch.zeros(2)}, fs.simulated_mesh(2), units=[["a", "b"]])
        >>> full = fs.gather(fs.shard({"a": torch.zeros(2), "b": torch.ones(2)}, layout))
        >>> full["b"].untyped_storage().nbytes(), materialize(full)["b"].untyped_storage().nbytes()
        (24, 8)
    """
    return optree.tree_map(_own, opened(tree), none_is_leaf=True)


def _own(x: Any) -> Any:
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x
