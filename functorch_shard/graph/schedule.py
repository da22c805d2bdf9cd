"""A recording as a table: what is sent and awaited, in order, and the bytes alive meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ..communication.collective import START, WAIT, Collective, started_by
from ..communication.wrappers import Traffic
from ..errors import table
from ..torch_internals.tensors import identity_of_storage, tensors_of
from .recording import Recording


@dataclass(frozen=True)
class Event:
    """A start or a wait of a collective, or the last operation of a stretch of computation.

    Args:
        what: ``"start"``, ``"wait"`` or ``"compute"``.
        collective: what is started or waited for.
        operations: of a computation, how many operators.
        alive: bytes that the graph holds after it, without its inputs.
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
        peak: the most bytes alive at a time beside the inputs, messages of a backend not counted.
        simulated: the collectives of simulated ranks, which are arithmetic and no events.
    """

    events: tuple[Event, ...]
    inputs: int
    peak: int
    simulated: tuple[Collective, ...]

    @property
    def collectives(self) -> list[Collective]:
        """What one rank issues, in order."""
        started = [op for event in self.events if event.what == "start" and (op := event.collective) is not None]
        return [*started, *self.simulated]

    def number(self, kind: str) -> int:
        """How many collectives of a kind one rank issues."""
        return sum(op.kind == kind for op in self.collectives)

    def traffic(self, axes: Mapping[str, int]) -> dict[tuple[str, str], Traffic]:
        """What one rank sends over axes of these sizes, ``mesh.axes``, as ``communication.Counter`` counts it."""
        total: dict[tuple[str, str], Traffic] = {}
        for op in self.collectives:
            size = prod(axes[name] for name in op.axis.split(","))
            one = Traffic(1, op.nbytes, op.law.sent(op.nbytes, size))
            total[op.axis, op.kind] = total.get((op.axis, op.kind), Traffic()) + one
        return total

    def __str__(self) -> str:
        rows = [_row(event) for event in self.events]
        kinds = dict.fromkeys(op.kind for op in self.collectives)
        numbers = ", ".join(f"{self.number(kind)} {kind}" for kind in kinds) or "no collectives"
        last = f"{numbers}; inputs {self.inputs:,} bytes, peak beside them {self.peak:,} bytes"
        header = ("", "kind", "axis", "buffer", "bytes", "operations", "alive")
        return "\n".join([table(rows, header, left=4), last])


def _row(event: Event) -> tuple[Any, ...]:
    op = event.collective
    if op is None:
        return event.what, "", "", "", "", event.operations, event.alive
    return event.what, op.kind, op.axis, op.key, op.nbytes, "", event.alive


def schedule_of(recording: Recording) -> StepSchedule:
    """Read ``recording``; nothing runs."""
    graph = recording.graph.graph
    inputs = _bytes(node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    moments = list(_alive(graph))
    peak = max((alive for _, alive in moments), default=0)
    return StepSchedule(tuple(_events(moments)), inputs, peak, tuple(recording.simulated))


def _events(moments: Iterable[tuple[Node, int]]) -> Iterator[Event]:
    operations, alive = 0, 0
    for node, now in moments:
        if node.target not in (START, WAIT):
            operations, alive = operations + 1, now
            continue
        if operations:
            yield Event("compute", None, operations, alive)
            operations = 0
        if node.target is START:
            yield Event("start", started_by(node.args), 0, now)
        else:
            (start,) = (each for each in node.all_input_nodes if each.target is START)
            yield Event("wait", started_by(start.args), 0, now)
    if operations:
        yield Event("compute", None, operations, alive)


def _alive(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Each operation and the bytes of what was made before or by it and is used after it."""
    last = _last_uses(graph)
    given = {key for node in graph.nodes if node.op in ("placeholder", "get_attr") for key in _storages(node)}
    held: dict[int, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        held |= {key: size for key, size in _storages(node).items() if key not in given}
        yield node, sum(held.values())
        held = {key: size for key, size in held.items() if last.get(key) is not node}


def _last_uses(graph: Graph) -> Mapping[int, Node]:
    """The last node that reads or makes each memory."""
    last: dict[int, Node] = {}
    for node in graph.nodes:
        for seen in (node, *node.all_input_nodes):
            last.update(zip(_storages(seen), repeat(node)))
    return last


def _storages(node: Node) -> dict[int, int]:
    """The memory of what ``node`` makes: identities and bytes."""
    return {identity_of_storage(x): x.untyped_storage().nbytes() for x in _tensors(node)}


def _tensors(node: Node) -> list[Tensor]:
    return tensors_of(node.meta.get("val"))


def _bytes(nodes: Iterable[Node]) -> int:
    return sum({key: size for node in nodes for key, size in _storages(node).items()}.values())
