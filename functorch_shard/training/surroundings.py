"""What a function depends on beside its inputs: the state of the random number generators, and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


def surroundings(
    tensors: Sequence[Tensor], random: bool, others: Sequence[torch.Generator] = ()
) -> Callable[[], AbstractContextManager[None]]:
    """A context, as often as it is called, with the surroundings of now, on the devices of ``tensors`` and the CPU.

    ``random``: with their generators and ``others`` too, which go on afterwards as if nothing had been drawn.
    """
    kinds = sorted({x.device.type for x in tensors} - {"cpu", "meta"})
    casts = {kind: _cast(kind) for kind in ("cpu", *kinds)}
    draws = _generators(tensors, kinds, others) if random else None

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, (enabled, dtype) in casts.items():
                if (enabled, dtype) != _cast(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            if draws is not None:
                stack.enter_context(draws())
            yield

    return again


def _cast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _generators(
    tensors: Sequence[Tensor], kinds: Sequence[str], others: Sequence[torch.Generator]
) -> Callable[[], AbstractContextManager[None]]:
    state, (devices, states) = torch.get_rng_state(), get_device_states(*tensors) if kinds else ([], [])
    own = [(generator, generator.get_state()) for generator in others]

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng([*set(devices)], device_type=kinds[0] if kinds else "cpu"), _as_now(others):
            torch.set_rng_state(state)
            for generator, before in own:
                generator.set_state(before)
            if kinds:
                set_device_states(devices, states, device_type=kinds[0])
            yield

    return again


@contextmanager
def _as_now(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """A context at whose end they go on as if nothing had been drawn inside."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
