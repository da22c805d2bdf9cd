"""``grad`` and ``grad_and_value``: gradients of the mean over ranks, with the memory of ``backward()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from ..collectives.sinks import Boundary, inside, new_boundary, sink_here
from ..containers import opened, refuse_opaque
from ..layout.layout import Layout
from ..layout.trees import Full, Sharded, is_node, take_tensors
from ..sharding.gather import mean_of_shard
from ..torch_internals.autograd import (
    Leaves,
    autograd_by_hand,
    eager,
    gradients_or_none,
    has_tangents,
    in_transform,
    leaves_behind,
    leaves_used_by,
    needs_graph,
    outside_inference_mode,
    own_parametrizations,
    was_compiled,
    without_batches,
)
from .usage import OwnRefused, is_unused, refuse_hidden, refuse_unused

Argnums = int | Sequence[int]
Place = tuple[str, Layout]  # of a shard: its buffer's key, and its layout


def grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of the mean over ranks of ``fn``, exact at every order.

    Like ``torch.func.grad``, except for the mean: see :func:`grad_and_value`.

    Args:
        fn, argnums, has_aux: as of :func:`grad_and_value`.

    Returns:
        A function with the arguments of ``fn``. It returns ``gradients``, or ``(gradients, aux)``.

    Raises:
        TypeError, ValueError: as :func:`grad_and_value`.

    Cost:
        As :func:`grad_and_value`.

    Example:
        >>> grad(lambda x, y: (x * y).sum())(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([3., 4.])
    """
    both = grad_and_value(fn, argnums, has_aux)

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
    exact, if the outermost reverse-mode derivative is this one. With respect to any other argument, of which each rank
    has its own, it is that of the sum over ranks of ``fn``: of this rank's value, where no collective lies between.

    ``torch.func.grad_and_value`` runs backward with ``create_graph=True``, which keeps every activation to the end.
    Here backward frees activations as it proceeds, unless the result is differentiated again: inside another
    ``fs.grad`` or ``torch.func.grad``, in ``torch.compile``, under vmap, as on batched ranks, and when an argument
    requires grad. In ``torch.func.jvp`` it does if no operator of ``fn`` needs a graph. Outside of transforms
    results have no graph: to differentiate with respect to a tensor that ``fn`` closes over, pass it as an argument.

    Args:
        fn: returns a floating-point scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        argnums: the positional arguments to differentiate with respect to.
        has_aux: whether ``fn`` returns ``(scalar, aux)``.

    Returns:
        A function with the arguments of ``fn``. It returns ``(gradients, value)``, or ``(gradients, (value, aux))``.
        Gradients have the tree structure of the argument, and for several ``argnums`` are a tuple. Leaves that are not
        trainable - integers, bools, and buffers or parameters frozen in the layout - get ``None``. Trainable leaves
        that ``fn`` does not use get zeros, as in JAX; weight decay moves them (``grads`` of :meth:`Optimizer.step`).

    Raises:
        TypeError: ``fn`` does not return a floating-point scalar tensor (and aux). Or an argument of ``argnums``, or
            aux, holds tensors inside an object that is not a supported container.
        ValueError: ``argnums`` names an argument that was not given, or one twice. Or the result does not depend on any
            leaf of a ``Sharded`` or ``Full`` argument, for example because ``functional_call`` was forgotten.
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
        arguments = [_Argument.of(args[i], i) for i in _positions(argnums, len(args))]
        inputs = [leaf for argument in arguments for leaf in argument.leaves if leaf.wanted]
        used, unused = Leaves(), dict[int, str]()

        def scalar(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
            given: Any = [*args], kwargs
            call, named = cast(Any, optree.tree_map(_of_this_level, given, is_leaf=is_node)) if nested else given
            rest = iter(tensors)
            for argument in arguments:
                call[argument.position] = argument.filled(rest, keep_others=True)
            with own_parametrizations():
                value, aux = _check_scalar(fn(*call, **named), has_aux)
            if aux is not None:
                has_graph = lambda x: isinstance(x, Tensor) and (x.requires_grad or without_batches(x) is not x)  # noqa: E731
                refuse_opaque("grad", opened(aux), "aux", matters=has_graph)
            used.update(leaves_behind([value]))
            rest = iter(tensors)
            for argument in arguments:
                own = [next(rest) for leaf in argument.leaves if leaf.wanted]
                if own and argument.kind and not any(id(x) in used for x in own):
                    unused[argument.position] = argument.kind
            if unused and not sink_here().anchors:
                given_ids = {id(x) for x in tensors}
                refuse_unused(fn, unused, (x for i, x in used.items() if i not in given_ids))
            elif unused:  # others may use what all ranks gathered: wait for the gradients
                sink_here().nothing = -0.0
            return value, aux

        nested = inside() or _needs_graph(arguments, args, kwargs)
        differentiate = _with_graph if nested else _without_graph
        grads, value, aux, boundary, hidden = differentiate(scalar, inputs, used)
        _average_each(grads, inputs, boundary)
        rest = iter(grads)
        trees = [argument.filled(rest, keep_others=False) for argument in arguments]
        if unused:
            zero = [a.position for a, x in zip(arguments, trees, strict=True) if is_unused(x, reduced=not nested)]
            refuse_unused(fn, {i: kind for i, kind in unused.items() if i in zero}, hidden)
        if hidden and not inside():
            refuse_hidden(hidden, grads, [x.place for x in inputs])
        return trees[0] if isinstance(argnums, int) else tuple(trees), (value, aux) if has_aux else value

    return gradient_and_value


class Leaf(NamedTuple):
    """A leaf of an argument, and of a shard its buffer's key and its layout.

    ``wanted``: whether it has a gradient. ``wide``: whether its gradient has a wider dtype until the mean is taken.
    """

    value: Any
    wanted: bool
    place: Place | None = None
    wide: bool = False


@dataclass(frozen=True)
class _Argument:
    """An argument to differentiate with respect to: its nodes, a ``Sharded`` or ``Full`` as one, and its leaves."""

    position: int
    nodes: list[Any]
    treedef: Any
    leaves: list[Leaf]

    @staticmethod
    def of(arg: Any, i: int) -> _Argument:
        tree = _open(arg)
        nodes, treedef = optree.tree_flatten(tree, is_leaf=is_node, none_is_leaf=True)
        leaves = [leaf for node in nodes for leaf in _leaves_of(node)]
        if not all(isinstance(leaf.value, Tensor) for leaf in leaves):
            refuse_opaque("grad", tree, f"args[{i}]")
        return _Argument(i, nodes, treedef, leaves)

    @property
    def kind(self) -> str:
        """The class of the first ``Sharded`` or ``Full``, or an empty string."""
        return next((type(node).__name__ for node in self.nodes if is_node(node)), "")

    def filled(self, rest: Iterator[Any], keep_others: bool) -> Any:
        """The argument with the next of ``rest`` in place of leaves that have a gradient, and ``None`` of others."""
        values = iter([next(rest) if x.wanted else x.value if keep_others else None for x in self.leaves])
        filled = [
            type(node)([(key, next(values)) for key in node], node.layout) if is_node(node) else next(values)
            for node in self.nodes
        ]
        return optree.tree_unflatten(self.treedef, filled)


def _open(arg: Any) -> Any:
    return arg if isinstance(arg, (Sharded, Full, Tensor)) else opened(arg)


def _leaves_of(node: Any) -> list[Leaf]:
    if not is_node(node):
        return [Leaf(node, _differentiable(node))]
    layout, leaves = node.layout, []
    for key, x in node.items():
        buffer = layout.buffers[key if isinstance(node, Sharded) else layout.key_of[key]]
        wanted = buffer.trainable and _differentiable(x)
        if isinstance(node, Sharded):
            schedule = layout.schedules[key, None]
            leaves.append(Leaf(x, wanted, (key, layout), schedule.carried != schedule.stored))
        else:
            leaves.append(Leaf(x, wanted))
    return leaves


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _positions(argnums: Argnums, num_args: int) -> list[int]:
    """The positions that ``argnums`` names, from 0."""
    chosen = [argnums] if isinstance(argnums, int) else [*argnums]
    found = [*dict.fromkeys(i % num_args for i in chosen if -num_args <= i < num_args)]
    if not chosen or len(found) < len(chosen):
        raise ValueError(
            f"grad: argnums: got {argnums}, expected one or more different positions, but the function was called with "
            f"{num_args} positional arguments"
        )
    return found


def _check_scalar(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """The scalar and ``aux`` that a differentiated function returned; raises where it returned something else."""
    value, aux = result if has_aux else (result, None)
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"grad: expected the function to return a floating-point scalar tensor, got {got}")
    return value, aux


Scalar = Callable[[Sequence[Tensor]], "tuple[Tensor, Any]"]
Derivative = tuple[list[Tensor], Tensor, Any, Boundary, list[Tensor]]  # gradients, value, aux; leaves of no argument


def _with_graph(scalar: Scalar, inputs: Sequence[Leaf], used: Leaves) -> Derivative:
    """Differentiate with torch.func, whose aux may hold tensors only."""
    inner: Any = None

    def tensors_only(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        nonlocal inner
        _allow_wider_gradients(tensors, inputs)
        with new_boundary() as boundary:
            value, aux = scalar(tensors)
        of_aux, put_back = take_tensors(aux)
        inner = boundary, put_back, needs_graph(value)
        return value, of_aux

    given = [x.value for x in inputs]
    # in inference mode, torch.func of 2.11 gives silent zeros
    with outside_inference_mode(), autograd_by_hand():
        value, pull, aux = cast("tuple[Tensor, Any, Any]", torch.func.vjp(tensors_only, given, has_aux=True))
        boundary, put_back, keep = inner
        keep = keep or inside()
        (grads,) = pull(torch.ones_like(value), retain_graph=keep, create_graph=keep)
    outside, own = without_batches(value), [x for x in map(without_batches, given) if type(x) is Tensor]
    known = leaves_behind(own)
    hidden = [x for i, x in leaves_used_by(outside).items() if i not in known] if type(outside) is Tensor else []
    return list(grads), value, put_back(aux), boundary, hidden


def _without_graph(scalar: Scalar, inputs: Sequence[Leaf], used: Leaves) -> Derivative:
    """Differentiate with one backward that frees activations as it proceeds."""
    with torch.enable_grad():
        tensors = [x.value.detach().requires_grad_() for x in inputs]
        _allow_wider_gradients(tensors, inputs)
        with new_boundary(tensors) as boundary:
            value, aux = scalar(tensors)
        anchors = boundary.take_anchors()
        if anchors and _has_copies(inputs):
            from ..sharding.overlapped_means import overlap_means  # with replicas only

            overlap_means(value, anchors, tensors, [x.place for x in inputs], boundary.averaged)
        outputs = [x for x in (value, *anchors) if x.requires_grad]
        seeds = [torch.ones_like(x) for x in outputs]
        grads: Sequence[Tensor | None] = [None] * len(tensors)
        if tensors and outputs:
            # under a mode torch.compile compiles another graph, and saves other tensors
            with nullcontext() if was_compiled(value) else OwnRefused(frozenset(used)):
                grads = gradients_or_none(outputs, seeds, tensors)
        totals = [boundary.total(i, x, grad) for i, (x, grad) in enumerate(zip(tensors, grads, strict=True))]
    if aux is not None:
        of_aux, put_back = take_tensors(aux)
        aux = put_back(x.detach() for x in of_aux)
    own = {id(x) for x in tensors}
    hidden = [x for i, x in used.items() if i not in own]
    return totals, value.detach(), aux, boundary, hidden


def _allow_wider_gradients(tensors: Sequence[Tensor], inputs: Sequence[Leaf]) -> None:
    """Keep autograd from casting gradients to the stored dtype before they are divided, see Note [Boundary]."""
    for x, leaf in zip(tensors, inputs, strict=True):
        if leaf.wide:
            x.grad_dtype = None


def _needs_graph(arguments: Sequence[_Argument], args: Sequence[Any], kwargs: Any) -> bool:
    """Whether the result is differentiated, batched or traced by the caller."""
    if in_transform():
        return True
    wanted = {argument.position for argument in arguments}
    rest = [x for i, x in enumerate(args) if i not in wanted]
    others: Any = [_open(x) for x in (*rest, *kwargs.values())]
    leaves = [leaf.value for argument in arguments for leaf in argument.leaves]
    tensors = [x for x in (*leaves, *optree.tree_leaves(others)) if isinstance(x, Tensor)]
    # torch.func differentiates tensors from inference mode; plain autograd gives zeros or an error.
    if torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors):
        return True
    return (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or has_tangents(tensors)


def _of_this_level(x: Any) -> Any:
    """Return a view of ``x`` that ``fn`` may differentiate by, and call ``requires_grad_()`` of, as without vjp."""
    if type(x) is not Tensor or not _differentiable(x):
        return x
    return x.view_as(x).requires_grad_() if x.requires_grad else x.view_as(x)


def _average_each(grads: list[Tensor], inputs: Sequence[Leaf], boundary: Boundary) -> None:
    """Replace each gradient of a shard by its mean over ranks, one by one: at most one of them is held twice."""
    order = reversed(range(len(inputs)))
    if _has_copies(inputs):
        from ..sharding.overlapped_means import order_of_means

        order = order_of_means([x.place for x in inputs])
    for i in order:
        if (place := inputs[i].place) and i not in boundary.averaged:
            key, layout = place
            in_place = boundary.totals.pop(i, None) is not None
            grads[i] = mean_of_shard(grads[i], layout.buffers[key], layout, in_place)


def _has_copies(inputs: Sequence[Leaf]) -> bool:
    return any(x.place[1].num_ranks > x.place[1].num_shards for x in inputs if x.place)
