"""Log what takes long, by ``logging.getLogger("functorch_shard")``: rank 0 as information, the others for debugging."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


@contextmanager
def logged(what: str, path: str | PathLike[str], rank: int = 0) -> Iterator[None]:
    """Log that ``what`` begins, and how many seconds it took when it succeeds."""
    logger, level = logging.getLogger("functorch_shard"), logging.DEBUG if rank else logging.INFO
    logger.log(level, "%s %s", what, path)
    began = time.monotonic()
    yield
    logger.log(level, "%s %s: %.1f s", what, path, time.monotonic() - began)
