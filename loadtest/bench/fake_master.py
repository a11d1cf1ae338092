"""A Mooncake master that answers what a router asks of it: at once, late, or never.

One process, so that its work is not the client's. Its objects are the lines of a file and never
change. A JSON line on stdout has the port.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Final, cast

import click
import msgspec
import uvloop

_METRICS: Final = """# TYPE master_key_count gauge
master_key_count {num_keys}
master_allocated_bytes {num_bytes}
master_total_capacity_bytes 1000000000000
master_evicted_key_count 0
master_batch_put_start_items_total {num_keys}
"""
_QUERY: Final = "/batch_query_keys?keys="


class Exchange(asyncio.Protocol):
    """Reads requests without a body and answers each, questions for keys after a delay."""

    def __init__(self, keys: frozenset[str], pages: dict[str, bytes], delay_s: float) -> None:
        self._keys = keys
        self._pages = pages
        self._delay_s = delay_s
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._buffer.endswith(b"\r\n\r\n"):
            return
        target = self._buffer.split(b" ", 2)[1].decode()
        self._buffer.clear()
        if target.startswith(_QUERY):
            asyncio.get_running_loop().call_later(self._delay_s, self._tell, target)
        else:
            self._write(self._pages.get(target, b""))

    def _tell(self, target: str) -> None:
        asked = target.removeprefix(_QUERY).split(",")
        data = {key: {"ok": key in self._keys, "values": []} for key in asked}
        self._write(msgspec.json.encode({"success": True, "data": data}))

    def _write(self, body: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


async def serve(lines: list[str], delay_s: float) -> None:
    """Serve until cancelled."""
    figures = _METRICS.format(num_keys=len(lines), num_bytes=len(lines) * 16_384)
    pages = {
        "/metrics": figures.encode(),
        "/get_all_keys": "".join(f"{line}\n" for line in lines).encode(),
    }
    exchange = partial(Exchange, frozenset(lines), pages, delay_s)
    server = await asyncio.get_running_loop().create_server(exchange, "127.0.0.1", 0)
    click.echo(msgspec.json.encode({"port": server.sockets[0].getsockname()[1]}))
    await server.serve_forever()


@click.command()
@click.option("--keys", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--delay-ms", type=float, default=0.0)
def main(keys: Path, delay_ms: float) -> None:
    """Serve a fake master until killed."""
    uvloop.run(serve(keys.read_text().split(), delay_ms / 1000.0))


if __name__ == "__main__":
    main()
