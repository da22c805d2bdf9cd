"""Predict the memory of a training step on each rank: arithmetic on a layout, for a mesh of any size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from ..layout.layout import Layout, rank_dims
from ..layout.trees import Sharded, check_layout
from ..sharding.session import small_units
from .optimizer import Optimizer


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank in a training step, without activations and without messages of a backend.

    Args:
        parameters: the shards.
        gradients: the shards of the gradients, as a step returns them.
        optimizer: the state after the first step; 0 without an optimizer.
        gathered: the most whole parameters at any moment of forward or backward.
        reducing: one unit's full gradient, and the memory that it is packed into to be reduced.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reducing: int

    @property
    def peak(self) -> int:
        """The maximal bytes at a time."""
        return self.parameters + self.optimizer + self.gradients + self.gathered + self.reducing

    def __repr__(self) -> str:
        return f"Estimate(peak {self.peak:,} bytes)"


def estimate(layout: Layout, opt: Optimizer | None = None) -> Estimate:
    """Predict the memory of one rank in a training step, for any number of ranks.

    A step is ``opt.step(params, grads=fs.grad(loss)(params), state=state, donate=True)`` on real ranks, with a
    ``gather`` in the loss, of a model that uses each unit once, in the layout's order. Simulated ranks keep what they
    gather, as with ``reshard_after_forward=False``.

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
        Estimate(peak 1,879,277,760 bytes)
    """
    check_layout("estimate", layout)
    buffers, of = layout.buffers.values(), {key: layout.schedules[key, None] for key in layout.buffers}
    sizes = {key: schedule.gathered.itemsize + schedule.reduced.itemsize for key, schedule in of.items()}
    reducing = [sum(b.numel * sizes[b.key] for b in unit.buffers if b.trainable) for unit in layout.units]
    return Estimate(
        parameters=sum(b.shard_numel * b.dtype.itemsize for b in buffers),
        gradients=sum(b.shard_numel * of[b.key].returned.itemsize for b in buffers if b.trainable),
        optimizer=_state_bytes(layout, opt) if opt else 0,
        gathered=_gathered(layout),
        reducing=max(reducing, default=0),
    )


def _gathered(layout: Layout) -> int:
    """Return the most bytes that are whole at a time.

    Small units, and buffers that every rank has in another dtype, stay whole; of the large units one and the next are.
    """
    small = small_units(layout) if layout.reshard_after_forward else range(len(layout.units))
    stay, sizes = 0, list[int]()
    for i, unit in enumerate(layout.units):
        dtypes = [(b, layout.schedules[b.key, None].gathered) for b in unit.buffers]
        stay += sum(b.numel * dtype.itemsize for b, dtype in dtypes if b.num_shards == 1 and dtype != b.dtype)
        size = sum(b.numel * dtype.itemsize for b, dtype in dtypes if b.num_shards > 1)
        stay += size if i in small else 0
        sizes += [] if i in small else [size]
    return stay + max(map(sum, pairwise(sizes)), default=sum(sizes))


def _state_bytes(layout: Layout, opt: Optimizer) -> int:
    """Count the state of ``init``; state that the first gradient creates has the size of its parameter."""
    ranks = rank_dims(layout)
    buffers = layout.buffers.items()
    params = {key: torch.empty((*ranks, b.shard_numel), dtype=b.dtype, device="meta") for key, b in buffers}
    state = opt.init(Sharded(params, layout))
    leaves = [params[key] if x is None else x for tree in state.values() for key, x in tree.items()]
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor)) // prod(ranks)
