"""``fs.compile(backend="cudagraphs")``: a recorded step as one CUDA graph, which the host launches at once.

torch's own backend for CUDA graphs captures neither steps that update in place nor those whose results are the next
arguments: it keeps results in the memory of the graph, and waits until they are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


class Captured:
    """``run`` by Python at the first call, which warms up, and as the CUDA graph that is captured at the second.

    The graph writes to inputs, and uses tensors of the module, where they are; a call with others runs by Python. What
    is only read is copied into memory of the graph, and results are copied out of it, each into memory of its own.

    Args:
        run: from inputs to results, all on one CUDA device.
        written: the inputs in memory that it writes to.
        held: the tensors of the module.
    """

    def __init__(
        self, run: Callable[[Sequence[Tensor]], Sequence[Tensor]], written: Collection[int], held: Sequence[Tensor]
    ) -> None:
        self._run, self._written, self._held, self._warm, self._lock = run, written, held, False, Lock()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places: list[int] = []
        self._read: dict[int, Tensor] = {}
        self._results: Sequence[Tensor] = ()
        self._done: Any = None  # the last launch

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._warm:
            self._warm = True
            return self._run(inputs)
        places = [x.data_ptr() for x in (*(inputs[i] for i in self._written), *self._held)]
        with self._lock, torch.cuda.device(next((x.device for x in inputs), None)):
            graph = self._graph or self._capture(inputs, places)
            if places != self._places:
                return self._run(inputs)
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)  # on another stream, it may be
            for i, x in self._read.items():
                x.copy_(inputs[i].as_strided(x.shape, (1,)))
            graph.replay()
            results = [x.clone() for x in self._results]
            self._done = stream.record_event()
        return results

    def _capture(self, inputs: Sequence[Tensor], places: list[int]) -> torch.cuda.CUDAGraph:
        """Capture the kernels without running them."""
        with torch.inference_mode(False), torch.no_grad():  # later calls may be outside of it
            self._read = {i: _memory_of(x).clone() for i, x in enumerate(inputs) if i not in self._written}
        views = {i: memory.as_strided(inputs[i].shape, inputs[i].stride()) for i, memory in self._read.items()}
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # torch's own may be of another device
        # other threads may use the device; and torch stays on the stream of a capture that fails
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._results = self._run([views.get(i, x) for i, x in enumerate(inputs)])
        self._graph, self._places, self._done = graph, places, torch.cuda.current_stream().record_event()
        return graph


def _memory_of(x: Tensor) -> Tensor:
    """All elements from the first to the last of ``x``, which a step may have recorded strides of, as one dim."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1 if x.numel() else 0,), (1,))


def held_on_the_device(graph: GraphModule) -> list[Tensor]:
    """The tensors that ``graph`` holds; raise where a capture would fix what is on the CPU."""
    held = {node: getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"}
    tensors = [(node, held.get(node, node.meta.get("val"))) for node in graph.graph.nodes]
    host = [node for node, x in tensors if isinstance(x, Tensor) and x.device.type == "cpu"]
    if host:
        first = f"{host[0].name!r} ({host[0].op} {host[0].target})"
        raise NotImplementedError(
            f"compile: backend='cudagraphs' captures graphs whose tensors are all on the device; {len(host)} are on "
            f"the CPU here, first {first}. Pass numbers such as lr as tensors on the device, or use backend='replay'."
        )
    return [x for x in held.values() if isinstance(x, Tensor)]
