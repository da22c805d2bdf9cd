"""Programs as graphs: ``make_fx`` on fake tensors, what of a program it refuses, and the compilers of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.random import fork_rng
from torch.utils._python_dispatch import _disable_current_modes

from .autograd import backward_pass
from .tensors import FakeTensor, TorchDispatchMode, arguments_of, identity_of_storage, is_number, is_written
from .transforms import active_modes, being_proxied

aten = torch.ops.aten
_NO_SEED = 0x5EED0FF5EED0FF  # that nobody else would take
# Inductor would put every start just before its wait, and weight gradients and reductions last: the recorded order is
# the one that overlaps and frees. Random numbers are those that the step draws eagerly.
_AS_RECORDED = {"reorder_for_peak_memory": False, "reorder_for_locality": False, "fallback_random": True}
# What Dynamo does with each frame that begins, None outside of compiled functions; torch.compiler.is_compiling is true
# only while it traces. Without this, what it compiles would take lazy tensors. A builtin: it has no frame of its own.
frame_compiler: Callable[[], Any] = eval_frame.get_eval_frame_callback


def reads_values(error: BaseException) -> bool:
    """Return whether torch raised ``error``, by a class of its own, since a program depends on values.

    Of the classes of fake tensors and symbolic shapes none is public; a program's own errors are of other modules.
    """
    return type(error).__module__.startswith("torch.")


class RefusedError(NotImplementedError):
    """An operator that a graph would run otherwise than the program that is traced; the message is for its author."""


ON_VALUES = (
    "Here a value of a tensor is read (.item(), float(), an if, .numpy()), or a shape depends on values (a boolean "
    "mask, nonzero). Only shapes are known when a step is recorded. torch.where and arithmetic work on all values; "
    "return what is to be read, and read it outside of the step."
)
_IN_BACKWARD = (
    "Here random numbers are drawn again in backward, by a torch.utils.checkpoint or fs.remat whose function draws "
    "some: in a graph they would be other ones than in forward. Leave the random part out of what is recomputed, or do "
    "not compile."
)
_GENERATOR = (
    "Here a generator is seeded, or random numbers are drawn from one of the program's own: a graph draws from torch's "
    "default generators, as it runs. Draw before the step and pass the numbers, or seed outside of it. "
    "fs.curvature.randn_like has a seed as argument."
)


_ASSIGNED = (
    "The step assigns {names}. Python runs when a step is recorded, and not when the recording runs: later calls would "
    "assign nothing, and read the old values. Pass such values as arguments, and return the new ones."
)


def refuse_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Raise for an operator that draws random numbers which a graph could not draw."""
    if torch.Tag.nondeterministic_seeded in func.tags and backward_pass() is not None:
        raise RefusedError(_IN_BACKWARD)
    if any(isinstance(x, torch.Generator) for x in (*args, *(kwargs or {}).values())):
        raise RefusedError(_GENERATOR)


def fake_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these without data, of one mode; those that share memory share it here as well."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    numbers = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=numbers)
    return [mode.from_tensor(x.detach(), static_shapes=True) for x in tensors]


def trace(
    fn: Callable[..., list[Tensor]],
    fakes: Sequence[Tensor],
    for_compiler: bool,
    left: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: (),
) -> GraphModule:
    """The operators that ``fn(*fakes)`` runs, below autograd and every transform. No real tensor is changed.

    Args:
        for_compiler: whether optimizers are traced as arithmetic; else as the fused kernels that they run eagerly,
            which torch's compilers refuse.
        left: the tensors that ``fn`` has made and assigned to variables outside of it, with the names of those. If one
            of them has no values, or not those that the program computes, this raises.
    """

    differentiates = torch.is_grad_enabled()

    def traced(*inputs: Tensor) -> list[Tensor]:
        with (
            _generators_untouched(fakes),
            _Recorder(for_compiler) as recorder,
            recorder.writes_undone(),
            torch.set_grad_enabled(differentiates),
        ):
            results = fn(*inputs)
            if names := dict.fromkeys(name for name, x in left() if recorder.lacks_values(x)):
                raise RefusedError(_ASSIGNED.format(names=", ".join(names)))
            return results

    return make_fx(traced)(*fakes)


def traced_for_compiler() -> bool:
    """Whether a tracer records what is computed here, for something else than to run it as it is."""
    return being_proxied() and not traced_as_it_runs()


@contextmanager
def _generators_untouched(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Draw no numbers from the default generators, and refuse to seed them: a graph could not."""
    devices = {x.device for x in inputs if x.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cpu")
    with fork_rng(devices, device_type=kind):
        torch.manual_seed(_NO_SEED)
        yield
        if torch.initial_seed() != _NO_SEED:
            raise RefusedError(_GENERATOR)


def traced_as_it_runs() -> bool:
    """Whether what is traced here will run as it is, and not through a compiler."""
    return any(isinstance(mode, _Recorder) and not mode.for_compiler for mode in active_modes())


class _Recorder(TorchDispatchMode):
    """Around what is traced. It sees every operator; it is on torch's stack, so there is no state of ours."""

    def __init__(self, for_compiler: bool) -> None:
        super().__init__()
        self.for_compiler = for_compiler
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a subclass: what it does below is seen one by one
        refuse_random(func, args, kwargs)
        if torch.Tag.data_dependent_output in func.tags and not any(map(is_number, args[:1])):
            raise RefusedError(ON_VALUES)
        for i, argument in enumerate(arguments_of(func)[: len(args)]):
            if is_written(argument):
                self._keep(args[i])
        if func is aten.add_.Tensor and isinstance((kwargs or {}).get("alpha"), torch.SymFloat):
            return args[0].add_(args[1] * kwargs["alpha"])  # its shape function reads alpha
        return func(*args, **(kwargs or {}))

    def lacks_values(self, x: Tensor) -> bool:
        """Whether a tensor that was made while tracing has no values, or was written to, which is undone."""
        return isinstance(x, FakeTensor) or identity_of_storage(x) in {
            identity_of_storage(y) for y, _ in self._before.values()
        }

    def _keep(self, written: Any) -> None:
        for x in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and id(x) not in self._before:
                with _disable_current_modes():
                    self._before[id(x)] = x, x.detach().clone()

    @contextmanager
    def writes_undone(self) -> Iterator[None]:
        """Put back the values of real tensors, such as a module's own buffers: the graph writes them when it runs."""
        try:
            yield
        finally:
            with _disable_current_modes(), torch.no_grad():
                for x, before in self._before.values():
                    x.copy_(before)


def untraced() -> AbstractContextManager[Any]:
    """A context for arithmetic with real numbers, which is not part of what is traced."""
    return _disable_current_modes()


def assert_when_run(condition: Tensor, message: str) -> None:
    """Have what is traced raise when it runs and ``condition`` is false."""
    torch._assert_async(condition, message)


@contextmanager
def as_under_compiler() -> Iterator[None]:
    """Have ``torch.optim`` take the arithmetic that it shows to compilers, which reads no tensor on the host."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def compile_with(compiler: Callable[..., Any], graph: GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Return ``compiler`` of ``graph``, on fresh fake tensors: those of a trace know the numbers that it read."""
    fakes = fake_copies(inputs)
    with tracing(TracingContext(next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None))):
        return compiler(graph, fakes)


def compile_with_inductor(graph: GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """Return a function of the inputs of ``graph``, in its order of operations."""
    import torch._inductor  # takes seconds

    return compile_with(partial(torch._inductor.compile, options={**_AS_RECORDED, **options}), graph, inputs)


def named_compiler(name: str) -> Callable[..., Any]:
    """Return a backend of ``torch.compile``."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)
