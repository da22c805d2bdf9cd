"""Threads that take turns: one runs at a time, until it ends or waits for the others.

The order of turns depends on nothing but the program: the first thread that can go on is the next. So whatever ranks
in threads do to what they share, they do in the same order in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from threading import Event, Lock, Thread
from typing import Protocol

from ..torch_internals.taking_turns import OwnState


class Awaited(Protocol):
    """What a thread waits for."""

    @property
    def is_ready(self) -> bool: ...

    def __str__(self) -> str: ...


class Turns:
    """Runs one function in each of several threads, in turns.

    Args:
        states: what each of them has for itself, in the order of the threads.
    """

    def __init__(self, states: Sequence[OwnState]) -> None:
        self._states = states
        self._locks = [Lock() for _ in states]  # a thread whose turn it is not waits to acquire its lock
        self._awaited: dict[int, Awaited] = {}
        self._ended: set[int] = set()
        self._errors: list[tuple[int, BaseException]] = []
        self._all_ended = Event()
        self.failure = ""  # why no thread can wait any more

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run all of them to their ends; raise the first error of any."""
        for lock in self._locks:
            lock.acquire()
        threads = [
            Thread(target=copy_context().run, args=(self._run, i, body), name=f"simulated rank {i}", daemon=True)
            for i, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self._locks[0].release()
        try:
            self._all_ended.wait()
        except BaseException as error:  # an interrupt; the threads end at their next collective
            self.failure = self.failure or f"interrupted by {type(error).__name__}"
            self._all_ended.wait()
            raise
        for thread in threads:
            thread.join()
        if self._errors:
            rank, error = self._errors[0]
            self._errors.clear()
            try:
                raise _with_note(error, f"raised by rank {rank} of {len(bodies)} simulated ones")
            finally:
                del error  # it refers to this frame

    def wait(self, rank: int, awaited: Awaited) -> None:
        """Called by the thread of ``rank``: return when ``awaited`` is ready; others have their turns before."""
        self._awaited[rank] = awaited
        following = self._next()
        if following != rank:
            self._states[rank].end_turn()
            self._pass_to(following)
            self._locks[rank].acquire()
            self._states[rank].begin_turn()
        del self._awaited[rank]
        if not awaited.is_ready:
            raise RuntimeError(f"{self.failure}\nRank {rank} waits for {awaited}.")

    def _run(self, rank: int, body: Callable[[], None]) -> None:
        self._locks[rank].acquire()
        try:
            with self._states[rank].running():
                body()
        except BaseException as error:
            self._errors.append((rank, error))
            self.failure = self.failure or f"rank {rank} raised {type(error).__name__}: {error}"
        self._ended.add(rank)
        self._pass_to(self._next())

    def _pass_to(self, rank: int | None) -> None:
        if rank is None:
            self._all_ended.set()
        else:
            self._locks[rank].release()

    def _next(self) -> int | None:
        """The first that can go on; all that wait can, to raise, where otherwise none could."""
        left = [rank for rank in range(len(self._locks)) if rank not in self._ended]
        able = [rank for rank in left if self.failure or rank not in self._awaited or self._awaited[rank].is_ready]
        if left and not able:
            self.failure, able = self._explained(), left
        return min(able, default=None)

    def _explained(self) -> str:
        lines = [f"  rank {rank} waits for {self._awaited[rank]}" for rank in sorted(self._awaited)]
        lines += [f"  rank {rank} returned" for rank in sorted(self._ended)]
        return "\n".join(["simulated ranks wait for each other, and none can go on:", *lines, ADVICE])


def _with_note(error: BaseException, note: str) -> BaseException:
    add_note = getattr(error, "add_note", None)
    if add_note:
        add_note(note)
    elif error.__cause__ is None:  # Python 3.10
        error.__cause__ = RuntimeError(note)
    return error


ADVICE = (
    "All ranks must issue the same collectives in the same order: look for a branch, a loop or an early return that "
    "depends on the rank or its data."
)
