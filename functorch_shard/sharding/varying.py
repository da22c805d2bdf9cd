"""Over which axes of the ranks values vary.

Note [Varies]: under the vmap of an axis, a value without a batch dim at its level is one value, the same on every rank.
A value with one may differ, and counts as different whatever its rows are. No operator needs a rule for it, and all
transforms keep it. It is conservative where a value gets a batch dim although its rows are equal: ``gather`` gives each
replica a copy, whose gradients are added up, as JAX's ``pvary`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import optree
from torch import Tensor

from ..communication.simulated import RUN, axes_over
from ..containers import opened

T = TypeVar("T")


def varies(x: Any) -> Any:
    """Return the names of the axes over which ``x`` varies, inside ``spmd`` on batched simulated ranks.

    A value varies over an axis if it was computed from one that does, or from the rank's own number or random numbers,
    and no collective made it the same since: ``psum``, ``pmean``, ``pmax`` and ``all_gather`` do. The types of JAX's
    ``shard_map(check_vma=True)``, which need no annotation here: a value varies where it has a batch dim of ranks. What
    varies may have equal values, for example copies of parameters on replicas; what does not vary has.

    Args:
        x: a tensor, or a pytree of them, at any level of transforms.

    Returns:
        A tuple of names, outermost first, ``()`` if ``x`` is the same on every rank; for a pytree one with such tuples,
        where mappings such as ``Sharded`` are dicts. An axis of one rank is never among them.

    Raises:
        RuntimeError: outside of ``spmd``, on sequential and on real ranks, where a value is that of one rank and
            nothing says how it was computed.

    Example:
        >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
        >>> @mesh.spmd
        ... def step(x):
        ...     total = fs.collectives.psum(x, mesh["shard"])
        ...     print(varies({"x": x, "total": total, "mean": fs.collectives.pmean(total, mesh["replicate"])}))
        ...     return total
        >>> _ = step(torch.ones(2, 2, 3))
        {'x': ('replicate', 'shard'), 'total': ('replicate',), 'mean': ()}
    """
    if not RUN.get().indices:
        raise RuntimeError(
            "varies: only batched simulated ranks know over which axes a value varies: call it inside of "
            "fs.simulated_mesh(...).spmd(fn). Sequential and real ranks compute one value each; compare those, or run "
            "the same function on a batched mesh."
        )
    return _map(axes_over, opened(x))


def _map(of: Callable[[Tensor], T], tree: Any) -> Any:
    """Return ``tree`` with ``of`` of its tensors, ``()`` for other leaves, and dicts for its mappings."""

    def of_leaf(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: _map(of, value) for key, value in x.items()}
        return of(x) if isinstance(x, Tensor) else ()

    return optree.tree_map(of_leaf, tree, is_leaf=lambda x: isinstance(x, Mapping), none_is_leaf=True)
