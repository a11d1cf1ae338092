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
import threading
import time
from concurrent.futures import Future, wait
from typing import Final

from router.base.addresses import address_of
from router.base.bounded import Bounded

logger = logging.getLogger(__name__)

FRESH_S: Final = 5.0
DOUBT_S: Final = 1.0
"""Between two questions about a name while connections to its addresses fail."""

PATIENCE_S: Final = 1.0  # the system may go on asking for a minute
MAX_NAMES: Final = 1024
_SILENT: Final = (socket.EAI_AGAIN, "the resolver does not answer")


class _Name:
    """One name. The thread that asks for it changes it, and so does who waits for that."""

    __slots__ = ("addresses", "answered_s", "asking", "failure", "fresh_s", "host")

    def __init__(self, host: str) -> None:
        self.host = host
        self.addresses: list[str] = []  # the last good ones
        self.asking: Future[None] | None = None  # None: nobody asks
        self.failure: tuple[int, str] | None = None  # None: the last question was answered
        self.answered_s = self.fresh_s = 0.0

    def due(self) -> Future[None] | None:
        """Return the question to wait for; None: the last addresses will do."""
        if self.addresses and time.monotonic() < self.answered_s + self.fresh_s:
            return None
        asking = self.asking or self._ask()
        return None if self.addresses and self.failure else asking

    def taken(self, asking: Future[None] | None) -> list[str]:
        """Return the addresses, beginning with another one each time."""
        if asking is not None and not asking.done():
            self._end([], _SILENT)
        if not self.addresses:
            raise socket.gaierror(*(self.failure or _SILENT))
        first, *others = self.addresses
        self.addresses = [*others, first]
        return [first, *others]

    def _ask(self) -> Future[None]:
        asking = self.asking = Future()
        asking.set_running_or_notify_cancel()  # so who waits no longer ends it for nobody else
        # Not of an executor: those are waited for when the process ends.
        thread = threading.Thread(target=self._look_up, args=(asking,), daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # there are too many
            self._end([], (socket.EAI_MEMORY, str(exc)))
            self.asking = None
            asking.set_result(None)
        return asking

    def _look_up(self, asking: Future[None]) -> None:
        """Ask the system; in a thread."""
        try:
            found = socket.getaddrinfo(
                self.host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            self._end(list(dict.fromkeys(str(address[0]) for *_, address in found)), None)
        except (OSError, ValueError) as exc:  # UnicodeError: no host can have that name
            number = getattr(exc, "errno", None) or socket.EAI_NONAME
            self._end([], (number, getattr(exc, "strerror", None) or str(exc)))
        self.asking = None
        asking.set_result(None)

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
        name = self._name(host)
        if (asking := name.due()) is not None:
            answer = asyncio.wrap_future(asking)
            try:
                await asyncio.wait({answer}, timeout=PATIENCE_S)
            finally:
                answer.cancel()
        return name.taken(asking)

    def addresses_now(self, host: str) -> list[str]:
        """Return what `addresses` does, to a thread that may wait for it."""
        if address_of(host) is not None:
            return [host]
        name = self._name(host)
        if (asking := name.due()) is not None:
            wait({asking}, timeout=PATIENCE_S)
        return name.taken(asking)

    def doubt(self, host: str) -> None:
        """Ask for a name again: a connection to its addresses failed."""
        if (name := self._names.get(host)) is not None:
            name.fresh_s = min(name.fresh_s, DOUBT_S)

    @property
    def failing(self) -> list[str]:
        """List the names that do not resolve now, while their last addresses are used."""
        names = list(self._names.items())
        return [host for host, name in names if name.addresses and name.failure is not None]

    def _name(self, host: str) -> _Name:
        if (name := self._names.get(host)) is None:
            name = _Name(host)
            self._names.put(host, name)
        return name
