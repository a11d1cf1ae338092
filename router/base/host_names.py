"""The addresses of host names. The last good ones are used on while a name does not resolve.

What must live here: which addresses a name has now. What must not: connections.

A replica, a Redis or a master is one host behind a name, and its probes say whether it is there. So
its addresses stay as in Envoy's LOGICAL_DNS clusters: through failures, and through an answer that
there are none. Source: logical_dns_cluster.cc and service_discovery.rst of Envoy, on 0 hosts.

A name is asked for again after 5 s, and after a connection to it failed. A resolver that is silent
delays nobody whose addresses are known: the first one waits for 1 s, and the others not at all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Final

from router.base.addresses import address_of
from router.base.bounded import Bounded
from router.base.loop_turns import in_thread

logger = logging.getLogger(__name__)

FRESH_S: Final = 5.0
DOUBT_S: Final = 1.0
"""Between two questions about a name while connections to its addresses fail."""

PATIENCE_S: Final = 1.0  # the system may go on asking for a minute
MAX_NAMES: Final = 1024
_SILENT: Final = (socket.EAI_AGAIN, "the resolver does not answer")


class _Name:
    """One name: its last good addresses, and why the last question was not answered."""

    __slots__ = ("addresses", "answered_s", "asking", "failure", "fresh_s", "host")

    def __init__(self, host: str) -> None:
        self.host = host
        self.addresses: list[str] = []
        self.asking: asyncio.Future[list[str]] | None = None  # None: no lookup is going on
        self.failure: tuple[int, str] | None = None  # None: the last question was answered
        self.answered_s = self.fresh_s = 0.0

    async def refresh(self) -> None:
        """Ask for the name if its addresses are old; wait only if they may have changed."""
        if self.addresses and time.monotonic() < self.answered_s + self.fresh_s:
            return
        if self.asking is None:
            try:
                self.asking = in_thread(lambda: _look_up(self.host), name="resolver")
            except RuntimeError as exc:  # there are too many
                self._end([], (socket.EAI_MEMORY, str(exc)))
                return
            self.asking.add_done_callback(self._answered)
        if not (self.addresses and self.failure):
            await asyncio.wait({self.asking}, timeout=PATIENCE_S)
            if self.asking is not None:
                self._end([], _SILENT)

    def _answered(self, asking: asyncio.Future[list[str]]) -> None:
        self.asking = None
        try:
            self._end(asking.result(), None)
        except (OSError, ValueError) as exc:  # UnicodeError: no host can have that name
            number = getattr(exc, "errno", None) or socket.EAI_NONAME
            self._end([], (number, getattr(exc, "strerror", None) or str(exc)))

    def _end(self, addresses: list[str], failure: tuple[int, str] | None) -> None:
        """Record an answer, or the number and the text of a failure."""
        was_known, was_failing = bool(self.addresses), self.failure is not None
        self.addresses, self.failure = addresses or self.addresses, failure
        self.answered_s, self.fresh_s = time.monotonic(), FRESH_S
        if was_known and was_failing and failure is None:
            logger.info("host name resolves again", extra={"host": self.host})
        elif was_known and not was_failing and failure is not None:
            shown = {"reason": failure[1], "addresses": ",".join(self.addresses)}
            text = "host name does not resolve: its last addresses are used on"
            logger.warning(text, extra={"host": self.host, **shown})


def _look_up(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Names:
    """Resolves names, each in a thread of its own: a name that hangs holds up no other."""

    def __init__(self) -> None:
        self._names: Bounded[str, _Name] = Bounded(MAX_NAMES)

    async def addresses(self, host: str) -> list[str]:
        """Return the addresses of a host, beginning with another one each time.

        Raises:
            socket.gaierror: none are known.
        """
        if address_of(host) is not None:
            return [host]
        if (name := self._names.get(host)) is None:
            name = _Name(host)
            self._names.put(host, name)
        await name.refresh()
        if not name.addresses:
            raise socket.gaierror(*(name.failure or _SILENT))
        first, *others = name.addresses
        name.addresses = [*others, first]
        return [first, *others]

    def doubt(self, host: str) -> None:
        """Ask for a name again: a connection to its addresses failed."""
        if (name := self._names.get(host)) is not None:
            name.fresh_s = min(name.fresh_s, DOUBT_S)

    @property
    def failing(self) -> list[str]:
        """List the names that do not resolve now, while their last addresses are used."""
        names = list(self._names.items())
        return [host for host, name in names if name.addresses and name.failure is not None]
