"""Run `warmroute check` in front of engines, and read its report."""

from __future__ import annotations

from typing import Any

import httpx

from loadtest.emulator.emulator import Emulator
from router import config
from router.check import Finding, Report, check
from router.config import Config
from tests.faults.stage import PATIENCE_S, words


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
    return await check(settings(*replicas, **flags), wait_s=PATIENCE_S)


async def prompted(engine: Emulator, *, number: int = 1) -> None:
    """Let an engine compute a prompt that shares no block with another number's."""
    body = {"model": "tiny", "prompt": f"{number} " + words(number, 300), "max_tokens": 1}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        answer = await client.post(f"{engine.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


def finding(report: Report, subject: str, about: str) -> Finding:
    """Give the one finding about something."""
    (found,) = [f for f in report.of(subject) if f.about == about]
    return found


def wrong(report: Report) -> list[tuple[str, str, str]]:
    return [
        (f.subject, f.about, f.text) for f in report.findings if f.level in ("error", "warning")
    ]
