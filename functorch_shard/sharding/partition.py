"""``partition`` and ``merge``: trainable and frozen parameters as two trees, and as one again."""

from __future__ import annotations

from ..layout.layout import merged, select_buffers
from ..layout.trees import Sharded, check_sharded
from ..torch_internals.autograd import eager


@eager
def partition(params: Sharded) -> tuple[Sharded, Sharded]:
    """``(trainable, frozen)``: two trees that :func:`merge` makes one again.

    Differentiate by the first alone: no gradient, optimizer memory or traffic is spent on the second.
    ``gather(trainable, frozen)`` gathers both.

    Args:
        params: any ``Sharded`` with one leaf per buffer of its layout.

    Returns:
        Two ``Sharded`` that share the leaves of ``params``, each with the layout of its own buffers.

    Raises:
        TypeError: ``params`` is not a ``Sharded``.

    Cost:
        Nothing is copied or communicated.

    Example:
        >>> values = {"fc.w": torch.zeros(3), "fc.steps": torch.tensor(7)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> trainable, frozen = partition(params)
        >>> list(trainable), list(frozen)
        (['fc/float32'], ['fc/int64/frozen'])
    """
    check_sharded("partition", params)
    layout = params.layout
    trainable = {key: buffer.trainable for key, buffer in layout.buffers.items()}
    halves = [
        select_buffers(layout, {key: flag == wanted for key, flag in trainable.items()}) for wanted in (True, False)
    ]
    mine, others = (Sharded({key: params[key] for key in half.buffers}, half) for half in halves)
    return mine, others


@eager
def merge(tree: Sharded, *more: Sharded) -> Sharded:
    """One tree of the buffers of several: the inverse of :func:`partition`.

    ``merge(*partition(params))`` has the leaves and the layout of ``params``.

    Args:
        tree, more: parts of one model, as :func:`partition` returns them, or those of several models planned on one
        mesh.

    Returns:
        A ``Sharded`` that shares the leaves of the parts, in the order of the whole layout.

    Raises:
        TypeError: a part is not a ``Sharded``.
        ValueError: two parts have a buffer in common, or were planned for other ranks or with other options.

    Cost:
        Nothing is copied or communicated.

    Example:
        >>> values = {"fc.w": torch.zeros(3), "fc.steps": torch.tensor(7)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> trainable, frozen = partition(params)
        >>> merge(trainable, frozen).layout == params.layout
        True
    """
    trees = (tree, *more)
    if others := [type(part).__name__ for part in trees if not isinstance(part, Sharded)]:
        raise TypeError(f"merge: got {', '.join(others)}, expected a Sharded for each part.")
    if not more:
        return tree
    layout = merged(tree.layout, [part.layout for part in more])
    leaves = {key: part[key] for part in trees for key in part}
    return Sharded({key: leaves[key] for key in layout.buffers}, layout)
