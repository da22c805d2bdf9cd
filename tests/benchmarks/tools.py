"""What measurements share: options of a command, contenders in turns, quartiles."""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist


def command_line(doc: str | None, **defaults: Any) -> Namespace:
    """Options of a command by their defaults: a flag, numbers, texts, or lists of those; ``None`` is a text."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        many = isinstance(default, list)
        kind = type(default[0] if many else default) if default is not None else str
        how: Any = {"action": "store_true"} if kind is bool else {"type": kind, "nargs": "*" if many else None}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return parser.parse_args()


def now_on_all_ranks() -> float:
    """Seconds, once all ranks are here: of the slowest one."""
    dist.barrier()
    return time.perf_counter()


def in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0, now: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Milliseconds of each call of each contender, without the first ``warm_up``: none has all of a noisy minute, and
    none always follows the same one."""
    found, names = {name: list[float]() for name in calls}, [*calls]
    for i in range(warm_up + rounds):
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            start = now()
            calls[name]()
            found[name].append(1e3 * (now() - start))
    return {name: times[warm_up:] for name, times in found.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first one, the median and the third one."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high
