"""What tests of load have in common: the collector leaves alone what was imported."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Freeze all objects: a replay collects garbage first, 0.4 s of it in a run of all tests."""
    gc.freeze()
