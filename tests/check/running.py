"""Whole checks for tests: a configuration, a check of it, and its findings."""

from __future__ import annotations

from typing import Any

import httpx

from loadtest.emulator.emulator import Emulator
from router import config
from router.check import Finding, Report, check
from router.config import Config
from tests.faults.stage import words
from tests.ports import free_port

PATIENCE_S = 60.0  # of a loaded machine; nothing here takes a second


def settings(*replicas: str | Emulator, **flags: Any) -> Config:
    """Make a configuration: dots as double underscores, any port."""
    urls = [replica if isinstance(replica, str) else replica.url for replica in replicas]
    tree: dict[tuple[str, ...], Any] = {
        ("replicas",): urls,
        ("listen", "port"): 0,
        ("admin", "port"): 0,
    }
    tree |= {tuple(key.split("__")): value for key, value in flags.items()}
    return config.load(flags=tree)


async def checked(*replicas: str | Emulator, **flags: Any) -> Report:
    """Check a configuration."""
    return await check(settings(*replicas, **flags), wait_s=PATIENCE_S)


def nowhere() -> str:
    """Return a URL at which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


async def prompted(engine: Emulator, *, number: int = 1) -> None:
    """Let an engine compute a prompt that shares no block with another number's."""
    body = {"model": "tiny", "prompt": f"{number} " + words(number, 300), "max_tokens": 1}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        answer = await client.post(f"{engine.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


def finding(report: Report, subject: str, about: str) -> Finding:
    """Return the one finding about a part of a subject."""
    (found,) = [f for f in report.of(subject) if f.about == about]
    return found


def wrong(report: Report) -> list[tuple[str, str, str]]:
    """List the errors and warnings."""
    return [(f.subject, f.about, f.text) for f in report.complaints()]


def endpoints(engine: Emulator) -> dict[str, list[str]]:
    """Configure an engine's event endpoints."""
    publisher = engine.replica.ranks[0].publisher
    assert publisher is not None
    events, replay = (f"tcp://127.0.0.1:{port}" for port in publisher.ports)
    return {"events": [events], "replay": [replay]}
