"""The collectives of one rank, whatever other threads, signals and the garbage collector do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from functorch_shard.communication import Collective, Work
from functorch_shard.gloo.backend import INTERRUPTED, Call, Guard

NUM_CALLS = 3


class Interrupted:
    """What was sent is there at once. At one moment another thread runs."""

    def __init__(self, moment: str, other: Callable[[], None]) -> None:
        self._moment, self._other = moment, other

    def get_future(self) -> Interrupted:
        return self

    def done(self) -> bool:
        return self._at("done")

    def wait(self) -> bool:
        return self._at("wait")

    def _at(self, moment: str) -> bool:
        if moment == self._moment:
            self._moment = "never again"
            self._other()
        return True


class Owner:
    """A mesh, while it lives."""


class OneRank(Guard):
    """The guard of a single rank, whose envelopes come back to it."""

    def __init__(self, moment: str = "never", num_waited: int = 0, owner: Any = None) -> None:
        super().__init__(None, 1, owner or Owner())
        self.exchange: Any = self._exchange
        self._num_waited, self._moment, self.works = num_waited, moment, list[Work]()

    def _exchange(self, got: Tensor, sent: Tensor) -> Any:
        got.copy_(sent)
        moment, self._moment = self._moment, "never"
        return Interrupted(moment, self._other)

    def _other(self) -> None:
        for work in self.works[: self._num_waited]:
            work.wait()

    def next(self, *messages: Any) -> Call:
        call = self.call(Collective("psum", "shard", self.number + 1, torch.float32), self.number + 1)
        call.works = [*messages]
        return call

    def start(self, *messages: Any) -> Work:
        (call := self.next(*messages)).post()
        return call.then(lambda: torch.empty(0))


@pytest.mark.parametrize("moment", ["done", "wait", "never"])
@pytest.mark.parametrize("num_waited", [NUM_CALLS, NUM_CALLS - 1])
def test_another_thread_may_wait_for_calls_while_the_guard_looks_at_them(moment: str, num_waited: int) -> None:
    guard = OneRank(moment, num_waited)
    calls = list[Call]()
    for number in range(1, NUM_CALLS + 1):
        calls.append(Call(guard, Collective("psum", "a", number, torch.int8), number))
        calls[-1].post()
        guard.works.append(calls[-1].then(lambda: torch.empty(0)))
    if num_waited == NUM_CALLS:
        guard.next()
    guard.verify(calls[-1])
    assert all(call.verified for call in calls)
    assert not guard.unverified


class Message:
    """One that takes until ``sent``."""

    def __init__(self) -> None:
        self.sent, self.waited = Event(), Event()

    def wait(self) -> None:
        self.sent.wait()
        self.waited.set()


def test_what_is_abandoned_is_waited_for_by_the_next_collective_and_its_memory_used_again() -> None:
    guard, message = OneRank(), Message()
    guard.start(message)
    message.sent.set()
    assert not message.waited.is_set()
    guard.next()
    assert message.waited.is_set()
    assert (len(guard.abandoned), len(guard.free)) == (0, 4)


def fails(*_: Any) -> None:
    raise MemoryError


def test_after_an_exception_while_something_is_sent_every_collective_is_refused() -> None:
    guard = OneRank()
    guard.exchange = fails
    with pytest.raises(MemoryError):
        guard.next().post()
    with pytest.raises(RuntimeError) as refused:
        guard.next().post()
    assert str(refused.value) == INTERRUPTED


def test_two_threads_that_begin_collectives_at_the_same_time_are_refused() -> None:
    guard = OneRank()
    first, second = guard.next(), guard.next()
    first.post()
    with pytest.raises(RuntimeError, match="two threads"):
        second.post()
