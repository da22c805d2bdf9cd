"""Gradients reduced in fewer bytes than they have: ranks send codes, and keep what is lost for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..collectives.rules import across, aside, fold, place_of, stack
from ..communication.backend import Axis
from ..errors import name_problems, reject
from ..layout.buffers import Buffer, pack
from ..layout.layout import Layout, shard_axis
from ..layout.trees import Sharded
from ..layout.validation import check_grads
from ..sharding.scatter import complete, layout_of_grads, near_grads, reduced_and_cast
from ..torch_internals.autograd import Function
from .encoding import RowEncoding, encoding

Error = dict[str, Tensor]


def scatter_encoded_grads(
    grads: Mapping[str, Any],
    codec: tuple[Callable[..., Any], Callable[..., Any]],
    error: Error | None = None,
    layout: Layout | None = None,
) -> tuple[Sharded, Error]:
    """:func:`scatter_grads` in the bytes of ``codec``, with error feedback: state in, state out.

    Each rank encodes ``grads + error``, sends every other rank its part, decodes what it received and adds it up in
    float32, in rank order. What the code lost is the new ``error``: added to the next gradients, nothing is lost for
    good. Where gradients overflow, those that are returned show it, and what was owed before is owed still: an
    overflow makes no later step NaN.

    Args:
        grads: this rank's full gradients, as for :func:`scatter_grads`.
        codec: ``(encode, decode)``, for example ``fs.codecs.int8()``.
        error: what the last call returned; ``None`` for zeros, at the start or for no feedback.
        layout: the layout of the result; a ``Full`` brings its own.

    Returns:
        ``(grads, error)``: a ``Sharded`` as of :func:`scatter_grads`, and for each buffer that is sent encoded what
        this rank still owes, in float32 and ``buffer.numel`` elements. Buffers that are whole on every rank and complex
        ones are reduced exactly and owe nothing. Outside ``spmd`` all carry rank dims.

    Raises:
        TypeError, ValueError: as :func:`scatter_grads`; a codec that is not a pair; an ``error`` that does not fit.
        NotImplementedError: it is differentiated.

    Cost:
        One all-to-all of encoded bytes per trainable buffer, one all-reduce of the shard where there are replicas; the
        memory of ``error``, one whole model in float32.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"w": torch.zeros(2)}, mesh, reduction="sum")
        >>> rows = torch.tensor([[127.0, 1.4], [127.0, 0.0]])   # row r = rank r's gradient
        >>> codec = fs.codecs.int8(block=2)
        >>> grads, error = fs.codecs.scatter_encoded_grads({"w": rows}, codec, layout=layout)
        >>> error["(root)"].shape
        torch.Size([2, 2])

    Stands for the quantized gradients of ZeRO++ (qgZ) and LoCo's error feedback.
    """
    encoder = encoding("scatter_encoded_grads", codec)
    layout = layout_of_grads("scatter_encoded_grads", grads, layout)
    check_grads(grads, layout)
    if not layout.mesh.in_spmd:
        inside = lambda grads, error: scatter_encoded_grads(grads, codec, error, layout)  # noqa: E731
        return layout.mesh.spmd(inside)(dict(grads), error)
    encoded = {
        k: b for k, b in layout.buffers.items() if b.trainable and b.num_shards > 1 and b.dtype.is_floating_point
    }
    _check_error(error, {key: buffer.numel for key, buffer in encoded.items()})
    parts = near_grads(grads, layout)
    shards: dict[str, Tensor | None] = {}
    owed: Error = {}
    for key, buffer in layout.buffers.items():
        if key in encoded:
            before = error[key] if error else None
            shards[key], lost = _reduced(parts, buffer, layout, encoder, before)
            owed[key] = _finite(lost, before)
        else:
            shards[key] = reduced_and_cast(parts, buffer, layout) if buffer.trainable else None
    return Sharded(shards, layout), owed


def _reduced(
    grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout, codec: RowEncoding, error: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Reduce what ``codec`` makes of ``grads`` and last time's ``error``; and return what it lost of them."""
    packed = pack(complete(grads, buffer, layout), buffer)
    wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
    owed, axis = wide if error is None else wide + error, shard_axis(layout).of(buffer.key)
    total, lost = _ScatterEncoded.apply(owed, *place_of(axis), axis, codec)
    mean = across(total, layout.schedules[buffer.key, wide.dtype])
    return mean.to(layout.schedules[buffer.key, None].returned), lost


class _ScatterEncoded(Function):
    """``psum_scatter`` of what a codec makes of each rank's part, and what it lost. Has no derivative."""

    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, codec: RowEncoding
    ) -> tuple[Tensor, Tensor]:
        return _exchange(x, axis, codec, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, codec: RowEncoding
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0])
            return _ScatterEncoded.apply(x, index, others, fold(axis, info, in_dims), codec), (batch_dim, batch_dim)
        return _exchange(stack(x, in_dims[0], axis), axis, codec, 3), (0, 0)


def _exchange(x: Tensor, axis: Axis, codec: RowEncoding, dims: int) -> tuple[Tensor, Tensor]:
    """The sum, in rank order, of the rows that ranks encoded for this one; and what this rank's lost."""
    parts = x.unflatten(-1, (axis.size, x.shape[-1] // axis.size))
    messages, form = codec.encode(parts)
    received = axis.issue("all_to_all", messages, dim=messages.ndim - dims).wait()
    total, *addends = codec.decode(received, form).unbind(-2)
    for addend in addends:
        total = total + addend
    return total, (parts - codec.decode(messages, form)).flatten(-2)


_NO_DERIVATIVE = (
    "a reduction of encoded gradients has no derivative: use scatter_grads where somebody differentiates it."
)


def _finite(lost: Tensor, before: Tensor | None) -> Tensor:
    """What is owed now; what was owed before, or nothing, where a gradient overflowed and so arrived nowhere."""
    kept = torch.zeros_like(lost) if before is None else before.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where(lost.isfinite(), lost, kept)


def _check_error(error: Any, numel: Mapping[str, int]) -> None:
    if error is None:
        return
    if not isinstance(error, Mapping):
        got = type(error).__name__
        raise TypeError(f"scatter_encoded_grads: error: got {got}, expected what the last call returned, or None.")
    problems = name_problems(error, numel)
    for key in numel.keys() & error.keys():
        shape = tuple(error[key].shape) if isinstance(error[key], Tensor) else type(error[key]).__name__
        problems += [] if shape == (numel[key],) else [f"{key!r}: got {shape}, expected ({numel[key]},)"]
    reject("scatter_encoded_grads: error", problems, "Pass what the last call returned for this layout, or None.")
