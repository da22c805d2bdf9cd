"""Progress of a command on a terminal: one line, after a second, which is cleared when the command is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TextIO

Advance = Callable[[int], None]
AFTER, PERIOD = 1.0, 0.2  # seconds until the line is there, and between two states of it
_CLEAR = "\r\x1b[K"


def nothing(_: int) -> None:
    """An ``Advance`` of which nobody sees anything."""


@contextmanager
def progress(what: str, total: int = 0, text: Callable[[int], str] = str, unit: str = "") -> Iterator[Advance]:
    """Show how long ``what`` takes, and how much of ``total`` is done, if standard error is a terminal.

    Args:
        what: the name of the command.
        total: what there is to do; 0 if it is not known.
        text: formats ``total`` and what is done.
        unit: what is counted, if ``text`` does not say it.

    Returns:
        A function that is called with what was done since its last call.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield nothing
        return
    done, ended = [0], Event()

    def advance(amount: int) -> None:
        done[0] += amount

    def state(seconds: float) -> str:
        part = f"{text(done[0])} of {text(total)} {unit}".rstrip() + ", " if total else ""
        return f"{what}: {part}{seconds:.0f} s"

    thread = Thread(target=_draw, args=(stream, state, ended), daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()


def _draw(stream: TextIO, state: Callable[[float], str], ended: Event) -> None:
    began = time.monotonic()
    if ended.wait(AFTER):
        return
    while True:
        stream.write(_CLEAR + state(time.monotonic() - began))
        stream.flush()
        if ended.wait(PERIOD):
            break
    stream.write(_CLEAR)
    stream.flush()
