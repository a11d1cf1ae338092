"""Asks a router that runs already, over HTTP: is it one, and what has it seen?"""

from __future__ import annotations

import re
from typing import Final

import httpx

_SAMPLE: Final = re.compile(r"^(warmroute_\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_SIGNS: Final = ("warmroute_", '"replicas"', "admin token")
_PATHS: Final = {"listen": "/metrics", "admin": "/admin/replicas"}


async def ask_router(key: str, host: str, port: int, *, timeout_s: float) -> str | None:
    """Get the page by which a router is known; None: nobody answers there, or no router.

    Args:
        key: Which of a router's ports it is taken for, "listen" or "admin".
        host: As it is configured to listen on: a wildcard is asked on loopback.
    """
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{host}]" if ":" in host else host
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            answer = await client.get(f"http://{host}:{port}{_PATHS[key]}")
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    # The admin port may want a token: what it says to anybody says enough.
    is_ours = answer.status_code in (200, 401) and any(sign in answer.text for sign in _SIGNS)
    return answer.text if is_ours else None


def total(page: str, name: str) -> int:
    """Add up a counter over its labels."""
    return round(sum(float(value) for found, value in _SAMPLE.findall(page) if found == name))
