"""What torch changes for the whole process while it differentiates or traces is known, so that turns exchange it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import grad, jacrev, jvp, linearize, vmap
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from functorch_shard.torch_internals.while_it_runs import NAMES

# Backward sets this one, and at its end False: no backward of eager autograd reads it.
UNREAD = {"torch._dynamo.compiled_autograd.active_disable_ctx"}
State = dict[str, Any]
SEEN: list[State] = []


def state_of_torch() -> State:
    """Every global of torch's modules, and the methods of ``nn.Module``, by name."""
    modules = {name: x for name, x in sys.modules.items() if name.partition(".")[0] == "torch"}
    items = [(n, vars(module)) for n, module in modules.items() if isinstance(module, ModuleType)]
    items.append(("torch.nn.Module", dict(vars(nn.Module))))
    return {f"{name}.{key}": x for name, namespace in items for key, x in [*namespace.items()]}


@torch.library.custom_op("while_it_runs::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    SEEN.append(state_of_torch())
    return x.clone()


class Look(Function):
    """The identity; it is called, as a collective is, with the values that a transform or a tracer has."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return look(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return Look.apply(tangent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Look.apply(gradient)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Look.apply(x), in_dims[0]


LINEAR = nn.Linear(2, 2).requires_grad_(False)
PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "linearize": lambda f, x: linearize(f, x)[1](x),
    "make_fx": lambda f, x: make_fx(grad(f))(x),
    "jvp": lambda f, x: jvp(jacrev(f), (x,), (x,)),
    "vmap": lambda f, x: vmap(grad(f))(x[None]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_no_other_state_of_the_process_is_set_while_torch_differentiates_or_traces(name: str) -> None:
    run = lambda: PROGRAMS[name](lambda x: Look.apply(LINEAR(x)).sin().sum(), torch.ones(2))  # noqa: E731
    run()  # imports, and fills caches
    SEEN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names that torch.distributed deprecates
        before, _, after = state_of_torch(), run(), state_of_torch()
    inside = {key for seen in SEEN for key in seen if seen[key] is not before.get(key)}
    set_for_a_while = {key for key in inside if before.get(key) is after.get(key)}
    SEEN.clear()
    known = {f"{module.__name__}.{key}" for module, key in NAMES} | UNREAD
    patched = {key for key in set_for_a_while if callable(before.get(key))}  # by fx, which tells which
    assert set_for_a_while - patched - known == set()
    assert patched <= {"torch.nn.Module.__call__", "torch.nn.Module.__getattr__", *_wrapped_for_fx()}


def _wrapped_for_fx() -> set[str]:
    """Functions that torch's own modules have given to ``fx.wrap``."""
    table = _symbolic_trace._wrapped_fns_to_patch
    return {f"{namespace['__name__']}.{name}" for (_, name), namespace in table.items()}
