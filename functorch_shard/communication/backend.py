"""What moves bytes between the ranks of one axis, behind one method.

``process_group`` and ``gloo`` are the only files that call ``torch.distributed`` collectives. Real ranks pass this
rank's tensor and get this rank's result. Simulated ranks pass the values of all ranks, stacked in dim 0, and get back
either one value for all or a stack of one value a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NoReturn

from torch import Tensor

from .collective import Collective
from .work import Work

_NUMBERS = count()


class Backend(ABC):
    """The ranks of one axis at work: :meth:`issue` and :meth:`index` are to be written, the others have defaults.

    Note [Issue]: ``issue(op, x)`` starts the collective that ``op`` describes and returns a :class:`Work` with its
    result. Real ranks pass this rank's ``x``. Simulated ranks pass the values of all ranks, stacked in dim 0. What
    comes back is for

    - ``"all_gather"``, ``"exchange"``: the values of all ranks along ``op.dim``, in ``op.dtype``, whatever the dtype
      and the device of ``x``; simulated, one value for all ranks
    - ``"psum_scatter"``: of the sum over ranks, this rank's part of ``op.dim``; simulated, a stack of the parts
    - ``"psum"``, ``"pmax"``: the sum, or the largest values, over ranks; simulated, one value for all
    - ``"all_to_all"``: of each rank, row r of ``op.dim`` for rank r; simulated, stacked
    - ``"ragged_all_to_all"``: ``op.splits[i][j]`` elements of the last dim from rank i to rank j, in the order of j in
      what i passes and of i in what j gets; simulated, stacked, all rows padded to the longest
    - ``"scatter"``: row r of the ``x`` of rank ``op.source`` for rank r; other ranks pass no rows, shape ``(0, ..)``;
      simulated, stacked
    - ``"broadcast"``: the ``x`` of rank ``op.source``; real ranks write it into ``x``

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
