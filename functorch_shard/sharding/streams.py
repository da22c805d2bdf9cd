"""Streams of a device: what is made on one is waited for on another, and its memory outlives its use there.

A kernel runs after those that were put on its stream before it, and concurrently with those of other streams. A
gathered buffer may be used on any stream: it is finished on the stream that its gather was started on, which all of its
memory is from, an event marks when it is complete, and every other stream waits for that event once.
``record_stream`` reports such a stream to the allocator, so that freed memory is not reused before the stream is done.
Copies of pinned memory have a stream of their own, on which no kernel waits for them and they wait for no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..communication.backend import Work


@dataclass(frozen=True)
class Streams:
    """The streams of a device: which is current, how to make one so for a while, and the one for copies."""

    current: Callable[[], Any]
    on: Callable[[Any], AbstractContextManager[Any]]
    copies: Callable[[], Any] = lambda: None

    def start_copy(self, x: Tensor, out: Tensor) -> Work:
        """Copy ``x`` of the device to ``out``, pinned memory; the host waits for it when it waits for the result."""
        made = RecordedEvent(self)
        with self.on(self.copies()):
            made.take([x])
            out.copy_(x, non_blocking=True)
            done = self.current().record_event()

        def copied() -> Tensor:
            done.synchronize()
            return out

        return Work(copied)


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of ``device``, or None if it has none: it does everything in order."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if not hasattr(module, "current_stream"):
        return None
    return Streams(lambda: module.current_stream(device), module.stream, cache(lambda: torch.Stream(device)))


class RecordedEvent:
    """An event on the current stream, after all that it has to do so far; and the streams that wait for it already."""

    __slots__ = ("_event", "_known", "_streams")

    def __init__(self, streams: Streams) -> None:
        stream = streams.current()
        self._streams, self._known, self._event = streams, {stream}, stream.record_event()

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Let the current stream use ``tensors``, which were made before the event."""
        stream = self._streams.current()
        if stream not in self._known:
            stream.wait_event(self._event)
            for x in tensors:
                x.record_stream(stream)
            self._known.add(stream)
