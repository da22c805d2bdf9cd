"""Copies tensors to the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..sharding.lazy_tensor import Lazy


class HostCopies:
    """Tensors to copy to the host: those of an accelerator on a side stream, to pinned memory."""

    def __init__(self) -> None:
        self._pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}

    def copy(self, x: Any) -> Any:
        """Return a copy of ``x``; one of a tensor on an accelerator has its values after :meth:`started` only."""
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        if x.device.type == "cpu" or isinstance(x, Lazy):  # a lazy tensor is gathered
            return x.clone().cpu()
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self._pairs.setdefault(x.device, []).append((copy, x))
        return copy

    def started(self) -> Callable[[], None]:
        """Start the copies; the result waits for them. What the current stream does from now on comes after them."""
        events = []
        for device, pairs in self._pairs.items():
            current, side = torch.accelerator.current_stream(device), torch.Stream(device)
            side.wait_event(current.record_event())
            with side:
                for copy, x in pairs:
                    copy.copy_(x, non_blocking=True)
                    x.record_stream(side)
            events.append(side.record_event())
            current.wait_event(events[-1])  # a donated step may write to what is being copied

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait
