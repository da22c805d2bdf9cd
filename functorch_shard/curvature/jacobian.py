"""Jacobians and Hessians by sharded parameters: of the mean over ranks, columns sharded as the parameters are.

``torch.func``'s take the derivative by the elements of a shard. ``jacfwd`` sets element i on every rank at once, and a
column is a sum of those of all ranks. Here each column is of one element of the whole, and is held where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import jvp, vmap

from ..collectives.rules import across, within
from ..collectives.sinks import new_boundary
from ..layout.buffers import Buffer
from ..layout.layout import shard_index
from ..layout.trees import Full, Sharded, check_sharded, is_sharded, map_items
from ..sharding.gather import gather, mean_of_shard
from ..sharding.shard import merge, partition
from ..training.grad import grad

Of = Callable[[Sharded], Any]


def jacrev(fn: Callable[..., Any], argnums: int = 0, *, chunk_size: int | None = None) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of the mean over ranks of ``fn``, one backward for each output.

    The law of :func:`fs.grad`, for each element of what ``fn`` returns: row i is the gradient of the mean over ranks of
    output i, by the whole parameters, sharded as they are. To get rows of every rank's own outputs, let ``fn`` gather
    them: ``fs.collectives.all_gather(outputs, mesh)`` is the same value on all ranks, and its own mean.

    Args:
        fn: returns a tensor, or a pytree of tensors, of the same shapes on every rank.
        argnums: the positional argument to differentiate with respect to: a ``Sharded``.
        chunk_size: how many rows are computed at once; ``None``: all.

    Returns:
        A function with the arguments of ``fn``. For each output of shape ``s`` it returns a ``Sharded`` of the
        trainable buffers with leaves of shape ``(*s, shard_numel)``.

    Raises:
        TypeError: the argument is not a ``Sharded``, or ``fn`` returns one, which is a part of a value: gather it.
        RuntimeError: outside of ``mesh.spmd`` on simulated ranks.

    Cost:
        The gathers of ``fn``, and for each chunk the gathers and reductions of a backward, with a batch of gradients.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> squares = lambda params, x: fs.gather(params)["fc.w"] ** 2 * x
        >>> mesh.spmd(jacrev(squares))(params, torch.tensor([1.0, 3.0]))["fc"]   # [rank, output, element of the shard]
        tensor([[[4.],
                 [0.]],
        <BLANKLINE>
                [[0.],
                 [4.]]])
    """

    def of_trainable(trainable: Sharded, of: Of) -> Any:
        def exact(p: Sharded) -> Any:
            with new_boundary():
                return of(p)

        rows = torch.func.jacrev(exact, chunk_size=chunk_size)(trainable)

        def mean(tree: Sharded) -> Sharded:
            layout = tree.layout
            return map_items(lambda key, x: x if x is None else mean_of_shard(x, layout.buffers[key], layout), tree)

        return optree.tree_map(mean, rows, is_leaf=is_sharded)

    return _jacobian("jacrev", fn, argnums, of_trainable)


