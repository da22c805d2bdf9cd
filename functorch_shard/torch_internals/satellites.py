"""What features alone need, and ``import functorch_shard`` does not load.

Graphs (``make_fx`` on fake tensors, what of a program it refuses, and compilers), functions that run again at other
levels of ``torch.func``, and what ranks in threads inherit and share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, overrides
from torch._C import _ensureCUDADeviceGuardSet

# Wrappers of a level have no public form. The tests of remat at each pair of levels fail if their numbers change.
from torch._C._functorch import _unwrap_batched
from torch._guards import TracingContext, tracing  # compilers ask this context for the mode of their fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without values
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx  # documented as an experiment
from torch.nn import Parameter
from torch.random import fork_rng
from torch.utils._python_dispatch import _pop_mode, _push_mode  # without entering a mode again: see inherited

from ..running import running
from .autograd import (
    NO_PASS,
    TorchDispatchMode,
    TransformType,
    active_modes,
    add_batch_dim,
    backward_pass,
    eager_transforms,
    get_unwrapped,
    has_tangents,
    in_forward_mode,
    in_transform,
    levels,
    untraced,
    unwrap_if_dead,
    with_outer_tangents,
)
from .tensors import FakeTensor, arguments_of, identity_of_storage, is_number, maybe_get_level, schema_of, written_by

aten = torch.ops.aten
Transforms = tuple[tuple[str, int], ...]
Run = Callable[[Sequence[Tensor]], "list[Tensor | None]"]
_NO_BATCH = -1
_NO_SEED = 0x5EED0FF5EED0FF  # that nobody else would take
# Inductor would put every start just before its wait, and weight gradients and reductions last: the recorded order is
# the one that overlaps and frees. Random numbers are those that the step draws eagerly.
_AS_RECORDED = {"reorder_for_peak_memory": False, "reorder_for_locality": False, "fallback_random": True}


class RefusedError(NotImplementedError):
    """An operator that a graph would run otherwise than the program that is traced; the message is for its author."""


ON_VALUES = (
    "Here a value of a tensor is read (.item(), float(), an if, .numpy()), or a shape depends on values (a boolean "
    "mask, nonzero). torch.where and arithmetic work on all values; return what is to be read outside of the step."
)
_IN_BACKWARD = (
    "Here random numbers are drawn again in backward, by a torch.utils.checkpoint or fs.remat whose function draws "
    "some: in a graph they would be other ones than in forward. Leave the random part out of what is recomputed, or do "
    "not compile."
)
_GENERATOR = (
    "Here a generator is seeded, or random numbers are drawn from one of the program's own: a graph draws from torch's "
    "default generators, as it runs. Draw before the step and pass the numbers, or seed outside of it."
)
_ASSIGNED = (
    "The step assigns {names}. Python runs when a step is recorded, and not when the recording runs: later calls would "
    "assign nothing, and read the old values. Pass such values as arguments, and return the new ones."
)


def fake_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these without data, of one mode; those that share memory share it here as well."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # without one, ``.item()`` of a fake tensor raises

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


class _Recorder(TorchDispatchMode):
    """Around what is traced. It sees every operator; it is on torch's stack, so there is no state of ours."""

    def __init__(self, for_compiler: bool) -> None:
        super().__init__()
        self.for_compiler = for_compiler
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a subclass: what it does below is seen one by one
        kwargs = kwargs or {}
        if _draws(func, args, kwargs) and backward_pass() != NO_PASS:
            raise RefusedError(_IN_BACKWARD)
        if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            raise RefusedError(_GENERATOR)
        if torch.Tag.data_dependent_output in func.tags and not any(map(is_number, args[:1])):
            raise RefusedError(ON_VALUES)
        for x in written_by(func, args, kwargs):
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and id(x) not in self._before:
                with untraced():
                    self._before[id(x)] = x, x.detach().clone()
        if func is aten.add_.Tensor and isinstance(kwargs.get("alpha"), torch.SymFloat):
            return args[0].add_(args[1] * kwargs["alpha"])  # its shape function reads alpha
        return func(*args, **kwargs)

    def lacks_values(self, x: Tensor) -> bool:
        """Whether a tensor that was made while tracing has no values, or was written to, which is undone."""
        return isinstance(x, FakeTensor) or identity_of_storage(x) in {
            identity_of_storage(y) for y, _ in self._before.values()
        }

    @contextmanager
    def writes_undone(self) -> Iterator[None]:
        """Put back the values of real tensors, such as a module's own buffers: the graph writes them when it runs."""
        try:
            yield
        finally:
            with untraced(), torch.no_grad():
                for x, before in self._before.values():
                    x.copy_(before)


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it draws random numbers; attention is tagged also without dropout, and with the seed of its forward."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    defaults = {x.name: x.default_value for x in schema_of(func).arguments}
    given = defaults | arguments_of(func, args, kwargs)
    return "philox_seed" not in given and given.get("dropout_p") != 0.0


def compiled(graph: GraphModule, inputs: Sequence[Tensor], compiler: str | Callable[..., Any]) -> Any:
    """Compile ``graph`` with a backend of ``torch.compile``, which lists their names in public, and no more.

    On fresh fake tensors: those of a trace know the numbers that it read.
    """
    from torch._dynamo import lookup_backend  # takes seconds

    run = compiler if callable(compiler) else lookup_backend(compiler)
    if compiler == "inductor":
        run = partial(run, config_patches=_AS_RECORDED)
    fakes = fake_copies(inputs)
    with tracing(TracingContext(next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None))):
        return run(graph, fakes)


