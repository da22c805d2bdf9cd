"""Recorded collectives as torch's own operators, which its compilers know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..torch_internals.functional_collectives import operators
from .collective import START, WAIT, Collective
from .recorded import backend_of

_SUMMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32}
_SENT = {"all_gather": _SUMMED | {torch.bool, torch.uint8, torch.int8}, "psum_scatter": _SUMMED, "psum": _SUMMED}


def as_c10d(graph: GraphModule) -> GraphModule:
    """The graph with torch's own collectives in place of this library's: ``fs.compile(step, passes=[as_c10d])``.

    Same values, to the rounding of the process group's sums, and the same order. Compilers see what is communicated:
    Inductor plans its memory, and with its overlap scheduling moves it. The page about ``compile`` has the settings.

    Replaced are all-gathers, reductions and sums of real numbers along dim 0 over the process groups of real ranks, of
    which :func:`separate_reductions` has two. Everything else stays as it was recorded: other collectives, and those
    that a :class:`Counter` or another wrapper of the mesh is to see.

    Args:
        graph: what ``fs.compile`` recorded; it is not changed.

    Returns:
        A new graph of the same inputs and outputs.

    Cost:
        That of torch's collectives. Nothing checks that ranks issue the same, and errors do not name a lost rank; over
        gloo large messages go through sockets, not shared memory. ``testing.count_collectives`` does not see them.

    Example:
        >>> mesh = fs.simulated_mesh(2)   # whose collectives are arithmetic in the graph: there is nothing to replace
        >>> step = fs.compile(
        ...     mesh.spmd(lambda x: fs.collectives.psum(x, mesh)), backend="replay", passes=[fs.communication.as_c10d]
        ... )
        >>> step(torch.tensor([1, 20]))   # row r = rank r
        tensor([21, 21])

    Stands for the functional collectives of SimpleFSDP.
    """
    copied = Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    for start in [node for node in copied.nodes if node.target is START]:
        if (message := _message(start)) is not None:
            _replace(copied, message)
    return GraphModule(graph, copied)


@dataclass(frozen=True)
class _Message:
    """One collective of a graph, whose process group does just this."""

    op: Collective
    start: Node
    group: Any

    @property
    def x(self) -> Any:
        return self.start.args[0]

    @property
    def waits(self) -> list[Node]:
        return [node for node in self.start.users if node.target is WAIT]

    def operand(self) -> Iterator[tuple[Any, Any]]:
        """The operators that make of ``x`` what is sent."""
        value: Tensor = self.x.meta["val"]
        if value.dtype != self.op.dtype and self.op.kind == "all_gather":
            yield torch.ops.aten.to.dtype, {"dtype": self.op.dtype}
        if not value.is_contiguous():
            yield torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}

    def call(self) -> tuple[Any, tuple[Any, ...]]:
        """torch's operator, and its arguments but for the operand."""
        ops, name, size = operators(), self.group.group_name, self.group.size()
        match self.op.kind:
            case "all_gather":
                return ops.all_gather_into_tensor.default, (size, name)
            case "psum_scatter":
                return ops.reduce_scatter_tensor.default, ("sum", size, name)
        return ops.all_reduce.default, ("sum", name)


def _message(start: Node) -> _Message | None:
    x, ranks, *fields = start.args
    op, value = Collective(*cast(Any, fields)), cast(Node, x).meta["val"]
    there = op.device is None or op.device == value.device
    plain = {op.dtype, value.dtype} <= _SENT.get(op.kind, set()) and not op.dim and op.numel and there
    group = backend_of(str(ranks)).group_of(op) if plain else None
    return None if group is None else _Message(op, start, group)


def _replace(graph: Graph, message: _Message) -> None:
    target, more = message.call()
    with graph.inserting_before(message.start):
        x = message.x
        for op, options in message.operand():
            x = _call(graph, op, (x,), options)
        sent = _call(graph, target, (x, *more))
    for wait in message.waits:
        with graph.inserting_before(wait):
            wait.replace_all_uses_with(_call(graph, operators().wait_tensor.default, (sent,)))
        graph.erase_node(wait)
    graph.erase_node(message.start)


def _call(graph: Graph, target: Any, args: tuple[Any, ...], options: dict[str, Any] | None = None) -> Node:
    """A call in ``graph``, with the value that it would have."""
    node = graph.call_function(target, args, options or {})
    values = [x.meta["val"] if isinstance(x, Node) else x for x in args]
    node.meta["val"] = target(*values, **(options or {}))
    return node
