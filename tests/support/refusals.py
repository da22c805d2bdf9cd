"""What the library says when it refuses something."""

from __future__ import annotations

from typing import Any

import pytest


def refused(fn: Any, *args: Any, **kwargs: Any) -> str:
    """The type and the text of the error that ``fn`` has to raise."""
    with pytest.raises((ValueError, TypeError, RuntimeError, KeyError, OSError, FloatingPointError)) as caught:
        fn(*args, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


def text_of(fn: Any, *args: Any, **kwargs: Any) -> str:
    """The type and the text of the error that ``fn`` raises on this rank, of whatever type; nothing if it does not."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
