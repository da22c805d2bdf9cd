"""``plan``: from a model to its layout: which parameters share a buffer, and the slot of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..errors import reject
from ..mesh.mesh import Mesh
from ..torch_internals.tensors import identity_of_storage
from .buffers import Buffer, Reduction, Slot, Unit, alignment, dtype_name, padded
from .layout import Layout, lines_of
from .precision import MixedPrecision
from .trees import Sharded
from .units import Units, assign, merge_small, prefixes_of
from .validation import form_of, local_part, source_problems

Labels = Mapping[str, str] | Callable[[str, Tensor], str | None] | None
_BLOCK = 64  # the last elements of a kernel round otherwise: on any number of ranks there are none in multiples of this
_LARGE = 4096  # so padding is at most 1.6 %
Precision = MixedPrecision | Callable[[str], MixedPrecision | None] | None


class _Kind(NamedTuple):
    """The properties that all parameters of a buffer share."""

    unit: str
    label: str
    dtype: torch.dtype
    trainable: bool
    ignored: bool


def plan(
    source: nn.Module | Mapping[str, Tensor],
    mesh: Mesh,
    *,
    units: Units = "auto",
    labels: Labels = None,
    shard_axis: str | Sequence[str] = "shard",
    replicate_axis: str | None = "replicate",
    reduction: Reduction = "mean",
    precision: Precision = None,
    reshard_after_forward: bool = True,
    align_bytes: int = 16,
    ignored: Sequence[str] | Set[str] = (),
    virtual_ranks: int = 0,
) -> Layout:
    """Decide which rank holds which element of which parameter: a pure function of names, shapes and dtypes.

    Supports any dtype, scalars, empty tensors, tied and frozen parameters, and fewer elements than ranks. For a
    ``DTensor`` over other axes of the device mesh (tensor parallelism) this rank's local part is sharded.

    Values are not used: build the model with the same seed on every rank for :func:`shard`, or without values, on the
    meta device, for :func:`init`.

    Args:
        source: the model, which may be on the meta device, or a mapping name -> tensor. Parameters with
            ``requires_grad=False``, integers and bools are frozen; plain tensors of a mapping are trainable.
        mesh: the ranks; an axis that it does not have has size 1.
        units: what is gathered together. ``"blocks"``: each entry of the outermost stacks (``ModuleList``,
            ``Sequential``, a ``ModuleDict`` of one class, numbered children or attributes), and the rest by module; a
            large entry that has a stack of blocks inside gives way to them. ``"auto"``: the same, with small neighbours
            as one unit, named by the first; not where ``precision`` is by unit. Module classes or a callable ``(name,
            module) -> bool``: each such module, and the rest in one unit. Lists of names of parameters or modules. Of
            several around a parameter the innermost counts. An int: the maximal number of bytes.
        labels: name -> label, or a callable ``(name, tensor) -> label or None``. Parameters of one label share buffers,
            and have their own optimizer options.
        shard_axis: the axis that buffers are sharded over; or several that are one for this, the outermost first, for
            example ``("dp", "cp")``, where ranks of one ``dp`` have parts of the same sequences; in the order of
            the mesh.
        replicate_axis: the axis that shards are replicated over. ``None``: gradients are not reduced over other axes,
            which is left to the program, for example once for several microbatches (guides/accumulation.md).
        reduction: the reduction of gradients over ranks, ``"mean"`` or ``"sum"``.
        precision: the dtypes that ``gather`` returns and that gradients are reduced in; by default those that are
            stored. One policy for all units, or a callable ``(unit) -> policy or None``, for example for norms in
            float32, if ``units`` puts them in units of their own.
        reshard_after_forward: whether real ranks free a gathered unit after its use and gather it again in backward.
            ``False`` keeps every unit from its first use to its gradient: half of the gathers, more memory.
        align_bytes: every parameter starts at a multiple of this, in each dtype of ``precision`` too; 0 packs them
            without gaps. Otherwise shards of 4,096 elements and more are multiples of 64, so that elementwise kernels
            round alike on any number of ranks.
        ignored: names of parameters or modules that stay whole on every rank; their gradients are still reduced.
        virtual_ranks: a multiple V of the number of ranks, for a program that has the same bits on any number of ranks
            that divides V: :func:`fs.virtual.grad <functorch_shard.virtual.grad>`. Buffers are padded to a multiple
            of 64 V elements, so that they and the kernels on their shards are the same; 0 for other programs.

    Returns:
        A frozen, hashable :class:`Layout`. ``print`` shows it.

    Raises:
        TypeError, ValueError: names that do not exist, lazy parameters, parameters with hooks or of a tensor subclass
            (for example quantized), invalid options; all of them are listed.
        RuntimeError: another rank failed, or has a different layout; the message names the first difference.

    Cost:
        Real ranks: one all-gather of a 32-byte digest per axis. Nothing is allocated.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
        >>> print(fs.plan(model, fs.simulated_mesh(2), align_bytes=0))
        buffer  dtype    parameters  elements  padding  shard  shard bytes
        ------------------------------------------------------------------
        0       float32           2        12        0      6           24
        1       float32           1         3        1      2            8
        total                     3        15        1      8           32
        shard=2; gradients: mean over ranks; slots packed

    The layout is that of torch's ``FlatParamHandle`` (torch/distributed/fsdp/_flat_param.py), which does not support
    the cases that are listed above.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"plan: mesh: got {type(mesh).__name__}, expected a Mesh: plan(model, simulated_mesh(4))")
    names = [shard_axis] if isinstance(shard_axis, str) else shard_axis
    joined = ",".join([name for name in names if name in mesh.axes] or names)
    if joined != shard_axis and replicate_axis == "replicate" and replicate_axis in shard_axis:
        replicate_axis = ""  # sharded over too, and so nothing has copies
    axes, copies = tuple(mesh.axes.items()), replicate_axis or ""
    empty = Layout((), axes, joined, copies, reduction, align_bytes, (), mesh, reshard_after_forward, virtual_ranks)

    def build() -> Layout:
        every, whole_names = named_tensors(source), dict.fromkeys(ignored)
        module = source if isinstance(source, nn.Module) else None
        problems = [*_source_problems(every, empty, whole_names), *_option_problems(empty, replicate_axis)]
        reject("plan", problems, "Nothing was planned.")
        aliases = aliases_of(every)
        tensors = {name: tensor for name, tensor in every.items() if name not in aliases}
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        unit_of = assign(parts, module, units)
        if units == "auto" and (precision is None or isinstance(precision, MixedPrecision)):  # others name the units
            unit_of = merge_small(tensors, unit_of)
        label_of = _labels(tensors, labels)
        whole = {aliases.get(name, name) for name in every if not whole_names.keys().isdisjoint(prefixes_of(name))}
        groups: dict[_Kind, list[Slot]] = {}
        for index, (name, x) in enumerate(tensors.items()):
            trainable = (x.is_floating_point() or x.is_complex()) and (x.requires_grad or not _is_parameter(x))
            kind = _Kind(unit_of[name], label_of[name], x.dtype, trainable, name in whole)
            slot = Slot(name, tuple(parts[name].shape), x.dtype, 0, parts[name].numel(), index, form_of(x))
            groups.setdefault(kind, []).append(slot)
        unit_names = dict.fromkeys(kind.unit for kind in groups)
        policies = {x: (precision(x) if callable(precision) else precision) or MixedPrecision() for x in unit_names}
        made = replace(empty, units=_units(groups, empty, policies), aliases=tuple(sorted(aliases.items())))
        made.derived["tied"] = [ref(every[name]) for name in aliases.values()]  # functional_call may untie them
        return made

    layout = mesh.agree("plan", build, lambda layout: list(lines_of(layout)))
    if len(layout.shard_axes) > 1 and set(layout.shard_axes) <= set(mesh.axes):
        _ = mesh[layout.shard_axis]  # real ranks make its process group now, when all of them are here
    return layout


