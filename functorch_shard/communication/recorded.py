"""Collectives of real ranks as operators that a tracer records: one starts a collective, another waits for it.

Note [Recorded]: while ``make_fx`` or ``torch.compile`` traces a program on real ranks, :meth:`Axis.issue` calls
``start`` and not the backend, and waiting calls ``wait``. When the graph runs, ``start`` issues: wrappers count and
check each run. Both operators are pure, so a compiler keeps them in the order of their data:

    start(x, ranks, ..) -> a tensor without elements, whose attribute ``work`` is the :class:`Work`
    wait(started, x, ..) -> the result, in new memory

``wait`` takes the operand too, because a compiler reuses the memory of what it sees no use of. They are not
differentiated: the Functions of ``collectives`` stay opaque to compilers, and what their forward and backward issue is
recorded. Operators take numbers and strings alone, so ``ranks`` is a name of ``Axis.send``, as process groups have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..running import RUN, running
from .collective import LIBRARY, START, WAIT, Collective, collective, record


class _Ranks(WeakValueDictionary[str, Any]):
    """What issues the collectives of graphs, by name, as torch.distributed has process groups.

    Names are numbered, so that they are the same in each run of a program, and none is used again.
    """

    number = 0

    def name_of(self, send: object) -> str:
        for name, each in self.items():
            if each is send:
                return name
        self.number += 1
        self[f"ranks{self.number}"] = send
        return f"ranks{self.number}"


_RANKS = _Ranks()


def start_recorded(op: Collective, x: Tensor, axis: Any) -> Callable[[], Tensor]:
    """Record ``op`` on ``x`` as operators of a graph; return what waits for it."""
    law, shape = op.law, list(x.shape)
    if law.begins:
        raise NotImplementedError(
            f"{op}: a compiled function cannot contain it: optimizer(whole=True) is not compiled, and what ranks "
            "compare or send to each other at the start of a program (plan, shard, load, init) is done before, "
            "outside of what is compiled."
        )
    if op.kind == "ragged_all_to_all":
        shape[-1] = sum(row[int(axis.backend.index())] for row in op.splits)
    elif bool(law.parts) == law.reduces:  # side by side, or a part
        shape[op.dim] = shape[op.dim] // axis.size if law.parts else shape[op.dim] * axis.size
    splits = [n for row in op.splits for n in row]
    width = len(splits) // max(len(op.splits), 1)
    what = (op.kind, op.axis, op.numel, op.dtype, op.key, op.dim, op.device, op.source, op.transient, width, splits)
    started = _recorded(START, x, _RANKS.name_of(axis.send), *what)
    return lambda: _recorded(WAIT, started, x, shape, op.dtype, op.device or x.device)


def _recorded(operator: Any, *args: Any) -> Any:
    with running(recorded=True):  # it runs too, with real tensors where the program made some: nothing is sent then
        return operator(*args)


def _start(x: Tensor, name: str, *fields: Any) -> Tensor:
    if RUN.get().recorded:
        return torch.empty(0)
    *what, width, splits = fields
    rows = tuple(tuple(splits[i : i + width]) for i in range(0, len(splits), width or 1))
    send, op = _RANKS.get(name), collective(*what, splits=rows)
    if send is None:
        raise RuntimeError("a recorded collective: its mesh was freed. Keep it for as long as the compiled function.")
    started: Any = torch.empty(0)
    record(op)
    started.work = send(op, x)
    return started


def _wait(started: Any, x: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if RUN.get().recorded:
        return torch.empty(shape, dtype=dtype, device=device)
    return started.work.wait().contiguous()


# For a graph that no compiler reads: torch would take as long to call an operator as to issue the collective.
AS_FUNCTIONS = {START: _start, WAIT: _wait}
LIBRARY.impl("start", _start, "CompositeExplicitAutograd")
LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")
torch.library.register_fake("functorch_shard::start", lambda x, *_: torch.empty(0), lib=LIBRARY)
torch.library.register_fake(
    "functorch_shard::wait",
    lambda started, x, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
    lib=LIBRARY,
)
