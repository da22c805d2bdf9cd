"""``scatter_grads``, ``accumulate``, and the reduction of full gradients by hand, by the schedule of each buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..collectives.rules import across, within
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.trees import Full, Sharded, check_layout, map_items, pack
from ..layout.validation import check_grads
from ..storage.memory_kind import to_working_device
from ..torch_internals.autograd import eager

Tree = TypeVar("Tree", Full, Sharded)


def scattered(grads: Mapping[str, Tensor], buffer: Buffer, layout: Layout, mean: bool = False) -> Tensor:
    """The shard of the sum over the ranks that share ``buffer``: the exact transpose of an all-gather.

    With ``mean`` of the mean (or the sum) over all ranks, not yet in the dtype that it is stored or returned in.
    """
    packed = pack(grads, buffer)
    schedule = layout.schedules[buffer.key, packed.dtype]
    total = within(packed, schedule)
    return across(total, schedule) if mean else total


@eager
def scatter_grads(grads: Mapping[str, Any], layout: Layout | None = None) -> Sharded:
    """Full gradients to reduced, sharded ones: the mean over ranks (or the sum), each rank keeping its part.

    What the gradient of :func:`gather` does, called by hand: ``scatter_grads(torch.func.grad(f)(gather(params)))``
    equals ``torch.func.grad(lambda params: f(gather(params)))(params)``. To accumulate over microbatches without
    communication (FSDP's ``no_sync``), add full gradients and scatter once. Linear, and differentiable.

    Args:
        grads: a ``Full``, or a mapping name -> tensor with ``layout``: this rank's gradients, in shapes of the
            parameters and any floating-point dtype. ``None`` counts as zeros. Frozen parameters may be left out. Those
            of DTensors are DTensors, in any placements.
        layout: the layout of the result; a ``Full`` brings its own.

    Returns:
        A ``Sharded`` of gradients in the stored dtypes (with ``keep_low_precision_grads`` in those of the reduction),
        with exact zeros for padding, and ``None`` for buffers that are not trainable. Outside ``spmd``, ``grads`` of
        simulated ranks carry their rank dims, and so does the result.

    Raises:
        TypeError: ``grads`` is already sharded, a plain mapping comes without a layout, or ``layout`` is not one.
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
    if isinstance(grads, Sharded):
        raise TypeError("scatter_grads: got a Sharded, expected full gradients; these are sharded already.")
    layout = layout or (grads.layout if isinstance(grads, Full) else None)
    if layout is None or not isinstance(grads, Mapping):
        raise TypeError(f"scatter_grads: got {type(grads).__name__}, expected a Full, or a mapping and a layout.")
    check_layout("scatter_grads", layout)
    check_grads(grads, layout)
    if not layout.mesh.in_spmd:
        return layout.mesh.spmd(lambda grads: scatter_grads(grads, layout))(dict(grads))
    if layout.tensor_meshes:
        from ..tensor_parallel import local_grads

        grads = local_grads(grads, layout)
    device = layout.mesh.device
    parts = {name: to_working_device(x, device) for name, x in grads.items() if isinstance(x, Tensor)}
    made = dict[str, Tensor | None](dict.fromkeys(layout.buffers))
    for key, buffer in layout.buffers.items():
        if buffer.trainable:
            given = [parts[slot.name] for slot in buffer.slots if slot.name in parts]
            like = given[0] if given else torch.zeros((), dtype=buffer.dtype, device=device)
            parts |= {s.name: like.new_zeros(s.shape) for s in buffer.slots if s.name not in parts}
            made[key] = scattered(parts, buffer, layout, mean=True).to(layout.schedules[key, None].returned)
    return Sharded(made, layout)


@eager
def accumulate(total: Tree | None, grads: Tree) -> Tree:
    """``total + grads``: gradients of microbatches, added up.

    Full gradients are added up in the dtype that they are reduced in. ``scatter_grads`` of the sum reduces once, and
    communicates nothing before that: FSDP's ``no_sync``. Sharded gradients are reduced already, each microbatch by
    itself, and take the memory of one shard.

    Args:
        total: the sum so far; ``None`` before the first microbatch.
        grads: of a microbatch, as ``fs.grad`` returns them: a ``Full`` of a function of a ``Full``, or a ``Sharded``.

    Returns:
        A new ``Full`` in each unit's ``reduce_dtype``, or as ``grads`` come; or a new ``Sharded`` in the dtypes of
        ``grads``. ``None`` counts as zeros.

    Raises:
        ValueError: sharded gradients have another layout than their ``total``.

    Cost:
        No collectives; the memory of one set of full gradients in that dtype, or of sharded ones.

    Example:
        >>> bf16 = fs.MixedPrecision(torch.bfloat16, torch.float32)
        >>> layout = fs.plan({"w": torch.zeros(1)}, fs.simulated_mesh(2), precision=bf16)
        >>> small, large = (fs.Full({"w": torch.full((1,), x, dtype=torch.bfloat16)}, layout) for x in (1.0, 256.0))
        >>> accumulate(accumulate(None, large), small)["w"]    # 256 in bfloat16
        tensor([257.])
    """
    before = type(grads)(dict.fromkeys(grads), grads.layout) if total is None else total
    layout = grads.layout
    if isinstance(grads, Sharded) and before.layout != layout:  # full gradients are by name in any layout
        raise ValueError("accumulate: total and grads have different layouts")

    def added(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return before[name]
        is_cast = isinstance(grads, Full) and x.is_floating_point()
        dtype = layout.schedules[layout.key_of[name], x.dtype].reduced if is_cast else x.dtype
        return x.to(dtype, copy=True) if before[name] is None else before[name] + x.to(before[name].device, dtype)

    return map_items(added, grads)
