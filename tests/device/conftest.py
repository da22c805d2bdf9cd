"""Tests on a simulated accelerator, which is compiled once for each machine and version of torch."""

from __future__ import annotations

import pytest

from tests.device.accelerator import build, has_compiler


@pytest.fixture(scope="session", autouse=True)
def accelerator() -> None:
    """Compile it, before the time of a test runs; the only reason to skip is a machine without a C++ compiler."""
    if not has_compiler():
        pytest.skip("the simulated accelerator needs a C++ compiler: c++, or what CXX names")
    build()
