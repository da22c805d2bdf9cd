"""Live bytes, counted and not sampled: every allocation and every free of torch's CPU allocator, kernels' own included.

The allocator reports each one to the profiler, and so nothing is missed between two looks. Results of gathers that the
ranks of a host share, whole on each of them, are counted as well. What was allocated before
counting began is not known, and its free is not reported: count from before the first tensor of interest. Nor are
frees by gloo's threads, see :func:`settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from functorch_shard.communication import process_group
from functorch_shard.communication.backend import Work
from functorch_shard.gloo.backend import Call
from functorch_shard.gloo.shared_memory import Region

_MEMORY, _MARK, _SHARED = "[memory]", "live_bytes: ", "live_bytes_shared: "


@dataclass
class LiveBytes:
    """Count inside a ``with`` block; afterwards ask by the marks that were set there."""

    _profile: Any = None
    _history: list[tuple[str, int]] = field(default_factory=list)  # what happened, and the live bytes after it
    _shared: Any = field(default_factory=ExitStack)

    def __enter__(self) -> LiveBytes:
        self._shared.enter_context(_shared_results_reported())
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True).__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        self._shared.close()
        live = 0
        for event in sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            name = event.name()
            if name == _MEMORY or name.startswith((_MARK, _SHARED)):
                live += event.nbytes() if name == _MEMORY else 0
                live += int(name.removeprefix(_SHARED)) if name.startswith(_SHARED) else 0
                self._history.append((_MEMORY if name.startswith(_SHARED) else name.removeprefix(_MARK), live))
        self._profile = None

    def mark(self, name: str) -> None:
        """Name this moment; each name once."""
        with record_function(_MARK + name):
            pass

    def at(self, mark: str) -> int:
        """Bytes that are live there and were not when counting began."""
        return self.curve(mark, mark)[0]

    def peak(self, first: str, last: str) -> int:
        """The most bytes that are live at any moment from ``first`` to ``last``."""
        return max(self.curve(first, last))

    def growth(self, first: str, last: str) -> int:
        """The most bytes that are live at any moment from ``first`` to ``last`` and were not at ``first``."""
        return self.peak(first, last) - self.at(first)

    def allocations(self, first: str, last: str) -> list[int]:
        """What was allocated from ``first`` to ``last``, in bytes each, whether it was freed again or not."""
        return [after - before for before, after in pairwise(self.curve(first, last)) if after > before]

    def curve(self, first: str, last: str) -> list[int]:
        """Live bytes at ``first`` and after each allocation, free and mark up to ``last``."""
        names = [name for name, _ in self._history]
        assert names.count(first) == names.count(last) == 1
        return [live for _, live in self._history[names.index(first) : names.index(last) + 1]]


@contextmanager
def _shared_results_reported() -> Iterator[None]:
    """Show the profiler when this rank has, and lets go of, a result that ranks share."""
    then, free, held = Call.then, Region.free, dict[Region, int]()

    def then_seen(self: Call, finish: Callable[[], Tensor]) -> Work:
        region, op = self.region, self.op

        def seen() -> Tensor:
            result = finish()
            if region and op.transient:
                held[region] = result.nbytes
                report(result.nbytes)
            return result

        return then(self, seen)

    def free_seen(self: Region) -> None:
        report(-held.pop(self, 0))
        free(self)

    def report(nbytes: int) -> None:
        with record_function(f"{_SHARED}{nbytes}"):
            pass

    with patch.object(Call, "then", then_seen), patch.object(Region, "free", free_seen):
        yield


def settle() -> None:
    """From now on every collective of this process ends only when gloo's threads have let go of what it moved.

    They do so a moment after the message was waited for. Whether a buffer that is dropped within that moment is freed
    here or there, now or then, is up to the scheduler, and frees on their threads are not reported. An all-gather of a
    few bytes never settles: plan before, and shard a mapping, of which nothing is compared.
    """
    wait, gather, moved = Work.wait, process_group._gather_into, {}

    def gather_seen(out: Tensor, x: Tensor, **options: Any) -> Any:
        work = gather(out, x, **options)
        moved[id(work)] = out, x
        return work

    def wait_settled(self: Work) -> Tensor:
        small = [x for handle in self._handles for x in moved.pop(id(handle), ())]
        under_way = any(not isinstance(handle, Call) or handle.works for handle in self._handles)
        result = wait(self)
        while under_way and _uses(result) > 1:
            pass
        while any(_uses(x) > 1 or x._use_count() > 1 for x in small):
            pass
        return result

    Work.wait = wait_settled
    process_group._gather_into = gather_seen


def _uses(x: Tensor) -> int:
    """Of the memory of ``x``, by tensors: the count has one more, of what asks."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1