def jacfwd(fn: Callable[..., Any], argnums: int = 0, *, chunk_size: int | None = None) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of the mean over ranks of ``fn``, one forward for each element.

    The values of :func:`jacrev`, in forward mode: for many outputs of few parameters.

    Args:
        fn, argnums: as in :func:`jacrev`.
        chunk_size: how many columns are computed at once; ``None``: those of a whole buffer.

    Returns:
        A function with the arguments of ``fn``, as that of :func:`jacrev`.

    Cost:
        The gathers of ``fn`` with batches of tangents, as many as elements of the whole; one reduce-scatter of the
        columns for each buffer and output.

    Example:
        >>> params = fs.shard({"w": torch.ones(2)}, fs.plan({"w": torch.ones(2)}, fs.simulated_mesh(1)))
        >>> params.layout.mesh.spmd(jacfwd(lambda params: fs.gather(params)["w"] ** 2))(params)["(root)"]
        tensor([[[2., 0.],
                 [0., 2.]]])
    """

    def of_trainable(trainable: Sharded, of: Of) -> Any:
        layout = trainable.layout
        trees = [_columns(of, trainable, buffer, chunk_size) for buffer in layout.buffers.values()]
        return optree.tree_map(lambda *xs: Sharded(zip(layout.buffers, xs, strict=True), layout), *trees)

    return _jacobian("jacfwd", fn, argnums, of_trainable)


def hessian(fn: Callable[..., Tensor], argnums: int = 0, *, chunk_size: int | None = None) -> Callable[..., Any]:
    """Return a function that computes the Hessian of the mean over ranks of ``fn``: whole rows, sharded columns.

    ``jacfwd`` of the gathered ``fs.grad``. For products alone, without the matrix: ``fs.curvature.hessian``.

    Args:
        fn: returns a floating-point scalar, as for :func:`fs.grad`.
        argnums, chunk_size: as in :func:`jacfwd`.

    Returns:
        A function with the arguments of ``fn``. It returns a ``Full``: for each trainable parameter of shape ``s`` a
        ``Sharded`` with leaves of shape ``(*s, shard_numel)``.

    Cost:
        A Hessian-vector product for each element of the whole, in batches.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> cubes = lambda params: (fs.gather(params)["fc.w"] ** 3).sum()
        >>> mesh.spmd(hessian(cubes))(params)["fc.w"]["fc"]   # [rank, row, element of the shard]
        tensor([[[6.],
                 [0.]],
        <BLANKLINE>
                [[0.],
                 [6.]]])
    """

    def whole_gradient(*args: Any, **kwargs: Any) -> Full:
        whole = gather(partition(grad(fn, argnums)(*args, **kwargs))[0], lazy=False)
        # it is the same on every rank, which counts once also where jacfwd adds up
        copies = whole.layout.num_ranks if whole.layout.reduction == "sum" else 1
        return map_items(lambda _, x: x / copies, whole)

    return jacfwd(whole_gradient, argnums, chunk_size=chunk_size)


def _jacobian(
    verb: str, fn: Callable[..., Any], argnums: int, of_trainable: Callable[[Sharded, Of], Any]
) -> Callable[..., Any]:
    @wraps(fn)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        params, place = args[argnums], argnums % len(args)
        check_sharded(verb, params, f"; torch.func.{verb} differentiates with respect to other arguments")
        if not params.layout.mesh.in_spmd:
            raise RuntimeError(f"{verb}: a column belongs to one rank. Call the function under mesh.spmd.")
        trainable, frozen = partition(params)

        def of(p: Sharded) -> Any:
            outputs = fn(*args[:place], merge(p, frozen), *args[place + 1 :], **kwargs)
            if any(map(is_sharded, optree.tree_leaves(outputs, is_leaf=is_sharded))):
                raise TypeError(f"{verb}: the function returns a Sharded. Return fs.gather(...) of it.")
            return outputs

        return of_trainable(trainable, of)

    return jacobian


def _columns(of: Of, params: Sharded, buffer: Buffer, chunk_size: int | None) -> Any:
    """The columns of this rank's shard of ``buffer``, of the mean over ranks, for each output."""
    shard = params[buffer.key]
    elements = torch.arange(buffer.shard_numel, device=shard.device)
    elements = elements + shard_index(buffer, params.layout) * buffer.shard_numel

    def pushed(i: Tensor) -> Any:
        basis = {key: torch.zeros_like(x) for key, x in params.items()} | {buffer.key: (elements == i).to(shard.dtype)}
        return jvp(of, (params,), (Sharded(basis, params.layout),))[1]

    every = vmap(pushed, chunk_size=chunk_size, randomness="same")(torch.arange(buffer.numel, device=shard.device))
    schedule = params.layout.schedules[buffer.key, shard.dtype if shard.is_complex() else None]
    own = lambda x: across(within(x.movedim(0, -1), schedule), schedule).to(schedule.returned)  # noqa: E731
    return optree.tree_map(own, every)
