"""A DNS server on loopback whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

Records = dict[tuple[str, str], list[str]]


class Server(asyncio.DatagramProtocol):
    """Answers from a table of (name, kind); `rcode` is what else is said, None: nothing at all."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.rcode: dns.rcode.Rcode | None = dns.rcode.NOERROR
        self.damage: Callable[[bytes], bytes] = bytes
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        host, port = transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        if self.rcode is None:
            return
        reply.set_rcode(self.rcode)
        if self.rcode == dns.rcode.NOERROR and not any(n == name for n, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif self.rcode == dns.rcode.NOERROR and (name, kind) in self.records:
            texts = self.records[name, kind]
            reply.answer.append(dns.rrset.from_text(question.name, 5, "IN", kind, *texts))
        self._transport.sendto(self.damage(reply.to_wire()), peer)  # type: ignore[attr-defined]


@asynccontextmanager
async def serving(records: Records) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: Server(records), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
