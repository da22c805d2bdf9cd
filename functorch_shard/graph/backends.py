"""What runs a graph: Python, operator by operator, or a compiler of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from ..errors import hint
from ..torch_internals.compilers import (
    compile_with,
    compile_with_inductor,
    constants_as_inputs,
    named_compiler,
    names_of_compilers,
)

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Backend = Callable[[GraphModule, Sequence[Tensor]], Callable[..., Any]]


def runner(graph: GraphModule, inputs: Sequence[Tensor], backend: str | Backend, options: Mapping[str, Any]) -> Run:
    """A function from the inputs of ``graph`` to its outputs."""
    if backend == "replay":
        return lambda tensors: graph(*tensors)
    if backend == "cudagraphs":
        _refuse_host_tensors(graph)
    constants = constants_as_inputs(graph)
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
    known = ["replay", *names_of_compilers()]
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
