"""The emulated stack, started once for all that look at it while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.runner import Stack
from tests.compose.stacks import emulated_stack


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one worker run all that look at the stack: another would start one of its own."""
    for item in items:
        if (
            "stack" in getattr(item, "fixturenames", ())
            and Path(__file__).parent in item.path.parents
        ):
            item.add_marker(pytest.mark.xdist_group("compose"))


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service of compose.yaml but Grafana, healthy."""
    with emulated_stack(tmp_path_factory.mktemp("compose")) as running:
        running.up()
        yield running
