"""Predict the memory and traffic of a training step on each rank: arithmetic on a layout, for a mesh of any size.

Counted are shards, their gradients and states, the units that are whole at a time, the gradients that are reduced, and
every collective of a step; not activations, and not the memory that a backend needs for messages.
``tests/training/test_estimate_on_ranks.py`` compares it with what gloo ranks allocate and send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import prod

import torch
from torch import Tensor

from ..communication.collective import KINDS
from ..communication.wrappers import Traffic
from ..layout.buffers import Buffer, Unit
from ..layout.layout import Layout, rank_dims
from ..layout.trees import Sharded, check_layout
from ..sharding.session import small_units
from .optimizer import Optimizer


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank in a training step.

    Args:
        parameters: the shards.
        gradients: the shards of the gradients, as a step returns them.
        optimizer: the state after the first step; 0 without an optimizer.
        gathered: the most whole parameters at any moment of forward or backward.
        reducing: one unit's full gradient, and the memory that it is packed into to be reduced.
        traffic: the collectives of a step by axis and kind, as ``fs.communication.Counter`` counts them, without times.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reducing: int
    traffic: Mapping[tuple[str, str], Traffic]

    @property
    def peak(self) -> int:
        """The maximal bytes at a time, without activations and messages of a backend."""
        return self.parameters + self.optimizer + self.gradients + self.gathered + self.reducing

    @property
    def sent(self) -> int:
        """The minimal bytes that each rank sends in a step."""
        return sum(one.sent for one in self.traffic.values())

    def __repr__(self) -> str:
        return f"Estimate(peak {self.peak:,} bytes, {self.sent:,} bytes sent per step)"


def estimate(layout: Layout, opt: Optimizer | None = None) -> Estimate:
    """Predict the memory and traffic of one rank in a training step, for any number of ranks.

    A step is ``opt.step(params, grads=fs.grad(loss)(params), state=state, donate=True)`` on real ranks, with a
    ``gather`` in the loss, of a model that uses each unit once, in the layout's order. ``traffic`` is then what
    ``fs.communication.Counter`` counts, except that a first unit whose gradient needs no weights (an embedding) is not
    gathered again. Simulated ranks keep what they gather, as with ``reshard_after_forward=False``.

    Args:
        layout: from :func:`plan`; the model may be on the meta device, and the mesh simulated, of any size.
        opt: the optimizer whose state is counted, if any.

    Returns:
        An :class:`Estimate` in bytes of one rank. All ranks have equal shards, padding included.

    Raises:
        TypeError: ``layout`` is not a layout.
        ValueError: ``opt`` has options for a label that no buffer has.

    Cost:
        No collectives, and no memory: the state is made on the meta device.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(48)))
        >>> mesh = fs.simulated_mesh({"replicate": 16, "shard": 64})
        >>> estimate(fs.plan(model, mesh), fs.optimizer(torch.optim.AdamW))
        Estimate(peak 1,879,277,760 bytes, 37,904,357,376 bytes sent per step)
    """
    check_layout("estimate", layout)
    buffers, of = layout.buffers.values(), {key: layout.schedules[key, None] for key in layout.buffers}
    sizes = {key: schedule.gathered.itemsize + schedule.reduced.itemsize for key, schedule in of.items()}
    reducing = [sum(b.numel * sizes[b.key] for b in unit.buffers if b.trainable) for unit in layout.units]
    gathered, again = _gathered(layout)
    collectives = [each for unit in (*layout.units, *again) for b in unit.buffers for each in gathers_of(b, layout)]
    collectives += [each for b in buffers if b.trainable for each in reductions_of(b, layout)]
    traffic: dict[tuple[str, str], Traffic] = {}
    for axis, kind, nbytes in collectives:
        one = Traffic(1, nbytes, KINDS[kind].sent(nbytes, layout.axis_size(axis)))
        traffic[axis, kind] = traffic.get((axis, kind), Traffic()) + one
    return Estimate(
        parameters=sum(b.shard_numel * b.dtype.itemsize for b in buffers),
        gradients=sum(b.shard_numel * of[b.key].returned.itemsize for b in buffers if b.trainable),
        optimizer=_state_bytes(layout, opt) if opt else 0,
        gathered=gathered,
        reducing=max(reducing, default=0),
        traffic=traffic,
    )


def _gathered(layout: Layout) -> tuple[int, list[Unit]]:
    """Return the most bytes that are whole at a time, and the units that backward gathers again.

    Small units, and buffers that every rank has in another dtype, stay whole; of the large units one and the next are.
    Backward gathers down to the first unit with gradients, without the last two, which are there from forward.
    """
    small = small_units(layout) if layout.reshard_after_forward else range(len(layout.units))
    stay, sizes, large = 0, list[int](), list[Unit]()
    for i, unit in enumerate(layout.units):
        dtypes = [(b, layout.schedules[b.key, None].gathered) for b in unit.buffers]
        size = sum(b.numel * dtype.itemsize for b, dtype in dtypes if b.num_shards > 1)
        stay += sum(b.numel * dtype.itemsize for b, dtype in dtypes if b.num_shards == 1 and dtype != b.dtype)
        if i in small:
            stay += size
        else:
            sizes.append(size)
            large.append(unit)
    frozen = {*takewhile(lambda unit: not any(b.trainable for b in unit.buffers), layout.units)}
    two = max(map(sum, pairwise(sizes)), default=sum(sizes))
    return stay + two, [unit for unit in large[:-2] if unit not in frozen]


def _state_bytes(layout: Layout, opt: Optimizer) -> int:
    """Count the state of ``init``; state that the first gradient creates has the size of its parameter."""
    ranks = rank_dims(layout)
    buffers = layout.buffers.items()
    params = {key: torch.empty((*ranks, b.shard_numel), dtype=b.dtype, device="meta") for key, b in buffers}
    state = opt.init(Sharded(params, layout))
    leaves = [params[key] if x is None else x for tree in state.values() for key, x in tree.items()]
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor)) // prod(ranks)


def gathers_of(b: Buffer, layout: Layout) -> Iterator[tuple[str, str, int]]:
    """Yield what gathers buffer ``b``, by its schedule."""
    schedule = layout.schedules[b.key, None]
    if schedule.shard_axis:
        yield schedule.shard_axis.name, "all_gather", b.shard_numel * schedule.gathered.itemsize


def reductions_of(b: Buffer, layout: Layout) -> Iterator[tuple[str, str, int]]:
    """Yield what reduces the gradient of buffer ``b``, by its schedule."""
    schedule = layout.schedules[b.key, None]
    if schedule.shard_axis:
        yield schedule.shard_axis.name, "psum_scatter", b.numel * schedule.reduced.itemsize
    for axis in schedule.copies:
        yield axis.name, "psum", b.shard_numel * schedule.reduced.itemsize
