"""The live page at the root of the admin port: one file with its script and its style.

The page has no data, so it is served without a token. Its script asks for the token and sends it
with each request for data. The browser runs nothing but that script: it is named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from aiohttp import web

from router.http.admin_pages import Handler

PAGE: Final = "/"

_ELEMENT: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_NEEDS_TOKEN: Final = '<html lang="en" data-token="needed">'
_IS_OPEN: Final = '<html lang="en" data-token="none">'


class LivePage:
    """Serves the page; `needs_token` False: the port is open."""

    def __init__(self, *, needs_token: bool) -> None:
        page = files("router.observers.live").joinpath("page.html").read_text(encoding="utf-8")
        self._headers = headers_of(page)
        if not needs_token:
            page = page.replace(_NEEDS_TOKEN, _IS_OPEN, 1)
        self._page = page

    def routes(self) -> Mapping[str, Handler]:
        return {f"GET {PAGE}": self._answer}

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=self._headers)


def headers_of(page: str) -> dict[str, str]:
    """Return the headers that let a browser do what the page needs, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for element, text in _ELEMENT.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[element].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
