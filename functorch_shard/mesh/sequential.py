"""One function as every simulated rank, one rank after the other: arguments and results by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import product
from typing import Any

import torch

from ..communication.collective import RecordMode
from ..communication.sequential import Here, SequentialBackend, SequentialRanks
from ..communication.turns import Turns
from ..communication.writes import Gathered
from ..containers import opened
from ..torch_internals.lowering import in_forward_mode
from ..torch_internals.module_changes import keep_changes
from ..torch_internals.process_settings import keep_what_all_changed
from ..torch_internals.taking_turns import OwnState, taking_turns
from ..torch_internals.thread_state import inherited
from ..torch_internals.transforms import being_traced, in_transform
from .by_rank import RankCall, call_of_rank, combined
from .rank_streams import Streams


def spmd_in_turns(
    fn: Callable[..., Any],
    axes: Sequence[SequentialBackend],
    in_dims: Any,
    out_dims: Any,
    randomness: str,
    device: torch.device,
) -> Callable[..., Any]:
    """``fn`` once for each rank; tensors are taken apart and stacked, as by ``spmd``."""
    if randomness not in ("different", "same", "error"):
        raise ValueError(f"spmd: randomness: got {randomness!r}, expected 'different', 'same' or 'error'")
    sizes = tuple(axis.size for axis in axes)
    coordinates = [dict(zip([axis.axis for axis in axes], each, strict=True)) for each in product(*map(range, sizes))]

    @wraps(fn)
    def every_rank(*args: Any, **kwargs: Any) -> Any:
        _refuse(axes[0])
        calls = [call_of_rank(args, kwargs, in_dims, rank, sizes) for rank in range(len(coordinates))]
        streams = Streams.of(randomness, device, len(coordinates))
        states = [
            OwnState(rank, streams.generators, state, alone=len(coordinates) == 1)
            for rank, state in enumerate(streams.of_ranks)
        ]
        results = _run(fn, axes[0], coordinates, calls, states, streams)
        for call in calls:
            call.count_writes()
        return combined(out_dims, results, calls, sizes)

    return every_rank


def _run(
    fn: Callable[..., Any],
    axis: SequentialBackend,
    coordinates: Sequence[Mapping[str, int]],
    calls: Sequence[RankCall],
    states: Sequence[OwnState],
    streams: Streams,
) -> list[Any]:
    turns = Turns(states)
    ranks = SequentialRanks(turns, coordinates)
    settings, results = inherited(), [None for _ in calls]

    def body(rank: int) -> None:
        here = Here(rank, coordinates[rank], ranks, Gathered())
        axis.running.set(here)  # in a context of this thread alone
        args, kwargs = calls[rank].arguments()
        with settings(() if rank == 0 else (RecordMode,)):  # collectives of one rank are counted
            results[rank] = opened(fn(*args, **kwargs))
            here.gathered.check()

    try:
        with taking_turns():
            turns.run([lambda rank=rank: body(rank) for rank in range(len(calls))])
    except BaseException:
        streams.restore()
        raise
    keep_what_all_changed([state.settings for state in states])
    keep_changes([state.changes for state in states])
    streams.go_on([state.states for state in states])
    return results


def _refuse(axis: SequentialBackend) -> None:
    if axis.running.get() is not None:
        raise RuntimeError("spmd: this code already runs as one rank of the same mesh; call the undecorated function.")
    if in_transform() or in_forward_mode() or being_traced() or torch.compiler.is_compiling():
        raise NotImplementedError(
            "spmd: simulated ranks of kind 'sequential' run in threads of their own, which a transform of torch.func, "
            "fs.compile or torch.compile around them does not reach. Transform or compile inside of the function: "
            "mesh.spmd(fs.grad(loss)); or use simulated_mesh(..., kind='batched')."
        )
