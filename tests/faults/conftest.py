"""These tests run on uvloop, as `warmroute serve` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from router.discovery import readiness
from router.pool import follower


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loop of every async test in this directory."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not let requests wait for the replicas of a router that has just started."""
    monkeypatch.setattr(readiness, "START_S", 0.0)


@pytest.fixture(autouse=True)
def polled_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice soon what changes in a pool."""
    monkeypatch.setattr(follower, "POLL_S", 0.02)
