"""One axis of a mesh: its name, its size, what moves bytes between its ranks, and a collective that was issued.

Real ranks pass this rank's tensor and get this rank's result. Simulated ranks pass the values of all ranks, stacked in
dim 0, and get back either one value for all or a stack of one value a rank.

Note [Abandoned]: what nobody waits for is freed anywhere, also by the garbage collector in the middle of a C++ function
that holds a lock. Gloo's start of a collective is one: gloo's threads need its lock to end another collective, and who
waits for that one there waits for ever. So a collective that blocks the host is handed on, and waited for in a later
call. Waiting for one on CUDA does not block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..containers import Static
from ..torch_internals.autograd import active_modes, being_traced, eager, profiler_enabled
from .collective import KINDS, Collective, collective, record


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
        """This work, whose result is ``change`` of the result it had."""
        finish = self._finish
        assert finish is not None, "a Work is waited for once"
        self._finish = lambda: change(finish())
        return self

    def __del__(self) -> None:
        # Other ranks still send a result that is not needed, and its memory must outlive that.
        handles = getattr(self, "_handles", ())  # a compiler that traces may make one without __init__
        if handles and self._abandon:
            self._abandon()
        elif handles:
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


class Backend(ABC):
    """The ranks of one axis at work: :meth:`issue` and :meth:`index` are to be written, the others have defaults.

    Note [Issue]: ``issue(op, x)`` starts the collective that ``op`` describes and returns a :class:`Work` with its
    result, which ``op.law`` defines: see ``KINDS`` in collective.py. Real ranks pass this rank's ``x`` and get this
    rank's result. Simulated ranks pass the values of all ranks, stacked in dim 0, and get one value for all, or a stack
    of one for each where the law ``is_scattered``; rows of different length are padded to the longest.

    Results are new memory on ``op.device``. The operand may be written to when the result was waited for. All ranks
    issue the same in the same order. What a tracer records of them: Note [Recorded] in recorded.py.
    """

    simulated: bool = False  # whether operands are the values of all ranks, stacked
    in_rank: bool = True  # whether code here runs as one of the ranks: on simulated ones, inside of spmd alone

    @abstractmethod
    def index(self) -> Tensor | int:
        """This rank's position on the axis."""

    @abstractmethod
    def issue(self, op: Collective, x: Tensor, /) -> Work:
        """Start the collective ``op``; see the class."""

    def place(self) -> tuple[Tensor | None, Tensor | None]:
        """Return operands that tell levels of vmap apart: batched ones for that of this axis, and for those of others.

        Batched ranks alone have them, see Note [Ranks as a batch axis] in mesh/mesh.py.
        """
        return None, None

    def ready(self) -> object:
        """Raise unless the ranks are there; return which one this is where they are threads of this process."""
        return None


@dataclass(frozen=True)
class DetachedBackend(Backend):
    """No ranks to communicate with: one rank alone, which does not, or an unpickled mesh."""

    rank: int = 0

    def index(self) -> int:
        return self.rank

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        self.ready()

    def ready(self) -> NoReturn:
        raise RuntimeError(
            "this mesh was unpickled and its ranks are not here. Put the tree on a live mesh of the same sizes: "
            "tree.on(mesh)."
        )


Issue = Callable[[Collective, Tensor], Work]
Wrap = Callable[[Collective, Tensor, Issue], Work]


@dataclass(frozen=True, eq=False)
class Axis(Static):
    """One named direction of a mesh, for example ``mesh["shard"]``: what a collective communicates over."""

    name: str
    size: int
    backend: Backend = field(repr=False)
    send: Issue = field(default=None, repr=False)  # pyright: ignore[reportAssignmentType]  # backend.issue, if unwrapped
    folded: int = field(default=1, repr=False)  # values of other simulated ranks inside an operand; see collectives
    key: str = field(default="", repr=False)  # of the buffer that is communicated

    def __post_init__(self) -> None:
        if self.send is None:
            object.__setattr__(self, "send", self.backend.issue)

    __copy__ = __deepcopy__ = lambda self, _=None: self  # as of a mesh

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group is not pickled; a simulated axis is pickled with its mesh.
        rank = 0 if self.backend.simulated else int(self.backend.index())
        return Axis, (self.name, self.size, DetachedBackend(rank))

    @property
    def is_wrapped(self) -> bool:
        """Whether something stands before the backend."""
        return self.send != self.backend.issue

    def of(self, key: str) -> Axis:
        """The same ranks, for what belongs to buffer ``key``."""
        return replace(self, key=key)

    @eager
    def issue(self, kind: str, x: Tensor, *, dtype: torch.dtype | None = None, key: str = "", **how: Any) -> Work:
        """Start a collective over the ranks of this axis: the only way to one, so that all are counted and checked.

        ``x`` is the operand, see :class:`Backend`; the rest is of :class:`Collective`.
        """
        simulated = self.backend.simulated
        numel = x.numel() // max(len(x) * self.folded, 1) if simulated else x.numel()
        op = collective(kind, self.name, numel, dtype or x.dtype, key or self.key, **how)
        if kind in KINDS and KINDS[kind].shape:
            op = replace(op, numel=_mean_sent(op, x.shape[int(simulated) :], self.size, self.folded))
        if active_modes() or profiler_enabled():  # who would miss it in a trace or a profile
            if being_traced() and not simulated:
                from .recorded import start_recorded

                return Work(start_recorded(op, x, self))
            record(op)
        return self.send(op, x)


@lru_cache(maxsize=4096)
def _mean_sent(op: Collective, shape: torch.Size, size: int, folded: int) -> int:
    """What ranks send to others on average, the same number on every rank."""
    of, pairs = op.law.shape, permutations(range(size), 2)
    assert of
    return -(-sum(prod(of(op, shape, i, j)) for i, j in pairs) // (size * folded))


def wrap(fn: Wrap) -> Callable[[Axis], Axis]:
    """Have ``fn`` called for every collective of a mesh, in whatever thread: ``mesh.with_backend(wrap(fn))``.

    Args:
        fn: ``fn(op, x, send)`` gets the :class:`Collective`, its operand, and what would issue it. It returns a
            :class:`Work`: that of ``send(op, x)``, of another collective or operand, changed by :meth:`Work.then`, or
            one of its own. :class:`Backend` says what ``x`` and the result are, on real and on simulated ranks.

    Returns:
        A function for :meth:`Mesh.with_backend`, from an axis to the same ranks behind ``fn``. Derivatives are those of
        the true collectives, whose transposes go through ``fn`` as well.

    Cost:
        That of ``fn``. All ranks have to wrap alike. Sequential simulated ranks each call ``fn``.

    Example:
        >>> import dataclasses
        >>> @fs.communication.wrap
        ... def half_sums(op, x, send):
        ...     half = dataclasses.replace(op, dtype=torch.bfloat16)
        ...     return send(half, x.bfloat16()).then(lambda total: total.to(x.dtype))
        >>> mesh = fs.simulated_mesh(2).with_backend(half_sums)
        >>> rows = torch.tensor([256.0, 1.0])   # row r = rank r; bfloat16 has no 257
        >>> mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(rows)
        tensor([256., 256.])
    """

    def before(axis: Axis) -> Axis:
        send = axis.send
        return replace(axis, send=lambda op, x: fn(op, x, send))

    return before
