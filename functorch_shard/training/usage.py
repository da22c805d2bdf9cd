"""Check that a loss depends on the parameters that it is differentiated with respect to; used by ``grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import optree
from torch import Tensor

from ..errors import reject
from ..layout.rank_trees import is_node
from ..torch_internals.autograd import nodes
from .differentiated_leaves import Differentiated

_ADVICE = (
    "model(x) uses the module's own parameters, which are not trained. Gather the parameters and pass them: "
    "functional_call(model, fs.gather(params), (x,)), or fs.apply. Leave out of argnums what the loss is not meant to "
    "depend on."
)


def unused_arguments(
    fn: Callable[..., Any], value: Tensor, given: Differentiated, inputs: Sequence[Tensor]
) -> dict[int, str]:
    """Find the ``Sharded`` and ``Full`` arguments without a leaf that ``value`` depends on: position to message.

    Args:
        fn: the differentiated function, for the message.
        value: its result, inside of the transform that differentiates it.
        given: the arguments to differentiate with respect to.
        inputs: their leaves, as the function was called with them.
    """
    rest = iter(inputs)
    problems = {}
    for i, wanted in given.wanted.items():
        tensors = list(islice(rest, sum(wanted)))
        if tensors and (kind := _parameters_in(given.args[i])) and not depends_on(value, tensors):
            name = getattr(fn, "__name__", type(fn).__name__)
            problems[i] = f"args[{i}]: the result of {name} does not depend on this {kind}"
    return problems


def refuse_unused(problems: Iterable[str]) -> None:
    """Raise if there are any problems of :func:`unused_arguments`."""
    reject("grad", list(problems), _ADVICE)


def is_zero(tree: Any) -> bool:
    """Whether all gradients in ``tree`` are zero."""
    return not any(bool(x.any()) for x in optree.tree_leaves(tree) if isinstance(x, Tensor))


def depends_on(value: Tensor, inputs: Iterable[Tensor]) -> bool:
    """Whether backward from ``value`` would reach one of ``inputs``: a traversal of the graph up to the first."""
    wanted = {id(x): x for x in inputs}
    makers = {x.grad_fn for x in wanted.values()}
    if id(value) in wanted:
        return True
    return any(node in makers or id(getattr(node, "variable", None)) in wanted for node in nodes(value.grad_fn))


def _parameters_in(arg: Any) -> str:
    """The class of the first ``Sharded`` or ``Full`` in ``arg``, or an empty string."""
    leaves = optree.tree_leaves(arg, is_leaf=is_node, none_is_leaf=True)
    return next((type(leaf).__name__ for leaf in leaves if is_node(leaf)), "")
