"""These tests run on uvloop, as `python -m loadtest.dev.chaos` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loop of every async test in this directory."""
    return {"uvloop": uvloop.new_event_loop}
