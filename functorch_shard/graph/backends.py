"""What runs a graph: Python, operator by operator, or a compiler of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..errors import hint
from ..torch_internals.satellites import compile_with, compile_with_inductor, named_compiler

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Backend = Callable[[GraphModule, Sequence[Tensor]], Callable[..., Any]]


def runner(graph: GraphModule, inputs: Sequence[Tensor], backend: str | Backend, options: Mapping[str, Any]) -> Run:
    """A function from the inputs of ``graph`` to its outputs."""
    if backend == "replay":
        return lambda tensors: graph(*tensors)
    if backend == "cudagraphs":
        _refuse_host_tensors(graph)
    constants = _constants_as_inputs(graph)
    every = [*inputs, *constants]
    if backend == "inductor":
        run = compile_with_inductor(graph, every, options)
    else:
        run = compile_with(backend if callable(backend) else named_compiler(backend), graph, every)
    return lambda tensors: run(*tensors, *constants)


def check_backend(backend: str | Backend, options: Mapping[str, Any]) -> None:
    """Raise unless there is such a backend."""
    if options and backend != "inductor":
        raise TypeError(f"compile: {', '.join(options)}: only backend='inductor' has options, and this is {backend!r}.")
    if callable(backend) or backend in ("replay", "inductor"):
        return
    known = ["replay", *torch.compiler.list_backends(exclude_tags=())]
    if backend not in known:
        raise ValueError(
            f"compile: backend: got {backend!r}{hint(str(backend), known)}, expected one of {', '.join(known)}, or a "
            "function of a graph and its inputs."
        )


def _refuse_host_tensors(graph: GraphModule) -> None:
    """Raise where torch would run the graph without capturing it, which it does without a word."""
    tensors = [(node, node.meta.get("val")) for node in graph.graph.nodes]
    host = [node for node, x in tensors if isinstance(x, Tensor) and x.device.type == "cpu"]
    if host:
        first = f"{host[0].name!r} ({host[0].op} {host[0].target})"
        raise NotImplementedError(
            f"compile: backend='cudagraphs' captures graphs whose tensors are all on the device; {len(host)} are on "
            f"the CPU here, first {first}. Pass numbers such as lr as tensors on the device, keep step counts there "
            "(capturable=True), or use backend='replay'."
        )


def _constants_as_inputs(graph: GraphModule) -> list[Tensor]:
    """Make the tensors that ``graph`` refers to its last inputs, and return them: compilers may fold constants."""
    held: dict[str, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            held.setdefault(str(node.target), []).append(node)
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1:]
    tensors = []
    for name, nodes in held.items():
        tensors.append(getattr(graph, name))
        with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(None):
            last = [graph.graph.placeholder(name.lower())]
        last[0].meta = dict(nodes[0].meta)
        for node in nodes:
            node.replace_all_uses_with(last[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return tensors