def active_transforms() -> Transforms:
    """The active transforms of ``torch.func``, outermost first: the name of each, and the size of a vmap's batch."""
    return tuple(
        (level.key().name, level.batch_size() if level.key() == TransformType.Vmap else _NO_BATCH) for level in levels()
    )


def in_common(a: Transforms, b: Transforms) -> Transforms:
    """The first transforms, as far as ``a`` and ``b`` have the same."""
    differ = (i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return a[: next(differ, min(len(a), len(b)))]


def is_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether what is computed from ``tensors`` here is differentiated, in either mode, at any level."""
    tensors = [unwrap_if_dead(x) for x in tensors]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    interpreter = levels()[-1] if in_transform() else None
    if (interpreter is None or interpreter.key() == TransformType.Jvp) and has_tangents(tensors):
        return True
    if interpreter is None:
        return False
    below = [_unwrapped(x, interpreter) for x in tensors]
    # modes at this level do not hold at those below, whose own ones lower() restores
    with torch.enable_grad(), with_outer_tangents(), interpreter.lower():
        return is_differentiated(below)


def constants(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` without their derivatives, at any level."""
    alive = [unwrap_if_dead(x) for x in tensors]
    if in_transform() or in_forward_mode():
        return [x.detach() for x in alive]
    return [x.detach() if x.requires_grad else x for x in alive]  # torch.autograd.functional has batches without detach


def run_in(known: Transforms, run: Run, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``run(tensors)``, but not inside of a vmap that is not one of the ``known`` transforms.

    That vmap is done here: the elements of its batch, such as the rows of a Jacobian, share their random numbers.
    ``tensors`` are constants.
    """
    active = active_transforms()
    if all(size == _NO_BATCH for _, size in active[len(in_common(active, known)) :]):
        return run(tensors)
    interpreter, (_, size) = levels()[-1], active[-1]
    if size == _NO_BATCH:
        with interpreter.lower():
            return run_in(known, run, [_unwrapped(x, interpreter) for x in tensors])
    values, dims = zip(*(_unwrap_batched(x, interpreter.level()) for x in tensors), strict=True)
    with interpreter.lower():
        results = run_in(known, batched(run, dims, 0, size, "same"), values)
    return [None if x is None else add_batch_dim(x, 0, interpreter.level()) for x in results]


def batched(run: Run, in_dims: Sequence[int | None], out_dims: Any, size: int, randomness: str) -> Run:
    """``run`` for each element of a batch of ``size``."""

    def run_batch(tensors: Sequence[Tensor]) -> list[Tensor | None]:
        exist: list[bool] = []

        def one(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            results = run(tensors)
            exist[:] = [x is not None for x in results]
            return tuple(x for x in results if x is not None)

        count = torch.arange(size, device=tensors[0].device)
        results = iter(torch.func.vmap(one, (0, *in_dims), out_dims, randomness=randomness)(count, *tensors))
        return [next(results) if exists else None for exists in exist]

    return run_batch


def tangents_of(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    """The tangents of ``fn`` as ``torch.func.jvp`` returns them, also inside of ``torch.autograd.forward_ad``.

    There ``torch.func.jvp`` would enter a second dual level, unless it is nested in another jvp.
    """
    outer = in_forward_mode() and not eager_transforms.JVP_NESTING
    with eager_transforms.jvp_increment_nesting() if outer else nullcontext():
        tangents = torch.func.jvp(fn, tuple(inputs), tuple(tangents))[1]
    return [unwrap_if_dead(x) for x in tangents]


def _unwrapped(x: Tensor, interpreter: Any) -> Tensor:
    """``x`` without the wrapper of the level of ``interpreter``, and without those of levels that have ended."""
    x = unwrap_if_dead(x)
    return unwrap_if_dead(get_unwrapped(x)) if maybe_get_level(x) == interpreter.level() else x


def inherited(device: torch.device) -> Callable[[tuple[type, ...]], AbstractContextManager[Any]]:
    """Return a context, for other threads, with the grad mode, autocast, modes and stream of this thread.

    Dispatch modes of the classes that it is called with are left out. Modes are pushed and not entered again, as some
    count how often they are. Backward stays in the thread that calls it: a device's thread would wait for one rank, and
    could not run the backward of the others.
    """
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    cached = torch.is_autocast_cache_enabled()
    kinds = [kind for kind in {"cpu", device.type} - {"meta"} if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    functions, dispatch = overrides._get_current_function_mode_stack(), active_modes()
    stream = None if device.type in ("cpu", "meta") else torch.accelerator.current_stream()

    @contextmanager
    def entered(left_out: tuple[type, ...]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))  # first: it sets the others
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, True, cached))
            if stream is not None:
                torch.accelerator.set_stream(stream)
            for mode in functions:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            for mode in dispatch:
                if not isinstance(mode, left_out):
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            yield

    return entered


def around_threads(run: Callable[[], None]) -> None:
    """Call ``run``, whose threads use forward mode and dispatch modes, which torch counts for the process.

    Forward mode has one level for all threads, at whose end every tangent is lost. This jvp holds it until the last
    thread has ended; a jvp inside of another one does not end it. The mode restores what those of threads that end in
    another order than they began leave behind.
    """
    # Torch 2.11 without CUDA reads a guard of the first thread with fake tensors after that thread has ended, and
    # crashes. So the thread that starts the others is the first.
    _ensureCUDADeviceGuardSet()

    def hold(x: Tensor) -> Tensor:
        with running(held=eager_transforms.JVP_NESTING):  # contexts of threads are copies of this one
            run()
        return x

    zero = torch.zeros(())
    with _Restoring():
        torch.func.jvp(hold, (zero,), (zero,))


class _Restoring(TorchDispatchMode):
    """A mode without effect on what threads compute and compile."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
