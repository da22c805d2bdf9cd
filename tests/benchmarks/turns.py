"""Contenders in turns: none of them has all of a noisy minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each call of each contender, without the first ``warm_up`` ones."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            found[name].append(milliseconds(call))
    return {name: times[warm_up:] for name, times in found.items()}
