"""The router's own ports: whether they are free, or a running router has them."""

from __future__ import annotations

from typing import Final

import httpx

from router.base.addresses import host_port, own_url_host
from router.base.listening import cannot_listen, listen, why_not
from router.check.finding import Finding, Subject
from router.check.seen import Deadline
from router.config import AdminConfig, Config, ListenConfig

_ASK_S: Final = 2.0
_SIGNS: Final = {
    "listen": ("/metrics", ("warmroute_", "listen.trusted", "admin port")),
    "admin": ("/", ("<title>warmroute<",)),
}
"""A page of a router that needs no token, and what it has."""
_ROUTER: Final = Subject("router")


async def look(config: Config, deadline: Deadline) -> list[Finding]:
    """Try the ports; what a router reports of its requests is not known yet."""
    return [
        await _port("listen", config.listen, deadline),
        await _port("admin", config.admin, deadline),
        _ROUTER.note(
            "audit",
            "the first request will show whether engines report cached tokens",
            "start each engine with --enable-prompt-tokens-details, so that predictions are "
            "checked",
        ),
    ]


async def _port(key: str, section: ListenConfig | AdminConfig, deadline: Deadline) -> Finding:
    host, port, about = section.host, section.port, f"{key} port"
    where = host_port(host, port) if port else f"{host}, any port"
    is_shared = isinstance(section, ListenConfig) and section.shared
    error = why_not_free(host, port, shared=is_shared) if port else None
    if error is None:
        return _ROUTER.ok(about, f"{where} is free")
    flag = "--port" if key == "listen" else "--admin-port"
    path, signs = _SIGNS[key]
    scheme = "https" if section.tls_cert is not None else "http"
    url = f"{scheme}://{own_url_host(host)}:{port}{path}"
    text = await _page(url, timeout_s=deadline.at_most(_ASK_S))
    if any(sign in text for sign in signs):
        return _ROUTER.note(
            about,
            f"{where} is in use by a running router",
            f"`warmroute status` describes it; a router beside it needs another port: {flag} PORT",
        )
    hint = f"end the other process, or choose another port: {flag} PORT"
    return _ROUTER.error(about, cannot_listen(host, port, error), hint)


def why_not_free(host: str, port: int, *, shared: bool = False) -> str | None:
    """Return why a server cannot listen on a port, by trying for a moment; None: it can."""
    try:
        for one in listen(host, port, shared=shared):
            one.close()
    except OSError as exc:
        return why_not(host, exc)
    return None


async def _page(url: str, *, timeout_s: float) -> str:
    """Get a page of this machine; "": none answers. Certificates have other names than ours."""
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=False) as client:
            return (await client.get(url)).text
    except (httpx.HTTPError, httpx.InvalidURL):
        return ""
