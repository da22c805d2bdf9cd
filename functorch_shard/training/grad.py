"""``grad`` and ``grad_and_value``: gradients of the mean over ranks, with the memory of ``backward()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import inside, sink_here
from ..containers import opened, refuse_opaque
from ..eager import eager
from ..layout.packing import sparse_explained
from ..layout.trees import take_tensors
from ..sharding.overlapped_means import Place, order_of_means, overlap_means
from ..sharding.reduction import mean_of_shard
from ..torch_internals.autograd import gradients_or_none, nodes, outside_inference_mode
from ..torch_internals.lowering import has_tangents
from ..torch_internals.process_settings import own_parametrizations
from ..torch_internals.transforms import autograd_by_hand, in_forward_mode_only, in_transform, without_batches
from .argnums import Argnums, as_asked, check_scalar, positions
from .boundary import Boundary, new_boundary, plus
from .differentiated_leaves import Differentiated, carried_wider, places_of
from .forward_over_reverse import grad_and_value_freeing
from .usage import (
    graph_of,
    is_unused,
    leaves_of,
    own_parameters_refused,
    refuse_hidden,
    refuse_strided,
    refuse_unused,
    unused_arguments,
)


def grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of the mean over ranks of ``fn``, exact at every order.

    Like ``torch.func.grad``, except for the mean: see :func:`grad_and_value`.

    Args:
        fn: returns a floating-point scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        argnums: the positional arguments to differentiate with respect to, as in ``torch.func.grad``.
        has_aux: whether ``fn`` returns ``(scalar, aux)``.

    Returns:
        A function with the arguments of ``fn``. It returns gradients with the tree structure of the argument (a tuple
        for several ``argnums``), or ``(gradients, aux)``. Leaves that are not trainable - integers, bools, and buffers
        or parameters that are frozen in the layout - get ``None``. Trainable leaves that ``fn`` does not use get zeros,
        as in ``torch.func.grad`` and JAX, and weight decay applies to them: see ``grads`` of :meth:`Optimizer.step`.

    Raises:
        TypeError, ValueError: as :func:`grad_and_value`.

    Cost:
        As :func:`grad_and_value`.

    Example:
        >>> grad(lambda x, y: (x * y).sum())(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([3., 4.])
    """
    both = grad_and_value(fn, argnums, has_aux)

    @eager
    @wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        grads, value = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def grad_and_value(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of the mean over ranks of ``fn``, and the value on this rank.

    With respect to a ``Sharded`` argument, it is the gradient with respect to the whole value of which each rank holds
    a part; copies on several ranks are one value (``reduction="sum"``: the gradient of the sum over ranks). ``fn`` is
    differentiated with exact linear maps: the transpose of ``gather`` is ``psum_scatter``. Then gradients are summed
    over copies and divided by the number of ranks, once. So derivatives through gradients, training steps and norms are
    exact, if the outermost reverse-mode derivative is this one. With respect to any other argument it is the gradient
    of this rank's own value, as in ``torch.func.grad_and_value``.

    ``torch.func.grad_and_value`` runs backward with ``create_graph=True``, which keeps every activation to the end.
    Here backward frees activations as it proceeds, unless the result is differentiated again: inside another
    ``fs.grad`` or ``torch.func.grad``, in ``torch.compile``, in inference mode, and when an argument requires grad,
    this is ``torch.func.grad_and_value``. Otherwise results have no graph: to differentiate with respect to a tensor
    that ``fn`` closes over, pass it as an argument. Inside of ``torch.func.jvp`` on real ranks backward frees
    activations too, if all operators of ``fn`` are known to need no graph for that.

    Args:
        fn: returns a floating-point scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        argnums: the positional arguments to differentiate with respect to.
        has_aux: whether ``fn`` returns ``(scalar, aux)``.

    Returns:
        A function with the arguments of ``fn``. It returns ``(gradients, value)``, or ``(gradients, (value, aux))``.
        Leaves that are not trainable - integers, bools, and buffers or parameters frozen in the layout - get ``None``.

    Raises:
        TypeError: ``fn`` does not return a floating-point scalar tensor (and aux). Or an argument of ``argnums``, or
            aux, holds tensors inside an object that is not a supported container.
        ValueError: ``argnums`` names an argument that was not given, or one twice. Or the result does not depend on any
            leaf of a ``Sharded`` or ``Full`` argument, for example because ``functional_call`` was forgotten. Or the
            gradient of a gathered parameter is sparse.
            Or, under ``functional_call``, a parameter was read after forward had returned; or the result depends on a
            tensor with a hook that is not an argument.
        RuntimeError: backward uses a module's own parameters in place of the gathered ones: use :func:`bind`.

    Cost:
        The collectives of ``fn`` and their transposes; on real ranks also those of units that were gathered and not
        used, because another rank may have used them. With replicas one all-reduce of the shard per trainable buffer.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> loss = lambda params, x: (fs.gather(params)["fc.w"] * x).sum()
        >>> grads, value = mesh.spmd(grad_and_value(loss))(params, torch.tensor([[1.0, 2.0], [5.0, 6.0]]))
        >>> grads["fc"], value      # the mean of both rows, sharded; each rank's own loss
        (tensor([[3.],
                [4.]]), tensor([ 3., 11.]))
    """

    @eager
    @wraps(fn)
    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        chosen = positions(argnums, len(args))
        given = Differentiated.of(_opened(args, chosen), chosen)
        unused: dict[int, str] = {}

        def scalar(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
            with own_parametrizations():
                value, aux = check_scalar(fn(*given.with_inputs(tensors), **kwargs), has_aux)
            refuse_opaque("grad", opened(aux), "aux", matters=_has_graph)
            unused.update(unused_arguments(fn, value, given, tensors))
            if unused and not sink_here().anchors:
                refuse_unused(unused.values())
            elif unused:  # others may use what all ranks gathered: wait for the gradients
                sink_here().nothing = -0.0
            return value, aux

        places, nested = given.of_each(places_of), inside() or _needs_graph((args, kwargs))
        differentiate = _with_graph if nested else _without_graph
        grads, value, aux, boundary, leaves = differentiate(places, scalar, given.inputs, given.of_each(carried_wider))
        _average_each(grads, places, boundary)
        trees = given.gradients(grads)
        refuse_unused(unused[i] for i, tree in trees.items() if i in unused and is_unused(tree, reduced=not nested))
        if not inside():
            refuse_hidden(leaves, grads, places)
        return as_asked([*trees.values()], argnums), (value, aux) if has_aux else value

    return gradient_and_value


Scalar = Callable[[Sequence[Tensor]], "tuple[Tensor, Any]"]
Derivative = tuple[list[Tensor], Tensor, Any, Boundary, list[Tensor]]  # gradients, value, aux; the value's leaves


def _with_graph(
    places: Sequence[Place | None], scalar: Scalar, inputs: Sequence[Tensor], wide: Sequence[bool]
) -> Derivative:
    """Differentiate with torch.func, whose aux may hold tensors only."""
    put_back: list[Callable[..., Any]] = []
    boundaries: list[Boundary] = []

    def tensors_only(inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        _allow_wider_gradients(inputs, wide)
        with new_boundary() as boundary:
            value, aux = scalar(inputs)
        refuse_strided(nodes(value.grad_fn), places)
        tensors, rebuild = take_tensors(aux)
        put_back.append(rebuild)
        boundaries.append(boundary)
        return value, tensors

    # in inference mode, torch.func of 2.11 gives silent zeros
    with sparse_explained("grad"), outside_inference_mode(), autograd_by_hand():
        if in_forward_mode_only() and not inside():
            grads, (value, aux) = grad_and_value_freeing(tensors_only)(inputs)
        else:
            grads, (value, aux) = torch.func.grad_and_value(tensors_only, has_aux=True)(inputs)
    return list(grads), value, put_back[-1](aux), boundaries[-1], leaves_of(graph_of(value), inputs)


def _without_graph(
    places: Sequence[Place | None], scalar: Scalar, inputs: Sequence[Tensor], wide: Sequence[bool]
) -> Derivative:
    """Differentiate with one backward that frees activations as it proceeds."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        _allow_wider_gradients(inputs, wide)
        with new_boundary(inputs) as boundary:
            value, aux = scalar(inputs)
        anchors = boundary.take_anchors()
        overlap_means(value, anchors, inputs, places)
        outputs = [x for x in (value, *anchors) if x.requires_grad]
        if inputs and outputs:
            with sparse_explained("grad"), own_parameters_refused(value):
                grads = gradients_or_none(outputs, [torch.ones_like(x) for x in outputs], inputs)
        else:
            grads = [None] * len(inputs)
        grads = [_sum(x, boundary, i, grad) for i, (x, grad) in enumerate(zip(inputs, grads, strict=True))]
    tensors, put_back = take_tensors(aux)
    graph = graph_of(value)
    refuse_strided(graph, places)
    return grads, value.detach(), put_back(x.detach() for x in tensors), boundary, leaves_of(graph, inputs)


def _sum(x: Tensor, boundary: Boundary, i: int, grad: Tensor | None) -> Tensor:
    """The gradient with respect to ``x``, input ``i``, from ``grad`` and the reductions, which are overwritten."""
    total = boundary.totals.get(i)
    if total is not None:
        return plus(total, grad)
    if grad is not None:
        return grad
    return torch.full_like(x, boundary.nothing)


def _allow_wider_gradients(inputs: Sequence[Tensor], wide: Sequence[bool]) -> None:
    """Keep autograd from casting gradients to the stored dtype before they are divided, see Note [Boundary]."""
    for x, flag in zip(inputs, wide, strict=True):
        if flag:
            x.grad_dtype = None


def _needs_graph(call: Any) -> bool:
    """Whether the result is differentiated, batched or traced by the caller."""
    if in_transform():
        return True
    tensors, _ = take_tensors(call)
    # torch.func differentiates tensors from inference mode; plain autograd gives zeros or an error.
    if torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors):
        return True
    outer = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return outer or has_tangents(tensors)


def _opened(args: Sequence[Any], chosen: Sequence[int]) -> tuple[Any, ...]:
    """The arguments; those of ``chosen`` as trees in which every tensor is a leaf."""
    trees = tuple(opened(x) if i in chosen else x for i, x in enumerate(args))
    for i in chosen:
        refuse_opaque("grad", trees[i], f"args[{i}]")
    return trees


def _has_graph(x: Any) -> bool:
    """Whether ``x`` is part of the differentiated graph, and not valid outside of it."""
    return isinstance(x, Tensor) and (x.requires_grad or without_batches(x) is not x)


def _average_each(grads: list[Tensor], places: Sequence[Place | None], boundary: Boundary) -> None:
    """Replace each gradient of a shard by its mean over ranks, one by one: at most one of them is held twice.

    In the order of Note [Overlapped means].
    """
    for i in order_of_means(places):
        if (place := places[i]) is not None and i not in boundary.averaged:
            key, layout = place
            in_place = boundary.totals.pop(i, None) is not None
            grads[i] = mean_of_shard(grads[i], layout.buffers[key], layout, in_place)
