"""Gradients over shards now and over replicas later: the two halves of the reduction of ``gather``, apart."""

from __future__ import annotations

from dataclasses import replace

from ..eager import eager
from ..errors import first_difference, reject
from ..layout.layout import Layout
from ..layout.trees import Sharded
from ..layout.validation import check_sharded, check_shards
from ..storage.memory_kind import to_memory_kind_of, to_working_device
from .reduction import over_replicas

_NO_AXIS = ""  # no mesh has an axis of this name, and one that a mesh lacks has size 1


@eager
def within_replicas(params: Sharded) -> Sharded:
    """``params`` whose gradients are reduced over the shard axis alone, each replica for itself.

    ``across_replicas(grad(f)(within_replicas(params)), params.layout)`` equals ``grad(f)(params)``. Both halves are
    linear: add the gradients of microbatches up between them, and replicas communicate once a step. FSDP2's
    ``set_requires_all_reduce(False)``.

    Args:
        params: to differentiate with respect to: any ``Sharded`` whose mesh has replicas. Without them nothing changes.

    Returns:
        A ``Sharded`` of the same tensors. ``gather`` of it has the values of ``params``, and a gradient is the mean
        over this replica's ranks of what each of them returns (the sum, with ``reduction="sum"``).

    Raises:
        TypeError: ``params`` is not a ``Sharded``.

    Cost:
        Nothing is copied or communicated. Of the gradient: one reduce-scatter per trainable buffer.

    Example:
        >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
        >>> layout = fs.plan({"fc.w": torch.zeros(2)}, mesh)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, layout)
        >>> loss = lambda params, x: (fs.gather(params)["fc.w"] * x).sum()
        >>> rows = torch.tensor([[1.0, 3.0], [5.0, 7.0]])            # row r = replica r, column c = rank c of it
        >>> grads = mesh.spmd(fs.grad(loss))(within_replicas(params), rows)
        >>> grads["fc"][:, 0, 0]                                     # of one element, the mean of each replica
        tensor([2., 6.])
        >>> across_replicas(grads, layout)["fc"][:, 0, 0]
        tensor([4., 4.])
    """
    check_sharded("within_replicas: params", params)
    return Sharded(params, without_replicas(params.layout))


@eager
def across_replicas(grads: Sharded, layout: Layout) -> Sharded:
    """The mean over replicas of gradients that :func:`within_replicas` left apart: the other half of the reduction.

    Args:
        grads: the gradients of ``within_replicas(params)``, or a sum of them over microbatches, in the stored dtypes or
            in wider ones. ``None`` stays.
        layout: that of ``params``.

    Returns:
        A ``Sharded`` with ``layout``, as the gradient of ``params`` itself: the mean over all ranks (the sum, with
        ``reduction="sum"``), added up in the dtype that gradients are reduced in.

    Raises:
        TypeError: ``grads`` is not a ``Sharded``, or ``layout`` not a layout.
        ValueError: gradients that are reduced over replicas already, or have a different layout; shards that
            do not fit.

    Cost:
        One all-reduce of the shard per trainable buffer; none without replicas. Differentiable.

    Example:
        >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> loss = lambda params, x: (fs.gather(params)["fc.w"] * x).sum()

        >>> def microbatches(params, xs):
        ...     one, two = (fs.grad(loss)(within_replicas(params), x) for x in xs)
        ...     total = fs.Sharded({key: one[key] + two[key] for key in one}, one.layout)
        ...     return across_replicas(total, params.layout)

        >>> with fs.testing.count_collectives() as seen:
        ...     grads = mesh.spmd(microbatches)(params, torch.ones(2, 2, 2))   # two on every rank
        >>> seen["psum_scatter"], seen["psum"], grads["fc"].flatten()
        (2, 1, tensor([2., 2., 2., 2.]))
    """
    if not isinstance(grads, Sharded) or not isinstance(layout, Layout):
        got = f"{type(grads).__name__} and {type(layout).__name__}"
        raise TypeError(
            f"across_replicas: got {got}, expected a Sharded of gradients and the layout of its parameters."
        )
    _check_within(grads.layout, layout)
    if not layout.mesh.in_spmd:
        return layout.mesh.spmd(lambda grads: across_replicas(grads, layout))(grads)
    check_shards("across_replicas: grads", grads, grads.layout, allow_none=True, gradients=True)
    device = layout.mesh.device
    shards = {
        key: None
        if (x := grads[key]) is None
        else to_memory_kind_of(over_replicas(to_working_device(x, device), buffer, layout), x)
        for key, buffer in layout.buffers.items()
    }
    return Sharded(shards, layout)


def without_replicas(layout: Layout) -> Layout:
    """The same places, of gradients that each replica has reduced for itself."""
    return replace(layout, replicate_axis=_NO_AXIS)


def _check_within(got: Layout, layout: Layout) -> None:
    expected = without_replicas(layout)
    if got == expected:
        return
    mine, theirs = first_difference(expected.lines(), got.lines()) or ("", "")
    advice = "Differentiate by within_replicas(params), and pass the layout of params."
    reject("across_replicas: grads", [f"{theirs}, expected {mine}"], advice)
