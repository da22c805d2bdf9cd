"""Threads that take turns: one runs at a time, until it ends or waits for a collective.

Then the first rank that can continue does, so the order of turns depends on the program only. The last rank that comes
to a collective computes the results of all. Random numbers are exchanged at turns; whatever else ranks must not share
is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Event, Lock, Thread, get_ident
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..communication.backend import Work
from ..communication.collective import Collective, describe
from ..communication.process_group import as_bytes, in_memory
from ..torch_internals.tensors import parametrizations_are_cached, version_of

_ADVICE = (
    "All ranks must issue the same collectives in the same order: look for a branch, a loop or an early return that "
    "depends on the rank or its data."
)
_BIND = (
    "Simulated ranks share the model, where each real rank has one. Give each rank its own: inside of the function, "
    "fs.bind(model, full)(x) in place of functional_call(model, full, (x,))."
)
_SETTINGS_CHANGED = (
    "spmd: a simulated rank waits for a collective inside of another torch.get_default_dtype(), "
    "torch.nn.attention.sdpa_kernel or torch.nn.utils.parametrize.cached, which hold for the whole process. Set it "
    "around mesh.spmd; cache parametrizations where nothing is communicated."
)


@dataclass
class _Meeting:
    """One collective: what each of its ranks passed, and the results that were not waited for yet."""

    members: Sequence[int]
    name: str
    given: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return len(self.given) == len(self.members)

    def __str__(self) -> str:
        absent = [str(rank) for rank in self.members if rank not in self.given]
        return f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} in its {self.name}"


class Run:
    """One run of a function as every rank, whose ``coordinates`` are by axis."""

    def __init__(self, coordinates: Sequence[Mapping[str, int]], randomness: str, device: torch.device) -> None:
        self.coordinates, self.rank = coordinates, 0
        self._numbers, self._modules = _RandomNumbers(randomness, device, len(coordinates)), _SharedModules()
        self._settings = _settings()
        self._locks = [Lock() for _ in coordinates]  # a thread whose turn it is not waits to acquire its lock
        self._threads: dict[int, int] = {}
        self._waiting: dict[int, _Meeting] = {}  # in the order in which they began to
        self._ended: set[int] = set()
        self._errors: list[tuple[int, BaseException]] = []
        self._all_ended = Event()
        self._failure = ""  # why no rank can communicate any more
        self._issued: dict[tuple[str, int], int] = {}  # how many, by axis and rank
        self._open: dict[tuple[str, Sequence[int], int], _Meeting] = {}

    def all_ranks(self, body: Callable[[int], None]) -> None:
        """Run ``body`` as each rank to its end; raise the first error of any."""
        threads = [
            Thread(target=copy_context().run, args=(self._one, r, body), name=f"simulated rank {r}", daemon=True)
            for r in range(len(self._locks))
        ]
        with self._numbers.exchanged(), self._modules.watched(lambda: self.rank):
            for lock, thread in zip(self._locks, threads, strict=True):
                lock.acquire()
                thread.start()
            self._pass_to(0)
            try:
                self._all_ended.wait()
            except BaseException as error:  # an interrupt; the threads end at their next collective
                self._failure = self._failure or f"interrupted by {type(error).__name__}"
                self._all_ended.wait()
                raise
            for thread in threads:
                thread.join()
            if self._errors:
                rank, error = self._errors[0]
                add_note = getattr(error, "add_note", lambda _: None)  # Python 3.10 has none
                add_note(f"raised by rank {rank} of {len(threads)} simulated ones")
                try:
                    raise error
                finally:
                    self._errors.clear()
                    del error  # it refers to this frame

    def issue(self, axis: str, op: Collective, x: Tensor) -> Work:
        """Start the next collective of the running rank over an axis: the k-th ones of all ranks are one."""
        rank, members = self.rank, self.members(axis)
        if self._failure:
            raise RuntimeError(f"{self._failure}\nRank {rank} cannot issue {op} any more.")
        number = self._issued[axis, rank] = self._issued.get((axis, rank), 0) + 1
        name = describe(op) + ("" if op.law.shape else f" of shape {tuple(x.shape)}")
        meeting = self._open.setdefault((axis, members, number), _Meeting(members, name))
        if name != meeting.name:
            others = ", ".join(map(str, meeting.given))
            self._failure = (
                f"simulated ranks issue different collectives, each as its number {number} over {axis!r}:\n"
                f"  rank {others}: {meeting.name}\n  rank {rank}: {name}\n{_ADVICE}"
            )
            raise RuntimeError(self._failure)
        meeting.given[rank] = in_memory(x, x.dtype)
        if meeting.is_ready:
            del self._open[axis, members, number]
            meeting.results = _results(op, {member: meeting.given[member] for member in members})
        return Work(lambda: self._wait(rank, meeting))

    def members(self, axis: str) -> Sequence[int]:
        """Return the ranks that differ from the running one in their place on the axis only, in its order."""
        names, here = axis.split(","), self.coordinates[self.rank]
        others = {name: at for name, at in here.items() if name not in names}
        alike = [rank for rank, each in enumerate(self.coordinates) if others.items() <= each.items()]
        return tuple(sorted(alike, key=lambda rank: [self.coordinates[rank][name] for name in names]))

    def _one(self, rank: int, body: Callable[[int], None]) -> None:
        self._locks[rank].acquire()
        self._threads[rank] = get_ident()
        try:
            if not self._failure:
                self._numbers.begin(rank)
                body(rank)
                self._numbers.end(rank)
        except BaseException as error:
            self._errors.append((rank, error))
            self._failure = self._failure or f"rank {rank} raised {type(error).__name__}: {error}"
        self._ended.add(rank)
        self._pass_to(self._next())

    def _wait(self, rank: int, meeting: _Meeting) -> Tensor:
        """Return when ``meeting`` is ready; others have their turns before."""
        if self._threads[rank] != get_ident():
            raise RuntimeError(
                f"rank {rank} waits for a collective in a thread of autograd or of its own, where no other rank can "
                "have its turn. Use torch.autograd.set_multithreading_enabled(False), and no threads."
            )
        self._waiting[rank] = meeting
        try:
            if (following := self._next()) != rank:
                if _settings() != self._settings:
                    raise RuntimeError(_SETTINGS_CHANGED)
                self._modules.end(rank)
                self._numbers.end(rank)
                self._pass_to(following)
                self._locks[rank].acquire()
                self._modules.begin(rank)
                self._numbers.begin(rank)
        finally:
            del self._waiting[rank]
        if self._failure:
            raise RuntimeError(f"{self._failure}\nRank {rank} waits for {meeting}.")
        return meeting.results.pop(rank)

    def _pass_to(self, rank: int | None) -> None:
        if rank is None:
            self._all_ended.set()
        else:
            self.rank = rank
            self._locks[rank].release()

    def _next(self) -> int | None:
        """The first rank that can continue; after a failure the last that began to wait, so that contexts end in the
        inverse order of their beginnings."""
        left = [rank for rank in range(len(self._locks)) if rank not in self._ended]
        able = [rank for rank in left if rank not in self._waiting or self._waiting[rank].is_ready]
        if left and not able and not self._failure:
            lines = [f"  rank {rank} waits for {self._waiting[rank]}" for rank in sorted(self._waiting)]
            lines += [f"  rank {rank} returned" for rank in sorted(self._ended)]
            title = "simulated ranks wait for each other, and none can go on:"
            self._failure = "\n".join([title, *lines, _ADVICE])
        return ([*self._waiting] or left)[-1] if left and self._failure else min(able, default=None)


def _results(op: Collective, given: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return what each rank gets, in new memory, from the operands in rank order."""
    made, size = op.law.of_all_ranks(op, [*given.values()], len(given)), len(given)
    device = op.device or next(iter(given.values())).device
    each = made if op.law.is_scattered else [made] * size
    results = [x.to(device, op.dtype, copy=True, memory_format=torch.contiguous_format) for x in each]
    return dict(zip(given, results, strict=True))


