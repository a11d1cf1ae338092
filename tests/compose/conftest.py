"""The emulated stack, started once for all that look at it while it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.runner import Stack
from tests.compose.stacks import emulated_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service of compose.yaml but Grafana, healthy."""
    with emulated_stack(tmp_path_factory.mktemp("compose")) as running:
        running.up()
        yield running
