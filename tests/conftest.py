"""What all tests share: ranks that start from a server which has loaded what they use."""

from __future__ import annotations

import pytest

from tests.support.fork_server import preload


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the server of this process, at once, so that it loads while the first tests run."""
    preload()
