"""A collective that nobody waits for is verified and closed when it is freed, whatever its line is doing just then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from functorch_shard.communication.headers import Call, Line

NUM_CALLS = 3


class Interrupted:
    """What was sent is there at once. At one moment the garbage collector frees the work of calls."""

    def __init__(self, moment: str, collect: Callable[[], None]) -> None:
        self._moment, self._collect = moment, collect

    def is_completed(self) -> bool:
        return self._at("is_completed")

    def wait(self) -> bool:
        return self._at("wait")

    def _at(self, moment: str) -> bool:
        if moment == self._moment:
            self._moment = "never again"
            self._collect()
        return True


class OneRank(Line):
    """The line of a single rank, whose envelopes come back to it."""

    def __init__(self, num_freed: int) -> None:
        super().__init__(None, 1)
        self._num_freed, self.moment, self.calls = num_freed, "never", list[Call]()

    def send(self, call: Call, sent: Tensor, got: Tensor) -> Any:
        self._unverified.append(call)
        self.calls.append(call)
        got.copy_(sent)
        return Interrupted(self.moment, self._collect)

    def _collect(self) -> None:
        for call in self.calls[: self._num_freed]:
            call.wait()
            call.close()


@pytest.mark.parametrize("moment", ["is_completed", "wait", "never"])
@pytest.mark.parametrize("num_freed", [NUM_CALLS, NUM_CALLS - 1])
def test_calls_may_be_verified_while_the_line_looks_at_them(moment: str, num_freed: int) -> None:
    line = OneRank(num_freed)
    for i in range(NUM_CALLS):
        line.moment = "never" if i else moment
        Call(line, i, f"number {i}").post()
    if num_freed == NUM_CALLS:
        line.open("another one")
    line.calls[-1].wait()
    assert all(call.verified for call in line.calls)
    assert [*line._history] == [f"number {i}" for i in range(NUM_CALLS)]
