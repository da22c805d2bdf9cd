"""A process group of the simulated accelerator with NCCL's semantics; the bytes are moved by gloo.

A collective runs on a stream of the group, behind the stream that issues it. ``wait`` puts the current stream behind
it, does not block the host, and then drops the operands, which nothing else keeps. Operands are contiguous and on the
device, as NCCL asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device.accelerator import load


class Work(dist.Work):
    """A collective on the group's stream; ``end``: the event behind it."""

    def __init__(self, device: int, end: int, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self._device, self._end, self._operands = device, end, operands

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        extension = load()
        extension.order(self._device, self._end, extension.stream(self._device))
        self._operands = ()
        return True

    def is_completed(self) -> bool:
        return True


_ProcessGroup: Any = dist.ProcessGroup


class SimulatedNccl(_ProcessGroup):
    """What :class:`GroupBackend` asks of a process group, for device tensors; tensors of the host go to gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = load().new_stream()

    # torch asks the backends of C++ for these, which a group in Python has none of

    def getBackendName(self) -> str:  # noqa: N802
        return "simulated_nccl"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("sim")]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        def gather(x: Tensor, out: Tensor) -> Any:
            return self._gloo._allgather_base(out, x.clone())  # in place, where x is a row of out

        return self._run("all_gather", [x], [out], gather)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Any:
        call = lambda x, out: self._gloo._reduce_scatter_base(out, x, opts)  # noqa: E731
        return self._run("reduce_scatter", [x], [out], call)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._run("all_reduce", [], tensors, lambda *xs: self._gloo.allreduce([*xs], opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._run("broadcast", [], tensors, lambda *xs: self._gloo.broadcast([*xs], opts))

    def all_to_all_single(self, out: Tensor, x: Tensor, to: list[int], of: list[int], opts: Any) -> Any:
        call = lambda x, out: self._gloo.alltoall_base(out, x, to, of, opts)  # noqa: E731
        return self._run("all_to_all", [x], [out], call)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        rows = inputs[0] if inputs else []
        call = lambda *xs: self._gloo.scatter([xs[-1]], [[*xs[:-1]]] if rows else [], opts)  # noqa: E731
        return self._run("scatter", rows, outputs, call)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        return self._run("all_gather", inputs, outputs[0], lambda x, *out: self._gloo.allgather([[*out]], [x], opts))

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(opts)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _run(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], call: Callable[..., Any]) -> Any:
        """``call`` with the operands as tensors of the CPU, as one kernel on the stream of the group."""
        operands = [*reads, *writes]
        if all(x.device.type == "cpu" for x in operands):
            return call(*operands)
        for x in operands:
            assert x.device.type == "sim", f"{name}: an operand is on {x.device}"
            assert x.is_contiguous(), f"{name}: an operand is not contiguous"
        extension, device = load(), operands[0].device.index
        extension.order(device, extension.stream(device), self._stream)
        extension.launch(device, self._stream, reads, writes, f"nccl {name}")
        opened = [extension.Opened(x) for x in operands]
        call(*(x.alias for x in opened)).wait()
        end = extension.new_stream()
        extension.order(device, self._stream, end)
        return Work(device, end, operands)


def register() -> None:
    """Make "simulated_nccl" the backend of the device "sim" in this process."""
    if "SIMULATED_NCCL" not in dist.Backend.__dict__:
        dist.Backend.register_backend("simulated_nccl", SimulatedNccl, devices=["sim", "cpu"])
