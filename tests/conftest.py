"""What all tests share: ranks that start from a server which has loaded what they use, and kinds of ranks."""

from __future__ import annotations

import pytest

from tests.support.fork_server import preload
from tests.support.ranks import DEFAULT, Ranks


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the server of this process, at once, so that it loads while the first tests run."""
    preload()


@pytest.fixture(params=DEFAULT, ids=str)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Simulated ranks in different numbers, and real ones; ``parametrize("ranks", ...)`` has others in their place."""
    return request.param
