"""One call of a step as a graph: the eager program, traced on tensors without data.

Note [Recording]: lazy gathers start, wait and gather again in backward as they do eagerly, so the graph has their
schedule and frees what they free. Python runs once: whatever it decides is fixed in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..communication.collective import RECORD, START, Collective, is_watched, started_by
from ..communication.collective import record as mark
from ..containers import opened, refuse_opaque
from ..torch_internals.autograd import as_number
from ..torch_internals.satellites import ON_VALUES, RefusedError, fake_copies, reads_values, trace
from ..torch_internals.tensors import identity_of_storage, version_of, writes_nothing
from .signature import Call, is_traced, memory_outside


@dataclass(frozen=True)
class Input:
    """An output that is an input of the graph, for example one that was updated in place."""

    index: int


@dataclass(frozen=True)
class Computed:
    """An output that the graph computes: the ``index``-th."""

    index: int


@dataclass(frozen=True)
class Recording:
    """A graph and how to call it.

    Args:
        graph: from the traced leaves of a call to its computed tensors.
        treedef: the structure of the result.
        outputs: its leaves: :class:`Input`, :class:`Computed`, or a value that is always the same.
        written: the inputs that the graph writes to, by index.
        simulated: the collectives of simulated ranks, which are arithmetic in the graph.
    """

    graph: GraphModule
    treedef: Any
    outputs: Sequence[Any]
    written: Sequence[int]
    simulated: Sequence[Collective] = field(repr=False)

    @property
    def collectives(self) -> list[Collective]:
        """What this rank issues in one run, in order."""
        return [started_by(node.args) for node in self.graph.graph.nodes if node.target is START]

    def show_simulated(self) -> None:
        """Show profilers and ``testing.count_collectives`` the collectives of simulated ranks."""
        for op in self.simulated if is_watched() else ():
            mark(op)

    def result(self, computed: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The tree that the step returns, from what the graph computed."""
        leaves = [
            computed[x.index] if type(x) is Computed else inputs[x.index] if type(x) is Input else x
            for x in self.outputs
        ]
        return optree.tree_unflatten(self.treedef, leaves)


def record(fn: Callable[..., Any], call: Call, for_compiler: bool) -> Recording:
    """Trace ``fn`` with these arguments; the error of what depends on values of tensors has the line."""
    traced = [i for i, x in enumerate(call.leaves) if is_traced(x)]
    fakes = fake_copies(as_inputs(call.inputs))
    versions = [version_of(x) for x in fakes]
    found: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        leaves = [*call.leaves]
        for i, x in zip(traced, inputs, strict=True):
            leaves[i] = x if isinstance(leaves[i], Tensor) else as_number(x)
        args, kwargs = optree.tree_unflatten(call.treedef, leaves)
        tree = opened(fn(*args, **kwargs))
        refuse_opaque("compile", tree, "the result", matters=lambda x: isinstance(x, Tensor))
        results, structure = optree.tree_flatten(tree, none_is_leaf=True)
        found[:] = structure, _outputs(results, inputs)
        return [x for x, kind in zip(results, found[1], strict=True) if type(kind) is Computed]

    outside = memory_outside(fn)

    def left() -> Iterator[tuple[str, Tensor]]:
        """What was assigned outside, and is not in memory that was there before."""
        return (each for memory, tensors in memory_outside(fn).items() if memory not in outside for each in tensors)

    graph = _traced(flat, fakes, for_compiler, left)
    structure, outputs = found
    written = [i for i, (x, version) in enumerate(zip(fakes, versions, strict=True)) if version_of(x) != version]
    return Recording(graph, structure, outputs, written, simplify(graph))


def as_inputs(values: Sequence[Any]) -> list[Tensor]:
    """The inputs of a graph: tensors, and floats as tensors without dims."""
    return [x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in values]


def _traced(flat: Callable[..., list[Tensor]], *how: Any) -> GraphModule:
    try:
        return trace(flat, *how)
    except RuntimeError as error:
        if isinstance(error, RefusedError) or reads_values(error):
            reason = str(error) if isinstance(error, RefusedError) else f"{ON_VALUES} torch: {error}"
            raise NotImplementedError(_explained(reason, error)) from error
        raise


def _outputs(results: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
    """What each leaf of the result is."""
    places = {_place(x): i for i, x in reversed([*enumerate(inputs)])}
    kinds: list[Any] = []
    for x in results:
        i = places.get(_place(x)) if isinstance(x, Tensor) else None
        num_computed = sum(type(kind) is Computed for kind in kinds)
        kinds.append(x if not isinstance(x, Tensor) else Computed(num_computed) if i is None else Input(i))
    return kinds


def simplify(graph: GraphModule) -> list[Collective]:
    """Remove from ``graph`` what has no effect on its outputs and inputs, bit by bit; nothing is reordered.

    Returns:
        The collectives of simulated ranks, which are arithmetic in the graph: it had a marker for each.
    """
    markers = [node for node in graph.graph.nodes if node.target is RECORD]
    for node in markers:
        graph.graph.erase_node(node)
    _replace_identities(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [Collective(*node.args) for node in markers]


def _replace_identities(graph: Graph) -> None:
    """Use ``x`` in place of ``x.detach()``, or of a view of the same elements: the transforms left many."""
    returned = {x for node in graph.nodes if node.op == "output" for x in node.all_input_nodes}
    for node in graph.nodes:
        if node not in returned and _is_identity(node):
            node.replace_all_uses_with(node.args[0])


def _is_identity(node: Node) -> bool:
    given = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    made = node.meta.get("val")
    if not isinstance(given, Tensor) or not isinstance(made, Tensor) or _place(given) != _place(made):
        return False
    return writes_nothing(node.target)


def _place(x: Tensor) -> Any:
    """Return where the elements of ``x`` are, and how they are read."""
    return identity_of_storage(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


def _explained(reason: str, error: Exception) -> str:
    package = Path(__file__).parents[1]
    others = [str(Path(str(module.__file__)).parent) for module in (torch, optree, contextlib)]
    lines = reversed(extract_tb(error.__traceback__))
    line = next((line for line in lines if not line.filename.startswith((str(package), *others, "<"))), None)
    where = f"{line.filename}:{line.lineno}: {line.line}\n" if line else ""
    return f"compile: this step cannot be recorded as one graph.\n{where}{reason}"
