"""A test of many values as one item of pytest: starting and reporting an item takes longer than many a test does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def looped(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize(name, values)``, in one item; an error names the value."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def of_all(**others: Any) -> None:
            for value in values:
                try:
                    test(**others, **{name: value})
                except Exception as error:
                    raise AssertionError(f"{name}={value!r}: {error}") from error

        signature = inspect.signature(test)
        left = [parameter for key, parameter in signature.parameters.items() if key != name]
        of_all.__dict__["__signature__"] = signature.replace(parameters=left)
        return of_all

    return decorate