class _RandomNumbers:
    """The random numbers of all ranks, and of the process afterwards.

    ``"same"``: every rank starts where the process is, and the process goes on where rank 0 ended. ``"different"``:
    each starts at a seed that depends on its number and on where the process is, which goes on by one number if any of
    them drew.
    """

    def __init__(self, randomness: str, device: torch.device, num_ranks: int) -> None:
        self._randomness, self._devices = randomness, [torch.device("cpu")]
        self._module = torch.get_device_module("cpu" if device.type == "meta" else device)
        if hasattr(self._module, "default_generators"):  # others draw from that of the CPU
            self._devices.append(device)
        self._before = self._read()
        self._first = [self._seeded(r) if randomness == "different" else self._before for r in range(num_ranks)]
        self._now = [*self._first]

    def begin(self, rank: int) -> None:
        self._write(self._now[rank])

    def end(self, rank: int) -> None:
        self._now[rank] = self._read()

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """A context in which all ranks draw, after which the process goes on."""
        try:
            yield
        finally:
            self._write(self._before)
        pairs = [pair for states in zip(self._first, self._now, strict=True) for pair in zip(*states, strict=True)]
        if all(torch.equal(before, after) for before, after in pairs):
            return
        if self._randomness == "error":
            raise RuntimeError("spmd: random numbers were drawn, with randomness='error'.")
        if self._randomness == "same":
            self._write(self._now[0])
        for device in self._devices if self._randomness == "different" else ():
            torch.rand((), device=device)

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(self._module.get_rng_state(device) for device in self._devices[1:])]

    def _write(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices[1:], states[1:], strict=True):
            self._module.set_rng_state(state, device)

    def _seeded(self, rank: int) -> list[Tensor]:
        digest = blake2b(as_bytes(self._before[0]) + rank.to_bytes(8, "big"), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        return [torch.Generator(device).manual_seed(seed).get_state() for device in self._devices]


class _SharedModules:
    """What ranks would change for each other in modules: tensors, until a ``functional_call`` ends; modes; buffers."""

    def __init__(self) -> None:
        self._inside = defaultdict[int, list[nn.Module]](list)  # the modules that each rank calls now
        self._held: dict[int, set[nn.Module]] = {}  # of each rank that waits: these, with all that is inside of them
        self._modes = WeakKeyDictionary[nn.Module, dict[int, bool]]()  # at the first call of each rank
        self._buffers: dict[int, tuple[int, int, Tensor]] = {}  # by id: who used it first, and its version then

    @contextmanager
    def watched(self, rank: Callable[[], int]) -> Iterator[None]:
        """A context in which calls of modules by the running ``rank()`` are seen."""
        module = nn.modules.module
        before = module.register_module_forward_pre_hook(lambda m, _: self._enter(rank(), m))
        after = module.register_module_forward_hook(lambda m, *_: self._leave(rank(), m), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def begin(self, rank: int) -> None:
        del self._held[rank]

    def end(self, rank: int) -> None:
        held = self._held[rank] = set()
        for module in self._inside[rank]:
            held.update(() if module in held else module.modules())

    def _enter(self, rank: int, module: nn.Module) -> None:
        self._inside[rank].append(module)
        if not all(held.isdisjoint(module.modules()) for held in self._held.values()):
            raise RuntimeError(
                f"rank {rank} calls {type(module).__name__} while another rank waits for a collective inside of it. "
                f"{_BIND}"
            )
        modes = self._modes.setdefault(module, {})
        modes.setdefault(rank, module.training)
        if len({*modes.values()}) > 1:
            raise RuntimeError(
                f"ranks call {type(module).__name__} in training and in evaluation mode, because one changed the mode "
                f"while another waited. {_BIND} It has a mode of its own: fs.bind(model, full).eval()."
            )

    def _leave(self, rank: int, module: nn.Module) -> None:
        self._inside[rank].remove(module)
        for name, x in module.named_buffers(recurse=False):
            first, version, _ = self._buffers.setdefault(id(x), (rank, version_of(x), x))
            if first != rank and version != version_of(x):
                raise RuntimeError(f"ranks write to the buffer {name!r} of {type(module).__name__}. {_BIND}")


def _settings() -> tuple[object, ...]:
    """Return what changes values and holds for the whole process; all ranks have the same while one waits."""
    cuda = torch.backends.cuda
    kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return torch.get_default_dtype(), kernels, cuda.cudnn_sdp_enabled(), parametrizations_are_cached()
