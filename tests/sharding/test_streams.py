"""Whatever stream asks for a unit waits until it is there, and its memory is not given away before that is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Work
from functorch_shard.sharding import session
from functorch_shard.sharding.reduction import Part
from functorch_shard.sharding.session import NO_PASS, RecordedEvent, Session, Streams, UnitBuffers

some_laws = settings(max_examples=100, deadline=None)


class Stream:
    """A stream that knows all work that is done before what is put on it next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behind: set[Any] = set()
        self.waits = 0

    def record_event(self) -> frozenset[Any]:
        return frozenset(self.behind)

    def wait_event(self, event: frozenset[Any]) -> None:
        self.behind |= event
        self.waits += 1


class Device:
    """Some streams, one of which is current, and the streams that were reported to the allocator, by memory."""

    def __init__(self, number: int) -> None:
        self.streams = [Stream(f"stream {i}") for i in range(number)]
        self.now = self.streams[0]
        self.recorded: dict[int, set[Stream]] = {}

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def at_work(self) -> Iterator[Streams]:
        def record(x: Tensor, stream: Any) -> Any:
            return self.recorded.setdefault(x.data_ptr(), set()).add(stream)

        with mock.patch.object(Tensor, "record_stream", record):
            yield Streams(lambda: self.now, self.on)


def test_another_stream_waits_once_and_the_allocator_knows_it() -> None:
    device, x = Device(3), torch.ones(1)
    first, second, third = device.streams
    with device.at_work() as streams:
        first.behind.add("made")
        made = RecordedEvent(streams)
        first.behind.add("later")
        for stream in (second, second, third, first):
            with device.on(stream):
                made.take([x])
    assert [stream.waits for stream in device.streams] == [0, 1, 1]
    assert (second.behind, third.behind) == ({"made"}, {"made"})
    assert device.recorded == {x.data_ptr(): {second, third}}


class Units:
    """A session of a device with some streams; what each start and each wait left on them is known."""

    def __init__(self, device: Device, streams: Streams, number: int, **options: Any) -> None:
        tensors = {f"u{i}.w": torch.zeros(7) for i in range(number)}
        layout = fs.plan(tensors, fs.init_mesh(), **options)
        self.device, self.session = device, Session(layout, {}, streams)
        parts = [Part(i, unit.buffers, layout) for i, unit in enumerate(layout.units)]
        self.buffers = [self.session.add(part, [torch.zeros(7)]) for part in parts]
        self.complete: dict[UnitBuffers, Any] = {}
        self.memory_of: dict[UnitBuffers, Stream] = {}  # whose memory it is

    @contextmanager
    def watched(self) -> Iterator[None]:
        gather = UnitBuffers._gather

        def watched(unit: UnitBuffers, *args: Any) -> Work:
            work = gather(unit, *args)
            self.memory_of[unit] = self.device.now
            return Work(lambda: (self._wait(unit), work.wait())[-1])

        with mock.patch.object(UnitBuffers, "_gather", watched):
            yield

    def _wait(self, unit: UnitBuffers) -> None:
        assert self.device.now is self.memory_of[unit]  # memory that is freed meanwhile is of that stream too
        self.complete[unit] = object()
        self.device.now.behind.add(self.complete[unit])

    def use(self, unit: int, stream: int) -> None:
        buffers, now = self.buffers[unit], self.device.streams[stream]
        with self.device.on(now):
            memory = self.session.data(buffers, 0).data_ptr()
        assert self.complete[buffers] in now.behind
        assert now is self.memory_of[buffers] or now in self.device.recorded[memory]


@given(
    uses=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([NO_PASS, 1, 2])), max_size=30),
    reshard=st.booleans(),
)
@some_laws
def test_no_stream_uses_a_unit_before_it_is_there_or_after_its_memory_is_given_away(
    uses: list[tuple[int, int, int]], reshard: bool
) -> None:
    device = Device(3)
    with device.at_work() as streams:
        units = Units(device, streams, 4, reshard_after_forward=reshard)
        with units.watched():
            for unit, stream, number in uses:
                with mock.patch.object(session, "backward_pass", return_value=number):
                    units.use(unit, stream)
