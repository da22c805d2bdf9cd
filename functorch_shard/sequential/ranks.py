"""Simulated ranks of kind ``"sequential"``: their axes, and ``spmd``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..communication.backend import Axis, Backend, Finished, Work
from ..communication.collective import Collective, RecordMode
from ..communication.writes import writes_refused
from ..containers import opened, place, refuse_opaque
from ..errors import reject
from ..mesh.simulated import LIST, NESTED, OUTSIDE, Simulated, default_group, mapped_call, of_all_ranks, placed
from ..running import running
from ..torch_internals.autograd import NO_PASS, backward_pass, being_traced, in_forward_mode, in_transform
from ..torch_internals.satellites import around_threads, inherited
from ..torch_internals.tensors import version_of
from .turns import Run

_AS_LIST = (
    f"Tensors of one shape are stacked, everything else has to be the same on every rank. out_dims={LIST!r} returns a "
    "list with the result of each rank."
)
_AROUND = (
    "spmd: simulated ranks of kind 'sequential' run in threads of their own, which a transform of torch.func, "
    "fs.compile or torch.compile around them does not reach. Transform or compile inside of the function: "
    "mesh.spmd(fs.grad(loss)); or use simulated_mesh(..., kind='batched')."
)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class SequentialBackend(Backend):
    """An axis of simulated ranks that run one after the other; a joint one has the names of its axes: ``"dp,cp"``."""

    axis: str
    size: int
    ranks: SequentialRanks = field(repr=False)

    @property
    def simulated(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Outside of ``spmd`` values are those of all ranks, inside of it this rank's."""
        return self.ranks.run is None

    @property
    def in_rank(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ranks.run is not None

    def index(self) -> int:
        run = self._run()
        return run.members(self.axis).index(run.rank)

    def place(self) -> tuple[None, None]:
        self._run()
        return None, None

    def ready(self) -> object:
        run = self._run()
        return run, run.rank

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if self.ranks.run is None and backward_pass() == NO_PASS:  # of values of all ranks, outside of spmd
            return Finished(of_all_ranks(op, x, self.size))
        return self._run().issue(self.axis, op, x)

    def _run(self) -> Run:
        if self.ranks.run is None:
            raise RuntimeError(f"{OUTSIDE.format(self.axis)} What they computed is differentiated inside too.")
        return self.ranks.run


class SequentialRanks(Simulated):
    """The ranks of one mesh; any thread may ask for their run, also one of autograd's."""

    kind = "sequential"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.run: Run | None = None
        self._sizes = tuple(sizes.values())
        self.axes = tuple(Axis(name, size, SequentialBackend(name, size, self)) for name, size in sizes.items())
        self._coordinates = [dict(zip(sizes, each, strict=True)) for each in product(*map(range, self._sizes))]

    def joint(self, names: Sequence[str]) -> Backend:
        return SequentialBackend(",".join(names), prod(axis.size for axis in self.axes if axis.name in names), self)

    def spmd(
        self, fn: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, device: torch.device
    ) -> Callable[..., Any]:
        """``fn`` once for each rank; tensors are taken apart and stacked, as by vmap."""
        if randomness not in ("different", "same", "error"):
            raise ValueError(f"spmd: randomness: got {randomness!r}, expected 'different', 'same' or 'error'")

        @wraps(fn)
        def every_rank(*args: Any, **kwargs: Any) -> Any:
            if self.run is not None:
                raise RuntimeError(NESTED)
            if in_transform() or in_forward_mode() or being_traced() or torch.compiler.is_compiling():
                raise NotImplementedError(_AROUND)
            call = mapped_call(args, kwargs, in_dims, self._sizes)
            tensors = [(call.leaves[i], start) for i, start in call.starts.items()]
            rows = [[_Row.of(*x, each.values()) for x in tensors] for each in self._coordinates]
            entered, results = inherited(device), [None for _ in rows]

            def body(rank: int) -> None:
                rank_args, rank_kwargs = call.of_rank(row.own for row in rows[rank])
                left_out = () if rank == 0 else (RecordMode,)  # collectives of one rank are counted
                with entered(left_out), running(rank=rank), writes_refused():
                    results[rank] = fn(*rank_args, **rank_kwargs)

            run = self.run = Run(self._coordinates, randomness, device)
            try:
                with default_group(len(rows)):
                    around_threads(lambda: run.all_ranks(body))
            finally:
                self.run = None
            for given, own, version in chain(*rows):
                if own is not given and version_of(own) != version:
                    with torch.no_grad():
                        given.copy_(own)
            if out_dims == LIST:
                return results
            tree, num_axes = _stacked([*map(opened, results)], self._sizes), len(self._sizes)
            return placed(tree, out_dims, num_axes, lambda _, x: _of_all(x, num_axes))

        return every_rank


class _Row(NamedTuple):
    """A tensor of one rank, at the start of memory of its own, as that of a process."""

    given: Tensor
    own: Tensor
    version: int  # how often it was written to

    @staticmethod
    def of(x: Tensor, start: int, coordinate: Iterable[int]) -> _Row:
        for at in coordinate:
            x = x.select(start, at)
        if x.requires_grad or x.is_inference():
            return _Row(x, x, 0)
        is_kept = x.device.type == "cpu" and x.is_pinned()  # what memory it is counts
        with torch.inference_mode(False):  # an inference tensor would count no writes
            own = x.data if is_kept else x.detach().clone()
        return _Row(x, own, version_of(own))


def _stacked(results: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    """The results of all ranks as one: tensors stacked, everything else the same on all of them."""
    for result in results:
        refuse_opaque("spmd", result, "the result")
    flat = [optree.tree_flatten(result, none_is_leaf=True) for result in results]
    treedef = flat[0][1]
    differs = [f"rank {rank}: {other}, rank 0: {treedef}" for rank, (_, other) in enumerate(flat) if other != treedef]
    reject("spmd: results have different structures", differs, _AS_LIST)
    by_leaf = [*zip(*(leaves for leaves, _ in flat), strict=True)]
    lines = [
        f"the result{place(path)}: differs between ranks: "
        + ", ".join(f"rank {r}: {x}" for r, x in enumerate(each[:4]))
        for path, each in zip(treedef.paths(), map(_forms, by_leaf), strict=True)
        if len({*each}) > 1
    ]
    reject("spmd", lines, _AS_LIST)
    return treedef.unflatten(
        [torch.stack(xs).unflatten(0, sizes) if isinstance(xs[0], Tensor) else xs[0] for xs in by_leaf]
    )


def _forms(xs: Sequence[Any]) -> list[Any]:
    """What has to be the same of the values of all ranks."""
    if not any(isinstance(x, (Tensor, *_NUMBERS)) for x in xs):
        return []
    return [(tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in xs]


def _of_all(x: Tensor, num_axes: int) -> Tensor | str:
    """Return the value of all ranks, NaN like NaN."""
    first, *others = x.flatten(0, num_axes - 1).unbind(0)
    same = all(bool(((y == first) | (y != y) & (first != first)).all()) for y in others)
    return first.clone() if same else "has other values on other ranks"
