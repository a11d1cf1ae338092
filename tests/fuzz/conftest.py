"""Fuzz targets run once in the suite, and for `WARMROUTE_FUZZ_SECONDS` each in `make fuzz`.

Every pass of a target draws other examples; a failure of an earlier run is tried first (Hypothesis
keeps it in `.hypothesis`).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.effort import FUZZ_SECONDS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run a target again and again until its time is over; its fixtures stay."""
    end_s = time.monotonic() + FUZZ_SECONDS
    yield
    while time.monotonic() < end_s:
        item.runtest()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for what a target writes."""
    return tmp_path_factory.mktemp("fuzz") / "file"
