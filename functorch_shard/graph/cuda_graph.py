"""``fs.compile(backend="cudagraphs")``: a recorded step as one CUDA graph, which the host launches at once.

torch's own backend for CUDA graphs captures neither steps that update in place nor those whose results are the next
arguments: it keeps results in the memory of the graph, and waits until they are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


class Captured:
    """``run`` by Python at the first call, which warms up, and as the CUDA graph that is captured at the second.

    The graph writes to inputs where they are; a call with others runs by Python. What is only read is copied into
    memory of the graph, and results are copied out of it.

    Args:
        run: from inputs to results, all on one CUDA device.
        written: the inputs in memory that it writes to.
    """

    def __init__(self, run: Callable[[Sequence[Tensor]], Sequence[Tensor]], written: Collection[int]) -> None:
        self._run, self._written, self._warm = run, written, False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places: list[int] = []
        self._read: dict[int, Tensor] = {}
        self._results: Sequence[Tensor] = ()
        self._done: Any = None  # the last launch

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._warm:
            self._warm = True
            return self._run(inputs)
        places = [inputs[i].data_ptr() for i in self._written]
        with torch.cuda.device(next((x.device for x in inputs), None)):
            graph = self._graph or self._capture(inputs, places)
            if places != self._places:
                return self._run(inputs)
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)  # on another stream, it may be
            for i, x in self._read.items():
                x.copy_(inputs[i])
            graph.replay()
            results = [x.clone() for x in self._results]
            self._done = stream.record_event()
        return results

    def _capture(self, inputs: Sequence[Tensor], places: list[int]) -> torch.cuda.CUDAGraph:
        """Capture the kernels without running them."""
        self._read = {i: x.clone() for i, x in enumerate(inputs) if i not in self._written}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device
            self._results = self._run([self._read.get(i, x) for i, x in enumerate(inputs)])
        self._graph, self._places, self._done = graph, places, torch.cuda.current_stream().record_event()
        return graph


def refuse_host_tensors(graph: GraphModule) -> None:
    """Raise where a capture would fix what is on the CPU."""
    held = lambda node: getattr(graph, str(node.target)) if node.op == "get_attr" else node.meta.get("val")  # noqa: E731
    tensors = [(node, held(node)) for node in graph.graph.nodes]
    host = [node for node, x in tensors if isinstance(x, Tensor) and x.device.type == "cpu"]
    if host:
        first = f"{host[0].name!r} ({host[0].op} {host[0].target})"
        raise NotImplementedError(
            f"compile: backend='cudagraphs' captures graphs whose tensors are all on the device; {len(host)} are on "
            f"the CPU here, first {first}. Pass numbers such as lr as tensors on the device, or use backend='replay'."
        )
