"""A line of collectives, whatever other threads and the garbage collector do meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from functorch_shard.communication.headers import INTERRUPTED, Call, Line
from functorch_shard.communication.work import Work

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


class OneRank(Line):
    """The line of a single rank, whose envelopes come back to it."""

    def __init__(self, num_waited: int = 0) -> None:
        super().__init__(None, 1)
        self._num_waited, self.moment, self.calls = num_waited, "never", list[Call]()

    def exchange(self, sent: Tensor, got: Tensor) -> Any:
        got.copy_(sent)
        return Interrupted(self.moment, self._other)

    def sent(self, call: Call) -> None:
        super().sent(call)
        self.calls.append(call)

    def _other(self) -> None:
        for call in self.calls[: self._num_waited]:
            call.wait()
            call.close()


@pytest.mark.parametrize("moment", ["done", "wait", "never"])
@pytest.mark.parametrize("num_waited", [NUM_CALLS, NUM_CALLS - 1])
def test_another_thread_may_wait_for_calls_while_the_line_looks_at_them(moment: str, num_waited: int) -> None:
    line = OneRank(num_waited)
    for i in range(NUM_CALLS):
        line.moment = "never" if i else moment
        Call(line, i + 1, f"number {i}").post()
    if num_waited == NUM_CALLS:
        line.open("another one")
    line.calls[-1].wait()
    assert all(call.verified for call in line.calls)
    assert [*line._history] == [f"number {i}" for i in range(NUM_CALLS)]


class Message:
    """One that takes until ``sent``."""

    def __init__(self) -> None:
        self.sent, self.waited = Event(), Event()

    def wait(self) -> None:
        self.sent.wait()
        self.waited.set()


def test_what_is_abandoned_is_waited_for_by_the_next_collective_and_its_memory_used_again() -> None:
    line, message = OneRank(), Message()
    call = line.open("one")
    call.works = [message]
    free = len(line._free)
    call.post()
    call.abandon()
    assert not message.waited.is_set()
    message.sent.set()
    line.open("another one")
    assert message.waited.is_set()
    assert (len(line.abandoned), len(line._free)) == (0, free)


def test_what_is_abandoned_is_not_waited_for_before_all_ranks_have_begun_it() -> None:
    line, message = OneRank(), Message()
    late = line.open("one")
    late.works = [message]
    line.abandoned.append(late)
    line.open("another one")
    assert [*line.abandoned] == [late]
    line.abandoned.clear()


def test_what_is_still_to_be_sent_outlives_its_line() -> None:
    line, message = OneRank(), Message()
    call = line.open("one")
    call.works = [message]
    call.post()
    call.abandon()
    del line, call
    gc.collect()
    assert not message.waited.is_set()
    message.sent.set()
    assert message.waited.wait(60)


class Fails:
    """A message during whose wait a signal handler raises, once."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt


def test_what_is_left_of_a_wait_that_a_signal_interrupts_is_waited_for_by_the_next_collective() -> None:
    line, first, second = OneRank(), Fails(), Fails()
    second.waits = 1  # does not raise
    call = line.open("one")
    call.works = [first, second]
    call.post()
    with pytest.raises(KeyboardInterrupt):
        Work(lambda: torch.ones(1), [call], call.abandon).wait()
    assert (first.waits, second.waits) == (1, 1)
    line.open("another one")
    assert (first.waits, second.waits) == (1, 2)


def test_an_exception_before_anything_is_sent_changes_nothing() -> None:
    line = OneRank()
    line.open("one")  # and what it is to send does not fit into memory
    assert line.open("one again").number == 1


@pytest.mark.parametrize("begins_again", [True, False])
def test_after_an_exception_while_something_is_sent_every_collective_is_refused(begins_again: bool) -> None:
    line = OneRank()
    line.open("one").begin()
    if begins_again:
        with pytest.raises(RuntimeError) as refused:
            line.open("another one")
        assert str(refused.value) == INTERRUPTED
    else:  # it is another thread that is at it
        with pytest.raises(RuntimeError, match="two threads"):
            Call(line, 2, "another one").post()


def test_two_threads_that_open_collectives_at_the_same_time_are_refused() -> None:
    line = OneRank()
    first, second = line.open("of one thread"), line.open("of another thread")
    first.post()
    with pytest.raises(RuntimeError, match="two threads"):
        second.post()
