"""What moves bytes between the ranks of one axis, behind one method, and a collective that was issued.

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
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, NoReturn

from torch import Tensor

from .collective import Collective

_NUMBERS = count()


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
        # The result is not needed (a part of the model was skipped, or an error was thrown): other ranks still send it,
        # and its memory must outlive that.
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
    of one for each where the law has ``parts``; rows of different length are padded to the longest.

    Results are new memory on ``op.device``. The operand may be written to when the result was waited for. All ranks
    issue the same in the same order. What a tracer records of them: Note [Recorded] in recorded.py.
    """

    @property
    def simulated(self) -> bool:
        """Whether operands are the values of all ranks, stacked."""
        return False

    @property
    def in_rank(self) -> bool:
        """Whether code here runs as one of the ranks: on simulated ones, inside of ``spmd`` alone."""
        return True

    @property
    def is_counted(self) -> bool:
        """Whether a :class:`Counter` counts what is issued here: of ranks that share it, what one of them issues."""
        return True

    @abstractmethod
    def index(self) -> Tensor | int:
        """This rank's position on the axis."""

    @abstractmethod
    def issue(self, op: Collective, x: Tensor, /) -> Work:
        """Start the collective ``op``; see the class."""

    @cached_property
    def recorded_name(self) -> str:
        """The name of these ranks in a recorded graph; numbered, so that it is the same in each run of a program."""
        return f"ranks{next(_NUMBERS)}"

    def level(self) -> Tensor | int:
        """Simulated ranks: a tensor that is batched at the level at which operands get their rows."""
        return self.index()

    def rows(self, size: int) -> int:
        """The rows of an operand, on an axis of ``size`` simulated ranks; less than that where axes are joint."""
        return size

    def others(self) -> Tensor | None:
        """Simulated ranks: a tensor that is batched at the levels of the mesh's other axes."""
        return None

    def ready(self) -> object:
        """Raise unless the ranks are there; return which one this is where they are threads of this process."""
        return None


@dataclass(frozen=True)
class DetachedBackend(Backend):
    """No ranks to communicate with: one rank alone, which does not, or an unpickled mesh."""

    rank: int = 0

    def index(self) -> int:
        return self.rank

    def ready(self) -> None:
        self._refuse()

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "this mesh was unpickled and its ranks are not here. Put the tree on a live mesh of the same sizes: "
            "tree.on(mesh)."
        )


Issue = Callable[[Collective, Tensor], Work]
Wrap = Callable[[Collective, Tensor, Issue], Work]


@dataclass(frozen=True)
class Wrapped(Backend):
    """``inner``, whose collectives go through ``fn``."""

    inner: Backend
    fn: Wrap

    @property
    def simulated(self) -> bool:
        return self.inner.simulated

    @property
    def in_rank(self) -> bool:
        return self.inner.in_rank

    @property
    def is_counted(self) -> bool:
        return self.inner.is_counted

    def index(self) -> Tensor | int:
        return self.inner.index()

    def level(self) -> Tensor | int:
        return self.inner.level()

    def rows(self, size: int) -> int:
        return self.inner.rows(size)

    def others(self) -> Tensor | None:
        return self.inner.others()

    def ready(self) -> object:
        return self.inner.ready()

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        return self.fn(op, x, self.inner.issue)


def transport(backend: Backend) -> Backend:
    """What moves the bytes in the end, behind all wrappers."""
    while isinstance(backend, Wrapped):
        backend = backend.inner
    return backend
