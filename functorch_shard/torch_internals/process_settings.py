"""Settings of torch that hold for the whole process, which programs change for a while or for good.

Note [Process settings]: ``sdpa_kernel``, ``detect_anomaly``, ``parametrize.cached`` and the like set what every thread
reads, and at their end what they found. Of ranks that take turns, one would compute with what another one has set for a
while, and would set it again at its end, for good. So these are exchanged at both ends of a turn. What all ranks have
changed alike when they end stays, as in processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import graph
from torch.backends import mha
from torch.nn.utils import parametrize
from torch.utils import checkpoint

Setting = tuple[Callable[[], Any], Callable[[Any], None]]  # reads it, and writes it


def _of_module(module: Any, name: str) -> Setting:
    return partial(getattr, module, name), partial(setattr, module, name)


_BY_FUNCTIONS = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
)
_BY_NAME = (
    (mha, "_is_fastpath_enabled"),
    (checkpoint, "_enable_checkpoint_early_stop"),
    (checkpoint, "_checkpoint_debug_enabled"),
    (graph, "_allow_mutation_on_saved_tensors_enabled"),
)
_SETTINGS: Sequence[Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.set_anomaly_enabled(*values),
    ),
    *((getattr(torch._C, get), getattr(torch._C, put)) for get, put in _BY_FUNCTIONS if hasattr(torch._C, put)),
    *(_of_module(module, name) for module, name in _BY_NAME if hasattr(module, name)),
]
_CACHE: Sequence[Setting] = [_of_module(parametrize, "_cache_enabled"), _of_module(parametrize, "_cache")]


class ProcessSettings:
    """The settings as they are outside of what this thread runs, or, in other turns, inside of it."""

    def __init__(self) -> None:
        self.values = [read() for read, _ in _SETTINGS]
        self._cache = [parametrize._cache_enabled, dict(parametrize._cache)]  # it is written to

    def exchange(self) -> None:
        now, cache = [read() for read, _ in _SETTINGS], [read() for read, _ in _CACHE]
        for (_, write), value, other in zip(_SETTINGS, self.values, now, strict=True):
            if value != other:  # most are never changed
                write(value)
        for (_, write), value in zip(_CACHE, self._cache, strict=True):
            write(value)
        self.values, self._cache = now, cache


def keep_what_all_changed(ranks: Sequence[ProcessSettings]) -> None:
    """Set what all of ``ranks``, whose last turns have ended, have left alike."""
    for (_, write), first, *others in zip(_SETTINGS, *(rank.values for rank in ranks), strict=True):
        if all(other == first for other in others):
            write(first)


@contextmanager
def own_parametrizations() -> Iterator[None]:
    """A context in which ``parametrize.cached`` keeps what is computed inside alone, and not what was before.

    It knows tensors by their module. Inside, the module has other parameters, or their derivative is another one.
    """
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before