def named_tensors(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter of ``source`` by name, under all its names."""
    if isinstance(source, nn.Module):
        return dict(nn.Module.named_parameters(source, remove_duplicate=False))  # not torchrl's own
    if isinstance(source, Mapping) and not isinstance(source, Sharded):
        return dict(source)
    raise TypeError(f"source: got {type(source).__name__}, expected an nn.Module or a mapping name -> tensor")


def _units(
    groups: Mapping[_Kind, Sequence[Slot]], empty: Layout, policies: Mapping[str, MixedPrecision]
) -> tuple[Unit, ...]:
    """Units, and the buffers in each, in the order of their first parameters."""
    dtypes = Counter(unit for unit, _ in dict.fromkeys((kind.unit, kind.dtype) for kind in groups))
    buffers: dict[str, list[Buffer]] = {}
    for kind, slots in groups.items():
        told_by = dtype_name(kind.dtype) if dtypes[kind.unit] > 1 else ""
        tags = (kind.unit, kind.label, told_by, "" if kind.trainable else "frozen", "whole" if kind.ignored else "")
        num_shards, policy = 1 if kind.ignored else empty.num_shards, policies[kind.unit]
        others = (policy.param_dtype, policy.reduce_dtype) if kind.dtype.is_floating_point else ()
        smallest = min((kind.dtype, *filter(None, others)), key=lambda dtype: dtype.itemsize)
        align, placed = alignment(smallest, empty.align_bytes), list[Slot]()  # a kernel reads slots in each of them
        for slot in slots:
            placed.append(replace(slot, offset=padded(placed[-1].end if placed else 0, align)))
        shard = -(-placed[-1].end // num_shards)
        shard = padded(shard, _BLOCK) if align > 1 and shard >= _LARGE else shard
        if empty.virtual_ranks:
            shard = padded(placed[-1].end, _BLOCK * empty.virtual_ranks) // num_shards
        key = "/".join(filter(None, tags))
        made = Buffer(key, kind.label, kind.trainable, shard * num_shards, num_shards, tuple(placed))
        buffers.setdefault(kind.unit, []).append(made)
    keys = Counter(buffer.key for found in buffers.values() for buffer in found)
    problems = [f"{key!r}: the key of {count} buffers" for key, count in keys.items() if count > 1]
    reject("plan: labels", problems, "A label must not look like a dtype, 'frozen', 'whole' or part of a unit's name.")
    return tuple(Unit(name, tuple(found), policies[name]) for name, found in buffers.items())


def aliases_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of tied parameters -> the first one."""
    first: dict[object, str] = {}
    return {name: owner for name, x in tensors.items() if (owner := first.setdefault(_identity(x), name)) != name}


def _identity(tensor: Tensor) -> object:
    """Equal for a parameter under two names; in a state dict these are two tensors that share memory."""
    if _is_parameter(tensor):
        return id(tensor)
    part = local_part(tensor)
    try:
        memory = identity_of_storage(part)
    except NotImplementedError:  # a tensor inside a transform
        return id(tensor)
    signs = part.is_conj(), part.is_neg()
    return memory, part.storage_offset(), part.shape, part.stride(), part.dtype, signs, form_of(tensor)


def _is_parameter(x: Tensor) -> bool:
    return type(x) is not Tensor and isinstance(x, nn.Parameter)  # isinstance of nn.Parameter runs Python code


def _labels(tensors: Mapping[str, Tensor], labels: Labels) -> dict[str, str]:
    if labels is None:
        return dict.fromkeys(tensors, "")
    if callable(labels):
        label_of = {name: labels(name, tensor) or "" for name, tensor in tensors.items()}
    else:
        label_of = dict(labels)
    problems = [f"{name!r}: labelled, but no such parameter" for name in label_of if name not in tensors]
    problems += [f"{name!r}: label {x!r}" for name, x in label_of.items() if not isinstance(x, str) or "/" in x]
    advice = "Use the names of named_parameters(), of tied parameters the first. A label is a string without '/'."
    reject("plan: labels", problems, advice)
    return {name: label_of.get(name, "") for name in tensors}


def _source_problems(tensors: Mapping[str, Tensor], layout: Layout, ignored: Iterable[str]) -> Iterator[str]:
    yield from source_problems(tensors)
    if any(form_of(x) for x in tensors.values()):
        from ..tensor_parallel.forms import unfit

        if layout.virtual_ranks:
            yield "virtual_ranks: of a model with DTensors, whose sums over other axes are in no fixed order"
        cut = {name: x for name, x in tensors.items() if form_of(x)}
        yield from (f"{name!r}: {problem}" for name, x in cut.items() if (problem := unfit(x, layout.mesh)))
    known = {prefix for name in tensors for prefix in prefixes_of(name)} if ignored else set()
    yield from (f"ignored {name!r}: no such parameter or module" for name in ignored if name not in known)


def _option_problems(layout: Layout, replicate_axis: str | None) -> Iterator[str]:
    mesh, shard_axes = layout.mesh, layout.shard_axes
    if layout.reduction not in ("mean", "sum"):
        yield f"reduction: got {layout.reduction!r}, expected 'mean' or 'sum'"
    if not isinstance(layout.align_bytes, int) or layout.align_bytes < 0:
        yield f"align_bytes: got {layout.align_bytes!r}, expected a number of bytes, 0 to pack"
    number = layout.virtual_ranks
    if not isinstance(number, int) or number < 0 or number % layout.num_ranks:
        yield f"virtual_ranks: got {number!r}, expected a multiple of the {layout.num_ranks} ranks of {mesh}, or 0"
    if replicate_axis in shard_axes:
        yield f"shard_axis and replicate_axis: got {replicate_axis!r} for both, expected two names"
    ordered = tuple(name for name in mesh.axes if name in shard_axes)
    if {*ordered} == {*shard_axes} and ordered != shard_axes:
        yield f"shard_axis: got {', '.join(shard_axes)}, expected the order of the mesh, {', '.join(ordered)}"
    for name, size in mesh.axes.items():
        if name not in (*shard_axes, replicate_axis) and size > 1 and replicate_axis is not None:
            yield (
                f"mesh: axis {name!r} of {size} ranks is neither shard_axis nor replicate_axis: no gradient would be "
                f"reduced over it. Pass it, for example as replicate_axis={name!r}"
            )
    if not {*shard_axes, replicate_axis} & set(mesh.axes):
        yield f"shard_axis and replicate_axis: {mesh} has neither {layout.shard_axis!r} nor {replicate_axis!r}"
