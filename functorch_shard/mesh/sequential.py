"""One function as every simulated rank, one rank after the other: arguments, results and random numbers by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from ..communication.collective import Collective, RecordMode
from ..communication.process_group import as_bytes
from ..communication.sequential import Run, SequentialBackend
from ..communication.simulated_group import default_group
from ..containers import opened, place, refuse_opaque
from ..errors import reject
from ..torch_internals.lowering import in_forward_mode
from ..torch_internals.rank_threads import around_threads, inherited, process_settings
from ..torch_internals.tensors import version_of
from ..torch_internals.transforms import being_traced, in_transform
from .axes import coordinate_of
from .rank_dims import LIST, has_lists, mapped_call
from .shared_modules import SharedModules

_AS_LIST = (
    f"Tensors of one shape are stacked, everything else has to be the same on every rank. out_dims={LIST!r}, for all "
    "results or for one, returns a list with the value of each rank."
)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


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
    sizes, running = tuple(axis.size for axis in axes), axes[0].running
    coordinates = [dict(zip([axis.axis for axis in axes], each, strict=True)) for each in product(*map(range, sizes))]

    @wraps(fn)
    def every_rank(*args: Any, **kwargs: Any) -> Any:
        _refuse(axes[0])
        calls = [_Arguments(args, kwargs, in_dims, rank, sizes) for rank in range(len(coordinates))]
        numbers = _RandomNumbers(randomness, device, len(calls))
        modules = SharedModules(lambda: run.rank)
        entered, settings, results = inherited(device), process_settings(), [None for _ in calls]

        def begin(rank: int) -> None:
            numbers.begin(rank)
            modules.begin(rank)

        def end(rank: int) -> None:
            _refuse_settings(settings)
            modules.end(rank)
            numbers.end(rank)

        def body(rank: int) -> None:
            args, kwargs = calls[rank].tree()
            with entered(() if rank == 0 else (RecordMode,)):  # collectives of one rank are counted
                results[rank] = opened(fn(*args, **kwargs))
                run.gathered[rank].check()
            numbers.end(rank)

        run = running.run = Run(coordinates, begin, end)
        try:
            with modules.watched(), default_group(len(calls), lambda: run.rank, partial(_over_all, run)):
                around_threads(lambda: run.all_ranks(body))
        finally:
            running.run = None
            numbers.restore()
        numbers.go_on()
        for call in calls:
            call.write_back()
        return _combined(out_dims, results, sizes)

    return every_rank


def _over_all(run: Run, kind: str, x: Tensor) -> Tensor:
    """The result of a collective of all ranks, along dim 0."""
    axis = ",".join(run.coordinates[0])
    return run.issue(axis, Collective(kind, axis, x.numel(), x.dtype), x).wait()


def _refuse(axis: SequentialBackend) -> None:
    if axis.in_rank:
        raise RuntimeError("spmd: this code already runs as one rank of the same mesh; call the undecorated function.")
    if in_transform() or in_forward_mode() or being_traced() or torch.compiler.is_compiling():
        raise NotImplementedError(
            "spmd: simulated ranks of kind 'sequential' run in threads of their own, which a transform of torch.func, "
            "fs.compile or torch.compile around them does not reach. Transform or compile inside of the function: "
            "mesh.spmd(fs.grad(loss)); or use simulated_mesh(..., kind='batched')."
        )


def _refuse_settings(before: dict[str, object]) -> None:
    changed = [name for name, value in process_settings().items() if value != before[name]]
    if changed:
        raise RuntimeError(
            f"spmd: a simulated rank waits for a collective inside of {', '.join(changed)}, which torch keeps for the "
            "whole process, so the other ranks would be inside of it too. Set it around mesh.spmd; trace, and cache "
            "parametrizations, where nothing is communicated."
        )


class _RandomNumbers:
    """The random numbers of all ranks, and of the process afterwards.

    ``"same"``: every rank starts where the process is, and the process goes on where rank 0 ended. ``"different"``:
    each starts at a seed that depends on its number and on where the process is, which goes on by one number if any of
    them drew.
    """

    def __init__(self, randomness: str, device: torch.device, num_ranks: int) -> None:
        self._randomness, self._devices = randomness, [torch.device("cpu")]
        self._states: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]]
        self._states = [(torch.get_rng_state, torch.set_rng_state)]
        module = torch.get_device_module("cpu" if device.type == "meta" else device)
        if hasattr(module, "default_generators"):  # others draw from that of the CPU
            self._devices.append(device)
            self._states.append((partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)))
        self._before = self._read()
        self._of_ranks = [self._seeded(r) if randomness == "different" else self._before for r in range(num_ranks)]
        self._first = [*self._of_ranks]

    def begin(self, rank: int) -> None:
        self._write(self._of_ranks[rank])

    def end(self, rank: int) -> None:
        self._of_ranks[rank] = self._read()

    def restore(self) -> None:
        self._write(self._before)

    def go_on(self) -> None:
        pairs = zip(self._first, self._of_ranks, strict=True)
        if all(torch.equal(x, y) for before, after in pairs for x, y in zip(before, after, strict=True)):
            return
        if self._randomness == "error":
            raise RuntimeError("spmd: random numbers were drawn, with randomness='error'.")
        if self._randomness == "same":
            self._write(self._of_ranks[0])
        else:
            for device in self._devices:
                torch.rand((), device=device)

    def _read(self) -> list[Tensor]:
        return [read() for read, _ in self._states]

    def _write(self, values: Sequence[Tensor]) -> None:
        for (_, write), value in zip(self._states, values, strict=True):
            write(value)

    def _seeded(self, rank: int) -> list[Tensor]:
        digest = blake2b(as_bytes(self._before[0]) + rank.to_bytes(8, "big"), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        return [torch.Generator(device).manual_seed(seed).get_state() for device in self._devices]


class _Arguments:
    """The arguments of one rank. Tensors are at the start of memory of their own, as those of a process."""

    def __init__(self, args: Any, kwargs: Any, in_dims: Any, rank: int, sizes: tuple[int, ...]) -> None:
        if has_lists(in_dims):
            in_dims = (in_dims,) * len(args) if isinstance(in_dims, str) else in_dims
            pairs = list(zip(in_dims, args, strict=True))
            args = tuple(_own_value(x, rank, prod(sizes)) if dim == LIST else x for dim, x in pairs)
            in_dims = tuple(None if dim == LIST else dim for dim in in_dims)
        call = mapped_call(args, kwargs, in_dims, sizes)
        self._leaves, self._treedef = [*call.leaves], call.treedef
        self._rows: list[
            tuple[Tensor, Tensor, int]
        ] = []  # the place of a row, the row, and how often it was written to
        for i, start in call.starts.items():
            self._leaves[i] = self._row(call.leaves[i], start, coordinate_of(rank, sizes))

    def tree(self) -> Any:
        return optree.tree_unflatten(self._treedef, self._leaves)

    def write_back(self) -> None:
        with torch.no_grad():
            for there, row, version in self._rows:
                if version_of(row) != version:
                    there.copy_(row)

    def _row(self, x: Tensor, start: int, coordinate: tuple[int, ...]) -> Tensor:
        for i in coordinate:
            x = x.select(start, i)
        if x.requires_grad or x.is_inference():
            return x
        is_kept = x.device.type == "cpu" and (x.untyped_storage().filename or x.is_pinned())  # what memory it is counts
        with torch.inference_mode(False):  # an inference tensor would count no writes
            row = x.data if is_kept else x.detach().clone()
        self._rows.append((x, row, version_of(row)))
        return row


def _own_value(x: Any, rank: int, num_ranks: int) -> Any:
    if not isinstance(x, (list, tuple)) or len(x) != num_ranks:
        got = f"{len(x)} values" if isinstance(x, (list, tuple)) else f"a {type(x).__name__}"
        raise ValueError(f"spmd: in_dims={LIST!r}: got {got}, expected a list of {num_ranks} values, one a rank")
    return x[rank]


def _combined(dims: Any, results: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    """The results of all ranks as one, or in a list where ``dims``, a prefix of their tree, ask for lists."""
    paths, leaves, prefix = optree.tree_flatten_with_path(opened(dims, always=True), none_is_leaf=True)
    try:
        by_rank = [prefix.flatten_up_to(result) for result in results]
    except (ValueError, TypeError) as error:
        raise ValueError(f"spmd: out_dims={dims!r} does not match what the ranks returned: {error}") from None
    parts = zip(paths, leaves, zip(*by_rank, strict=True), strict=True)
    closed = lambda x: optree.tree_map(lambda leaf: leaf, x, none_is_leaf=True)  # noqa: E731
    return closed(
        prefix.unflatten(
            [
                [*map(closed, of_ranks)] if dim == LIST else _stacked(path, dim, of_ranks, sizes)
                for path, dim, of_ranks in parts
            ]
        )
    )


def _stacked(path: Any, dim: int | None, results: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    for result in results:
        refuse_opaque("spmd", result, "the result")
    flat = [optree.tree_flatten(result, none_is_leaf=True) for result in results]
    treedef = flat[0][1]
    differs = [f"rank {rank}: {other}, rank 0: {treedef}" for rank, (_, other) in enumerate(flat) if other != treedef]
    reject("spmd: results have different structures", differs, _AS_LIST)
    of_leaves = list(zip(*(leaves for leaves, _ in flat), strict=True))
    wrong = [(place((*path, *end)), _forms(xs)) for end, xs in zip(treedef.paths(), of_leaves, strict=True)]
    lines = [f"the result{where}: differs between ranks: {_each(forms)}" for where, forms in wrong if len({*forms}) > 1]
    reject("spmd", lines, _AS_LIST)
    made = [_whole(xs, dim, sizes) if isinstance(xs[0], Tensor) else xs[0] for xs in of_leaves]
    return optree.tree_unflatten(treedef, made)


def _forms(xs: Sequence[Any]) -> list[Any]:
    """What has to be the same of the values of all ranks."""
    if not any(isinstance(x, (Tensor, *_NUMBERS)) for x in xs):
        return []
    return [(tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in xs]


def _each(values: Sequence[Any]) -> str:
    texts = [f"rank {rank}: {value}" for rank, value in enumerate(values)]
    return ", ".join(texts[:4] + ["..."] * (len(texts) > 4))


def _whole(xs: Sequence[Tensor], dim: int | None, sizes: tuple[int, ...]) -> Tensor:
    if dim is not None:
        start = dim if dim >= 0 else xs[0].ndim + dim + 1
        rows = torch.stack([*xs]).unflatten(0, sizes)
        return rows.movedim(tuple(range(len(sizes))), tuple(range(start, start + len(sizes))))
    bits = [x.detach() for x in xs]
    if not all(bool(((x == bits[0]) | (x != x) & (bits[0] != bits[0])).all()) for x in bits[1:]):
        raise ValueError(
            "spmd: out_dims=None is for results that are the same on every rank, as psum and all_gather return them; "
            f"a result of shape {tuple(xs[0].shape)} differs. Combine it with a collective, or use out_dims=0."
        )
    return xs[0]
