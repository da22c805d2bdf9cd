"""A collective that was issued and has a result later.

Note [Abandoned]: what nobody waits for is freed anywhere, also by the garbage collector in the middle of a C++ function
that holds a lock. Gloo's start of a collective is one: gloo's threads need its lock to end another collective, and who
waits for that one there waits for ever. So a collective that blocks the host is handed on, and waited for in a later
call. Waiting for one on CUDA does not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor


class Work:
    """A collective under way: :meth:`wait` waits for it and gives its result, once.

    On CUDA waiting orders the current stream behind the collective and does not stop the host.

    Args:
        finish: gives the result, after all ``handles`` were waited for.
        handles: what is under way, each with a ``wait()``, such as ``torch.distributed``'s.
        abandon: called where the result is not waited for, instead of waiting. It must not wait: see Note [Abandoned].
    """

    __slots__ = ("_abandon", "_finish", "_handles")

    def __init__(
        self, finish: Callable[[], Tensor], handles: Sequence[Any] = (), abandon: Callable[[], None] | None = None
    ) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._handles, self._abandon = handles, abandon

    def wait(self) -> Tensor:
        """Wait for the collective and return its result; once."""
        handles, finish = self._handles, self._finish
        assert finish is not None, "a Work is waited for once"
        self._handles, self._finish = (), None  # what was sent is let go with the closure
        try:
            for handle in handles:
                handle.wait()
            return finish()
        except BaseException:  # also of a signal handler, between two waits
            if self._abandon:
                self._abandon()
            raise

    def then(self, change: Callable[[Tensor], Tensor]) -> Work:
        """This work, whose result is ``change`` of the result."""
        return Work(lambda: change(self.wait()))

    def __del__(self) -> None:
        # The result is not needed (a part of the model was skipped, or an error was thrown): other ranks still send it,
        # and its memory must outlive that.
        handles = getattr(self, "_handles", ())  # a compiler that traces may make one without __init__
        if handles and self._abandon:
            self._abandon()
            return
        wait_for_all(handles)


def wait_for_all(handles: Sequence[Any]) -> None:
    """Wait for what is under way, whether it fails or not."""
    for handle in handles:
        with suppress(RuntimeError):
            handle.wait()


class Finished(Work):
    """A result that is there already."""

    __slots__ = ()

    def __init__(self, result: Tensor) -> None:
        super().__init__(lambda: result)

    def then(self, change: Callable[[Tensor], Tensor]) -> Work:
        return Finished(change(self.wait()))
