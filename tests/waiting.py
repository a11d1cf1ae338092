"""Waiting for what has no event of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import aiohttp

PATIENCE_S = 60.0  # for what must come; never waited for where all is well


async def until(is_so: Callable[[], object | Awaitable[object]]) -> None:
    """Look until something is so."""
    pause_s = 0.002
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found: Any = is_so()
            if isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, 0.02)  # looking costs, too


async def until_ready(client: aiohttp.ClientSession, url: str = "") -> None:
    """Wait until a router says that requests may come."""

    async def is_ready() -> bool:
        async with client.get(url + "/readyz") as answer:
            return answer.status == 200

    await until(is_ready)
