"""A Redis server that workers find, also where the machine has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.redis_servers import binaries


@pytest.fixture(autouse=True)
def redis_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a server on the PATH, or skip the test."""
    if not binaries():
        pytest.skip("no redis-server here")
    folders = [str(Path(each).parent) for each in binaries().values()]
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], *folders]))
