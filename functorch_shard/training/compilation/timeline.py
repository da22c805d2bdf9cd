"""A schedule over the order of its operations: SVG, and events that trace viewers read.

Note [Order]: the horizontal axis counts operations and not time, which a recording does not have. A computation takes
as many as it has operators, a start and a wait one each. A collective reaches from its start to its wait; if others
over the same axis are not awaited yet at its start, it gets another lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ... import svg
from ...communication.collective import Collective
from ...errors import size_text
from .schedule import Event, StepSchedule

_LEFT, _RIGHT, _LANE, _CHART = 150, 16, 22, 150  # margins, and the heights of a lane and of the chart of bytes
KINDS = {"all_gather": 0, "psum_scatter": 1, "psum": 2, "pmax": 3, "all_to_all": 5, "ragged_all_to_all": 6}


@dataclass(frozen=True)
class Span:
    """A collective from its start to its wait, or a computation, in operations from the beginning.

    Args:
        lane: the name of the row: ``"computation"``, or an axis and a number.
        start: the number of operations before it.
        end: the number of operations until it is awaited, or done.
        collective: what is communicated, if anything.
    """

    lane: str
    start: int
    end: int
    collective: Collective | None = None

    @property
    def name(self) -> str:
        op = self.collective
        return f"{self.end - self.start} operations" if op is None else f"{op.kind} {op.key}".rstrip()


def moments(events: Sequence[Event]) -> list[int]:
    """The number of operations up to and with each event."""
    return [*accumulate(event.operations or 1 for event in events)]


def spans(events: Sequence[Event]) -> list[Span]:
    """Computations and collectives in the order of their starts. A wait is for the oldest start of its collective."""
    ends, waits = moments(events), _waits(events)
    found, busy = [], {}
    for i, (event, end) in enumerate(zip(events, ends, strict=True)):
        if event.what == "compute":
            found.append(Span("computation", end - event.operations, end))
        if event.what == "start" and event.collective:
            until = ends[waits.get(i, len(events) - 1)]
            lane = _lane(busy, event.collective.axis, end - 1, until)
            found.append(Span(lane, end - 1, until, event.collective))
    return found


def _waits(events: Sequence[Event]) -> dict[int, int]:
    """The index of the wait for each start."""
    started: dict[Collective, list[int]] = {}
    waits = {}
    for i, event in enumerate(events):
        if event.what == "start" and event.collective:
            started.setdefault(event.collective, []).append(i)
        elif event.what == "wait" and event.collective:
            waits[started[event.collective].pop(0)] = i
    return waits


def _lane(busy: dict[str, int], axis: str, start: int, end: int) -> str:
    """The first lane of ``axis`` in which nothing is awaited at ``start``, taken until ``end``."""
    number = 0
    while busy.get(f"{axis} {number}", 0) > start:
        number += 1
    busy[f"{axis} {number}"] = end
    return f"{axis} {number}"


def lanes(found: Sequence[Span]) -> list[str]:
    """Rows from the top: the axes, and computation below them."""
    names = dict.fromkeys(span.lane for span in found)
    return [*sorted(name for name in names if name != "computation"), *(["computation"] if found else [])]


def drawing(schedule: StepSchedule, width: int = 960) -> str:
    """The picture as the text of an SVG file, ``width`` pixels wide."""
    found = spans(schedule.events)
    page = _Page(lanes(found), max([*moments(schedule.events), 1]), width, max(schedule.peak, 1))
    bottom = page.chart + _CHART
    body = [
        svg.text(16, 22, svg.fitting(summary(schedule), width - 32)),
        *_legend(found, 16, 42),
        *(svg.text(16, page.y(name) + 15, name, "fs-faint") for name in page.lanes),
        *(part for span in found for part in page.span(span)),
        *_bytes(schedule, page),
        svg.text(_LEFT, bottom + 18, _axis(page.operations), "fs-faint"),
    ]
    return svg.document(width, bottom + 30, summary(schedule), body)


def _axis(operations: int) -> str:
    return f"{operations:,} operations in order, not time; bytes after each event, the peak may be inside a computation"


def summary(schedule: StepSchedule) -> str:
    """Numbers of collectives, bytes of inputs and the peak, in a line."""
    return str(schedule).splitlines()[-1]


@dataclass(frozen=True)
class _Page:
    """Where operations and lanes are in the picture."""

    lanes: Sequence[str]
    operations: int
    width: int
    peak: int

    @property
    def chart(self) -> float:
        return 58 + _LANE * len(self.lanes) + 22

    def x(self, operation: int) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * operation / self.operations

    def y(self, lane: str) -> float:
        return 56 + _LANE * self.lanes.index(lane)

    def height(self, nbytes: int) -> float:
        return self.chart + _CHART * (1 - nbytes / self.peak)

    def span(self, span: Span) -> Iterator[str]:
        x, y, op = self.x(span.start), self.y(span.lane), span.collective
        width = max(self.x(span.end) - x, 1)
        tip = f"{op}, {op.nbytes:,} bytes a rank" if op else span.name
        look = f"fs-hue{KINDS.get(op.kind, 7)}" if op else "fs-rest"
        yield svg.rectangle(x, y + 2, width, _LANE - 4, look, f"{tip}; operations {span.start:,} to {span.end:,}")
        if op:
            yield svg.line(x, y + 2, x, y + _LANE - 2)
        name = svg.fitting_end(op.key or op.kind, width - 6) if op else ""
        if name:
            yield svg.text(x + 4, y + 15, name)


def _legend(found: Sequence[Span], x: float, y: float) -> Iterator[str]:
    """A color for each kind of collective."""
    for kind in dict.fromkeys(span.collective.kind for span in found if span.collective):
        yield svg.rectangle(x, y - 9, 10, 10, f"fs-hue{KINDS.get(kind, 7)}")
        yield svg.text(x + 15, y, kind, "fs-faint")
        x += 15 + (len(kind) + 3) * svg.CHARACTER


def _bytes(schedule: StepSchedule, page: _Page) -> Iterator[str]:
    """Bytes alive after each event, and the peak, which may be within a computation."""
    alive = [event.alive for event in schedule.events]
    points = [(page.x(n), page.height(now)) for n, now in zip(moments(schedule.events), alive, strict=True)]
    yield svg.rectangle(_LEFT, page.chart, page.width - _LEFT - _RIGHT, _CHART, "fs-rest")
    yield svg.steps([(page.x(0), page.height(0)), *points], "fs-ink-line")
    yield svg.line(_LEFT, page.chart, page.width - _RIGHT, page.chart, "fs-mark-line")
    yield svg.text(16, page.chart + 11, "bytes alive", "fs-faint")
    yield svg.text(16, page.chart + 27, f"peak {size_text(schedule.peak)}", "fs-mark")


def chrome_trace(schedule: StepSchedule) -> dict[str, Any]:
    """The trace event format of chrome://tracing and Perfetto, in which one operation takes a microsecond."""
    found = spans(schedule.events)
    numbers = {name: i for i, name in enumerate(lanes(found))}
    names = [_event("M", "thread_name", i, args={"name": name}) for name, i in numbers.items()]
    order = [_event("M", "thread_sort_index", i, args={"sort_index": i}) for i in numbers.values()]
    blocks = [_block(span, numbers[span.lane]) for span in found]
    alive = [
        _event("C", "bytes alive", 0, ts=n, args={"bytes": event.alive})
        for n, event in zip(moments(schedule.events), schedule.events, strict=True)
    ]
    about = {
        "inputs": schedule.inputs,
        "peak": schedule.peak,
        "unit": "one operation is 1 us; a recording has no times",
    }
    return {"traceEvents": [*names, *order, *blocks, *alive], "otherData": about}


def _block(span: Span, lane: int) -> dict[str, Any]:
    op = span.collective
    about = {"kind": op.kind, "axis": op.axis, "buffer": op.key, "bytes": op.nbytes} if op else {}
    return _event("X", span.name, lane, ts=span.start, dur=span.end - span.start, args=about)


def _event(phase: str, name: str, lane: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 0, "tid": lane, **more}
