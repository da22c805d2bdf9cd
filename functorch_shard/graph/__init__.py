"""``fs.compile``: a whole training step, recorded once as one graph and then run without Python's eager dispatch.

Here are the recordings of a step, whose graphs are run by Python or by a compiler of torch; ``signature`` tells which
calls share one, and what a step reaches besides its arguments; ``recording`` traces the eager program, lazy gathers and
all, into a graph of torch operators and recorded collectives (Note [Recorded] in communication/recorded.py), and reads
it as a schedule; ``cuda_graph`` launches one at once. Imports ``training`` and what is below it; imported by programs
only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.fx import Graph, GraphModule, Node

from ..communication.recorded import AS_FUNCTIONS
from ..containers import KNOWN, place
from ..errors import reject
from ..torch_internals.autograd import being_traced, in_forward_mode, in_transform, untraced
from ..torch_internals.satellites import compiled
from .cuda_graph import Captured, held_on_the_device
from .recording import Recording, StepSchedule, as_inputs, record, schedule_of
from .signature import Call, flatten, modules_outside, refusal, signature_of

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Backend = Callable[[GraphModule, Sequence[Tensor]], Callable[..., Any]]
_AS_IT_RUNS = ("replay", "cudagraphs")  # backends that run the operators of the eager step
_MANY = 8  # recordings of one step, from which a warning says so


def compile(step: Callable[..., Any], *, backend: str | Backend = "inductor") -> Compiled:  # noqa: A001
    """Record ``step`` as one graph at its first call, and run the graph from then on.

    ``compile(step)(*args) == step(*args)``. The eager program is traced, lazy gathers and all: the graph has its
    starts, waits and frees, whatever transforms, clipping and optimizer the step contains. With ``"replay"`` and
    ``"cudagraphs"`` results are bitwise those of ``step``, up to optimizers without a fused kernel; a compiler rounds.

    Tensors and floats in the arguments are inputs of the graph; everything else (integers, strings, dtypes, structure,
    shapes, the modes of modules, attributes of other objects) is fixed in it, and another value is recorded anew, with
    a warning at the ninth. What the step reads from outside is fixed too, and another value is not seen, except the
    modes of modules that it or a function of its file names: Python runs at a recording alone. Tensors that the step
    closes over are read and written at each call.

    Backends of real ranks (:meth:`Mesh.with_backend`) see the collectives of each call; those of simulated ranks see a
    recording alone, since their collectives are arithmetic.

    Inside another transform, compiled function or ``spmd``, and for arguments that require grad, it is ``step`` itself.

    Args:
        step: a function of pytrees of tensors, for example a training step; on simulated ranks, ``mesh.spmd(step)``.
            It returns any pytree. Inside, floats of the arguments are tensors of no dims, in float64.
        backend: ``"replay"`` runs the recorded operators one by one, without Python between them; ``"cudagraphs"``
            on one rank captures them at the second call, and launches them at once; ``"inductor"`` compiles them, in
            seconds to minutes; or another backend of ``torch.compile``, by name or as a function of a graph and inputs.

    Returns:
        A :class:`Compiled`, to be called as ``step``. What the step updates in place (``donate=True``) is returned as
        the object that was passed. Results have no graph of autograd. ``print`` shows what was recorded.

    Raises:
        TypeError: an argument is a subclass of ``Tensor`` or offloaded, an array of another library, has no hash, or is
            an object that holds a tensor and is not a container; all are named. Or a result is such an object.
        NotImplementedError: at a recording, where the step reads a value of a tensor; its cause has the line. Or it
            contains what is done once, before steps: ``plan``, ``shard``, ``init``, ``checkpoint``.
        RuntimeError: at a recording, where ranks recorded different collectives; the message has the first difference.

    Cost:
        A recording takes about three eager steps of Python, and each rank's 32-byte digest is gathered. A call issues
        the collectives of ``step``, except gathers ahead that nothing uses.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> loss = lambda params, x: (fs.gather(params)["fc.w"] * x).sum()
        >>> step = fs.compile(mesh.spmd(fs.grad(loss)), backend="replay")
        >>> step(params, torch.tensor([[1.0, 2.0], [5.0, 6.0]]))["fc"]   # row r = rank r: the mean of both, sharded
        tensor([[3.],
                [4.]])
    """
    return Compiled(step, backend)


class Compiled:
    """A step and its recordings: one for each structure, shapes and dtypes that it was called with."""

    def __init__(self, step: Callable[..., Any], backend: str | Backend) -> None:
        update_wrapper(self, step)
        self._step, self._backend = step, backend
        self._recorded: dict[Any, tuple[Recording, Run]] = {}
        self._modules: list[nn.Module] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = flatten(args, kwargs)
        requires_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call.leaves)
        if requires_grad or in_transform() or in_forward_mode() or being_traced():
            return self._step(*args, **kwargs)
        key = signature_of(call, self._modules)
        try:
            found = self._recorded.get(key)
        except TypeError:  # an argument has no hash
            _check(call)
            raise
        recording, run = found or self._record(call)
        inputs = call.inputs
        recording.show_simulated()
        with torch.no_grad():
            computed = run(as_inputs(inputs))
        increment_version([inputs[i] for i in recording.written])
        return recording.result(computed, inputs)

    def trace(self, *args: Any, **kwargs: Any) -> StepSchedule:
        """Return the schedule of a call with these arguments, which may be on the meta device.

        Nothing is computed, kept or communicated, so ranks are not compared.
        """
        return schedule_of(self._trace(flatten(args, kwargs)))

    @property
    def schedules(self) -> list[StepSchedule]:
        """The schedule of each recording, in their order; ``print`` shows a table."""
        return [schedule_of(recording) for recording, _ in self._recorded.values()]

    def __repr__(self) -> str:
        name = getattr(self._step, "__name__", type(self._step).__name__)
        number = len(self._recorded)
        return f"Compiled({name}, backend={self._backend!r}, {number} recording{'s' * (number != 1)})"

    def __str__(self) -> str:
        return "\n\n".join([repr(self), *map(str, self.schedules)])

    def _trace(self, call: Call) -> Recording:
        with untraced():  # modes see what runs
            return record(self._step, call, for_compiler=self._backend not in _AS_IT_RUNS)

    def _record(self, call: Call) -> tuple[Recording, Run]:
        _check(call)
        if len(self._recorded) == _MANY:
            warnings.warn(_TOO_MANY, stacklevel=3)
        self._modules = modules_outside(self._step)
        key = signature_of(call, self._modules)
        trace = lambda: self._trace(call)  # noqa: E731
        # without a mesh, collectives that do not belong together are found where they meet, over gloo
        recording = call.meshes[0].agree("compile", trace, _lines, _SAME) if call.meshes else trace()
        with untraced():
            run = runner(recording, as_inputs(call.inputs), self._backend)
        self._recorded[key] = recording, run
        return recording, run


def _lines(recording: Recording) -> list[str]:
    return [f"{i}: {op} over {op.axis!r}" for i, op in enumerate(recording.collectives)] + ["end of the step"]


def _check(call: Call) -> None:
    pairs = zip(call.treedef.paths(), call.leaves, strict=True)
    found = [(path, refusal(x)) for path, x in pairs]
    problems = [f"{'args' if path[0] == 0 else 'kwargs'}{place(path[1:])}: {why}" for path, why in found if why]
    reject("compile", problems, _EXPECTED, TypeError)


_EXPECTED = (
    f"Pass plain tensors in the memory of the device. Anything else is fixed in a recording, and needs a hash. {KNOWN}"
)
_TOO_MANY = (
    f"compile: this is recording {_MANY + 1} of one step, and all are kept. Pass numbers that change as floats or "
    "tensors, and batches of one shape."
)
_SAME = (
    "Every rank must call a compiled step with the same structure and shapes, and issue the same collectives in the "
    "same order: no branch of the step may depend on the rank or on its data."
)


def runner(recording: Recording, inputs: Sequence[Tensor], backend: str | Backend) -> Run:
    """A function from the inputs of the graph to its outputs."""
    graph = recording.graph
    if backend in _AS_IT_RUNS:
        direct = Graph()
        direct.output(direct.graph_copy(graph.graph, {}))
        for node in direct.nodes:
            node.target = AS_FUNCTIONS.get(node.target, node.target)
        module = GraphModule(graph, direct)
        replay = lambda tensors: module(*tensors)  # noqa: E731
        if backend == "replay":
            return replay
        return Captured(replay, recording.written, held_on_the_device(graph))
    constants = _constants_as_inputs(graph)
    run = compiled(graph, [*inputs, *constants], backend)
    return lambda tensors: run(*tensors, *constants)


def _constants_as_inputs(graph: GraphModule) -> list[Tensor]:
    """Make the tensors that ``graph`` refers to its last inputs, and return them: compilers may fold constants."""
    held: dict[str, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            held.setdefault(str(node.target), []).append(node)
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1:]
    tensors = []
    for name, nodes in held.items():
        tensors.append(getattr(graph, name))
        with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(None):
            last = [graph.graph.placeholder(name.lower())]
        last[0].meta = dict(nodes[0].meta)
        for node in nodes:
            node.replace_all_uses_with(last[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return tensors
