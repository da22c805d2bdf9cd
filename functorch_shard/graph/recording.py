"""One call of a step as a graph: the eager program, traced on tensors without data; and its schedule as a table.

Note [Recording]: lazy gathers start, wait and gather again in backward as they do eagerly, so the graph has their
schedule and frees what they free. Python runs once: whatever it decides is fixed in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..communication.collective import RECORD, START, WAIT, Collective, is_watched, started_by
from ..communication.collective import record as mark
from ..containers import opened, refuse_opaque
from ..errors import table
from ..torch_internals.satellites import ON_VALUES, RefusedError, fake_copies, trace
from ..torch_internals.tensors import OpOverload, as_number, identity_of_storage, tensors_of, writes_nothing, written_by
from .signature import Call, is_traced, memory_outside


@dataclass(frozen=True)
class Input:
    """An output that is an input of the graph, for example one that was updated in place."""

    index: int


COMPUTED = object()  # stands for an output that the graph computes: the next one


@dataclass(frozen=True)
class Recording:
    """A graph and how to call it."""

    graph: GraphModule  # from the traced leaves of a call to its computed tensors
    treedef: Any  # of the result
    outputs: Sequence[Any]  # its leaves: COMPUTED, an Input, or a value that is always the same
    written: Sequence[int]  # the inputs that the graph writes to, by index
    simulated: Sequence[Collective] = field(repr=False)  # collectives of simulated ranks: arithmetic in the graph

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
        made = iter(computed)
        leaves = [next(made) if x is COMPUTED else inputs[x.index] if type(x) is Input else x for x in self.outputs]
        return optree.tree_unflatten(self.treedef, leaves)


def record(fn: Callable[..., Any], call: Call, for_compiler: bool) -> Recording:
    """Trace ``fn`` with these arguments; the cause of an error has the line of the program."""
    traced = [i for i, x in enumerate(call.leaves) if is_traced(x)]
    fakes = fake_copies(as_inputs(call.inputs))
    found: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        leaves = [*call.leaves]
        for i, x in zip(traced, inputs, strict=True):
            leaves[i] = x if isinstance(leaves[i], Tensor) else as_number(x)
        args, kwargs = optree.tree_unflatten(call.treedef, leaves)
        tree = opened(fn(*args, **kwargs))
        refuse_opaque("compile", tree, "the result", matters=lambda x: isinstance(x, Tensor))
        results, structure = optree.tree_flatten(tree, none_is_leaf=True)
        given = {_place(x): Input(i) for i, x in reversed([*enumerate(inputs)])}
        outputs = [given.get(_place(x), COMPUTED) if isinstance(x, Tensor) else x for x in results]
        found[:] = structure, outputs
        return [x for x, output in zip(results, outputs, strict=True) if output is COMPUTED]

    outer = [fn, *(x for x in call.leaves if isinstance(x, torch.nn.Module))]
    outside = memory_outside(outer)

    def left() -> Iterator[tuple[str, Tensor]]:
        """What was assigned outside, and is not in memory that was there before."""
        return (each for memory, tensors in memory_outside(outer).items() if memory not in outside for each in tensors)

    try:
        graph = trace(flat, fakes, for_compiler, left)
    except RuntimeError as error:
        # torch has no public class for a program that depends on values; a program's own errors are of other modules
        if isinstance(error, RefusedError) or type(error).__module__.startswith("torch."):
            reason = str(error) if isinstance(error, RefusedError) else f"{ON_VALUES} torch: {error}"
            raise NotImplementedError(f"compile: this step cannot be recorded as one graph. {reason}") from error
        raise
    structure, outputs = found
    memory = {key for node in graph.graph.nodes for key in _written(node)}
    written = [i for i, x in enumerate(fakes) if identity_of_storage(x) in memory]
    return Recording(graph, structure, outputs, written, simplify(graph))


def _written(node: Node) -> set[int]:
    """The memory that an operator writes to; counts of writes are not those of an input inside of a batch of ranks."""
    if not isinstance(node.target, OpOverload):
        return set()
    written = written_by(node.target, node.args, node.kwargs)
    return {key for each in written if isinstance(each, Node) for key in _storages(each)}


def as_inputs(values: Sequence[Any]) -> list[Tensor]:
    """The inputs of a graph: tensors, and floats as tensors without dims."""
    return [x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in values]


def simplify(graph: GraphModule) -> list[Collective]:
    """Remove from ``graph`` what has no effect on its outputs and inputs, and its markers of collectives; return these.

    No bit changes, and nothing is reordered. Simulated ranks have markers, as their collectives are arithmetic.
    """
    markers = [node for node in graph.graph.nodes if node.target is RECORD]
    for node in markers:
        graph.graph.erase_node(node)
    # x in place of x.detach(), or of a view of the same elements: the transforms left many
    returned = {*graph.graph.output_node().all_input_nodes}
    for node in graph.graph.nodes:
        if node not in returned and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code(lambda node: node.is_impure() or bool(_written(node)))
    graph.recompile()
    return [Collective(*node.args) for node in markers]


def _is_identity(node: Node) -> bool:
    given = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    made = node.meta.get("val")
    if not isinstance(given, Tensor) or not isinstance(made, Tensor) or _place(given) != _place(made):
        return False
    return writes_nothing(node.target)


def _place(x: Tensor) -> Any:
    """Return where the elements of ``x`` are, and how they are read."""
    return identity_of_storage(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


@dataclass(frozen=True)
class Event:
    """A start or a wait of a collective, or the last operation of a stretch of computation.

    Args:
        what: ``"start"``, ``"wait"`` or ``"compute"``.
        collective: what is started or waited for.
        operations: of a computation, how many operators.
        alive: the most bytes that the graph holds in it and after it, without its inputs.
    """

    what: str
    collective: Collective | None
    operations: int
    alive: int


@dataclass(frozen=True)
class StepSchedule:
    """What one recording does, in order.

    Args:
        events: starts, waits, and the computations between them.
        inputs: bytes of the arguments.
        simulated: the collectives of simulated ranks, which are arithmetic and no events.
    """

    events: tuple[Event, ...]
    inputs: int
    simulated: tuple[Collective, ...]

    @property
    def collectives(self) -> list[Collective]:
        """What one rank issues, in order."""
        started = [op for event in self.events if event.what == "start" and (op := event.collective) is not None]
        return [*started, *self.simulated]

    def number(self, kind: str) -> int:
        """How many collectives of a kind one rank issues."""
        return sum(op.kind == kind for op in self.collectives)

    def __str__(self) -> str:
        rows = [
            (event.what, op.kind, op.axis, op.key, op.nbytes, "", event.alive)
            if (op := event.collective)
            else (event.what, "", "", "", "", event.operations, event.alive)
            for event in self.events
        ]
        kinds = dict.fromkeys(op.kind for op in self.collectives)
        numbers = ", ".join(f"{self.number(kind)} {kind}" for kind in kinds) or "no collectives"
        peak = max((event.alive for event in self.events), default=0)
        last = f"{numbers}; inputs {self.inputs:,} bytes, peak beside them {peak:,} bytes"
        header = ("", "kind", "axis", "buffer", "bytes", "operations", "alive")
        return "\n".join([table(rows, header, left=4), last])


def schedule_of(recording: Recording) -> StepSchedule:
    """Read ``recording``; nothing runs."""
    graph = recording.graph.graph
    given: dict[int, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            given |= _storages(node)
    return StepSchedule(tuple(_events(_alive(graph, given))), sum(given.values()), tuple(recording.simulated))


def _events(moments: Iterable[tuple[Node, int]]) -> Iterator[Event]:
    operations, alive = 0, 0
    for node, now in moments:
        if node.target not in (START, WAIT):
            operations, alive = operations + 1, max(alive, now)
            continue
        if operations:
            yield Event("compute", None, operations, alive)
            operations, alive = 0, 0
        if node.target is START:
            yield Event("start", started_by(node.args), 0, now)
        else:
            (start,) = (each for each in node.all_input_nodes if each.target is START)
            yield Event("wait", started_by(start.args), 0, now)
    if operations:
        yield Event("compute", None, operations, alive)


def _alive(graph: Graph, given: Mapping[int, int]) -> Iterator[tuple[Node, int]]:
    """Each operation and the bytes, without those given, of what was made before or by it and is used after it."""
    last: dict[int, Node] = {}  # the node that reads or makes each memory last
    for node in graph.nodes:
        for seen in (node, *node.all_input_nodes):
            last.update(zip(_storages(seen), repeat(node)))
    held: dict[int, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        held |= {key: size for key, size in _storages(node).items() if key not in given}
        yield node, sum(held.values())
        held = {key: size for key, size in held.items() if last.get(key) is not node}


def _storages(node: Node) -> dict[int, int]:
    """The memory of what ``node`` makes: identities and bytes."""
    return {identity_of_storage(x): x.untyped_storage().nbytes() for x in tensors_of(node.meta.get("val"))}
