"""The runner's HTTP client: send a request, and read its answer into an exchange."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aiohttp
from yarl import URL

from loadtest.runner.exchange import Exchange

KEEPALIVE_S: Final = 2.0  # below what servers allow (uvicorn: 5 s), so that none closes under us
_LARGE_BODY: Final = 1 << 20
_PIECE: Final = 256 * 1024


def make_client(
    *, timeout_s: float, headers: Mapping[str, str] | None = None, base_url: str | None = None
) -> aiohttp.ClientSession:
    """Make a client without a bound on connections; `timeout_s` is the longest silence."""
    return aiohttp.ClientSession(
        base_url,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        read_bufsize=256 * 1024,
    )


async def send(
    client: aiohttp.ClientSession,
    url: str | URL,
    body: bytes,
    exchange: Exchange,
    clock: Callable[[], float],
    *,
    headers: Mapping[str, str],
) -> None:
    """Send a JSON body and read the answer; the exchange records errors.

    Args:
        client: Of `make_client`.
        clock: Seconds, as the exchange counts them.
    """
    sent: dict[str, str] = {"Content-Type": "application/json", **headers}
    data: Any = body
    if len(body) > _LARGE_BODY:
        # In pieces: one write of megabytes would hold the loop; the length stays declared.
        sent["Content-Length"] = str(len(body))
        data = _pieces(body)
    try:
        async with client.post(url, data=data, headers=sent, allow_redirects=False) as response:
            exchange.begin(response.status, response.headers)
            if response.status != 200:
                exchange.refuse(await response.read())
                return
            async for piece in response.content.iter_any():
                exchange.receive(piece, clock())
            exchange.close()
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as exc:
        exchange.fail("connect", str(exc))
    except TimeoutError:
        exchange.fail("timeout", f"silent for {client.timeout.sock_read:g} s")
    except (aiohttp.ClientError, OSError) as exc:
        exchange.fail("broken", f"{type(exc).__name__}: {exc}")


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), _PIECE):
        yield bytes(view[start : start + _PIECE])
