"""The compilers of torch, imported where they are asked for: they take seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule, Node

from .tracing import fake_copies, mode_of

# Inductor would put every start just before its wait, and weight gradients and reductions last: the recorded order is
# the one that overlaps and frees. Random numbers are those that the step draws eagerly.
_AS_RECORDED = {"reorder_for_peak_memory": False, "reorder_for_locality": False, "fallback_random": True}


# What Dynamo does with each frame that begins, None outside of compiled functions; torch.compiler.is_compiling is true
# only while it traces. Without this, what it compiles would take lazy tensors. A builtin: it has no frame of its own.
frame_compiler: Callable[[], Any] = eval_frame.get_eval_frame_callback


def compile_with(compiler: Any, graph: GraphModule, inputs: Sequence[Tensor]) -> Any:
    """``compiler`` of ``graph``, on fresh fake tensors: those of a trace know the numbers that were read in it."""
    fakes = fake_copies(inputs)
    with tracing(TracingContext(mode_of(fakes))):
        return compiler(graph, fakes)


def compile_with_inductor(graph: GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """A function of the inputs of ``graph``, in its order of operations."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch({**_AS_RECORDED, **options}):
        return compile_with(compile_fx, graph, inputs)


def named_compiler(name: str) -> Callable[[GraphModule, Sequence[Tensor]], Callable[..., Any]]:
    """A backend of ``torch.compile``."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)  # pyright: ignore[reportReturnType]


def names_of_compilers() -> list[str]:
    """The backends of ``torch.compile``, those for debugging included."""
    from torch._dynamo import list_backends

    return list_backends(exclude_tags=())


def constants_as_inputs(graph: GraphModule) -> list[Tensor]:
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
