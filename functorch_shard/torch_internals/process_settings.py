"""The cache of ``parametrize.cached``, which torch keeps for the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.utils import parametrize


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
