"""``partition``: parts of a tree by unit, by name or by trainability."""

from __future__ import annotations

from ..layout.trees import Sharded


def partition(params: Sharded) -> tuple[Sharded, Sharded]:
    """``(trainable, frozen)``: two trees that ``gather(trainable, frozen)`` puts together again.

    Differentiate by the first alone: no gradient, optimizer memory or traffic is spent on the second.

    Args:
        params: any ``Sharded`` with one leaf per buffer of its layout.

    Returns:
        Two ``Sharded`` that share the leaves of ``params``, each with the layout of its own buffers.

    Raises:
        TypeError: ``params`` is no ``Sharded``.

    Cost:
        Nothing is copied or communicated.

    Example:
        >>> values = {"fc.w": torch.zeros(3), "fc.steps": torch.tensor(7)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> trainable, frozen = partition(params)
        >>> list(trainable), list(frozen)
        (['fc/float32'], ['fc/int64/frozen'])
    """
    if not isinstance(params, Sharded):
        raise TypeError(f"partition: got {type(params).__name__}, expected a Sharded.")
    layout = params.layout
    trainable = {key: buffer.trainable for key, buffer in layout.buffers.items()}
    halves = [layout.select({key: flag == wanted for key, flag in trainable.items()}) for wanted in (True, False)]
    mine, others = (Sharded({key: params[key] for key in half.buffers}, half) for half in halves)
    return mine, others
