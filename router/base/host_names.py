"""The addresses of host names. The last good ones are used on while a name does not resolve.

What must live here: which addresses a name has now. What must not: connections.

    the resolver says        so
    addresses                they count for 10 s, then they are asked for again
    nothing, or a failure    the last addresses count on, without an end; asked again after 5 s
    there is no such name    the same

A replica, a Redis or a master is one host behind a name, and its probes say whether it is there. So
its addresses stay as in Envoy's LOGICAL_DNS clusters: through failures, and through an answer that
there are none. Source: logical_dns_cluster.cc and service_discovery.rst of Envoy, on 0 hosts.

After a connection failed, its name is asked for again at once. A resolver that is silent delays
nobody whose addresses are known: the first one waits 0.25 s, and the others not at all.
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

logger = logging.getLogger(__name__)

FRESH_S: Final = 10.0
RETRY_S: Final = 5.0
DOUBT_S: Final = 1.0
"""Between two questions about a name while connections to its addresses fail."""

_PATIENCE_S: Final = 0.25  # for current addresses, where there are older ones
_FIRST_S: Final = 1.5  # for the first ones; the system may go on asking for a minute
_MAX_NAMES: Final = 1024
_SILENT: Final = (socket.EAI_AGAIN, "the resolver does not answer")


class _Name:
    """One name. The thread that asks for it changes it, and so does who waits for that."""

    __slots__ = ("addresses", "asked_s", "asking", "due_s", "failure")

    def __init__(self) -> None:
        self.addresses: list[str] = []  # the last good ones
        self.asking: Future[None] | None = None  # None: nobody asks
        self.asked_s = self.due_s = 0.0
        self.failure: tuple[int, str] | None = None  # None: the last question was answered

    def patience_s(self, first_s: float) -> float:
        if not self.addresses:
            return first_s
        return _PATIENCE_S if self.failure is None else 0.0


class Names:
    """Resolves names, each in a thread of its own: a name that hangs holds up no other.

    Args:
        first_s: For how long the first addresses of a name are waited for.
        max_names: The one that was asked for first is forgotten first.
    """

    def __init__(self, *, first_s: float = _FIRST_S, max_names: int = _MAX_NAMES) -> None:
        self._first_s = first_s
        self._max_names = max_names
        self._names: dict[str, _Name] = {}  # the one that was asked for first is first

    async def addresses(self, host: str) -> list[str]:
        """Return the addresses of a host, beginning with another one each time.

        Raises:
            socket.gaierror: none are known.
        """
        if address_of(host) is not None:
            return [host]
        name = self._names.get(host) or self._new(host)
        if (asking := self._asking(host, name)) is not None and name.patience_s(self._first_s):
            answer = asyncio.wrap_future(asking)
            try:
                await asyncio.wait({answer}, timeout=name.patience_s(self._first_s))
            finally:
                answer.cancel()
        return self._taken(host, name, asking)

    def addresses_now(self, host: str) -> list[str]:
        """Return what `addresses` does, to a thread that may wait for it."""
        if address_of(host) is not None:
            return [host]
        name = self._names.get(host) or self._new(host)
        if (asking := self._asking(host, name)) is not None:
            wait({asking}, timeout=name.patience_s(self._first_s))
        return self._taken(host, name, asking)

    def doubt(self, host: str) -> None:
        """Ask for a name again: a connection to its addresses failed."""
        if (name := self._names.get(host)) is not None:
            name.due_s = min(name.due_s, name.asked_s + DOUBT_S)

    @property
    def failing(self) -> list[str]:
        """List the names that do not resolve now, while their last addresses are used."""
        names = list(self._names.items())
        return [host for host, name in names if name.addresses and name.failure is not None]

    # -- inside ------------------------------------------------------------------------------

    def _new(self, host: str) -> _Name:
        if len(self._names) >= self._max_names:
            self._names.pop(next(iter(self._names)), None)
        return self._names.setdefault(host, _Name())

    def _asking(self, host: str, name: _Name) -> Future[None] | None:
        """Return the question that is open, if one is due; None: the addresses are current."""
        if name.addresses and time.monotonic() < name.due_s:
            return None
        if (asking := name.asking) is not None:
            return asking
        asking = name.asking = Future()
        asking.set_running_or_notify_cancel()  # so who waits no longer ends it for nobody else
        name.asked_s = time.monotonic()
        # Not of an executor: those are waited for when the process ends.
        thread = threading.Thread(
            target=_ask, args=(host, name, asking), name=f"resolve {host}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:  # there are too many
            _end(host, name, asking, (socket.EAI_MEMORY, str(exc)))
        return asking

    def _taken(self, host: str, name: _Name, asking: Future[None] | None) -> list[str]:
        """Return the addresses once their turn has come to be used."""
        if asking is not None and not asking.done():
            _failed(host, name, _SILENT)
        if not name.addresses:
            raise socket.gaierror(*(name.failure or _SILENT))
        first, *others = name.addresses
        name.addresses = [*others, first]
        return [first, *others]


def _ask(host: str, name: _Name, asking: Future[None]) -> None:
    """Ask the system for a name's addresses; in a thread."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    except socket.gaierror as exc:
        _end(host, name, asking, (exc.errno or 0, exc.strerror or "unknown"))
    except (OSError, ValueError) as exc:  # UnicodeError: no host can have that name
        _end(host, name, asking, (socket.EAI_NONAME, str(exc)))
    else:
        _end(host, name, asking, addresses or (socket.EAI_NONAME, "it has no address"))


def _end(host: str, name: _Name, asking: Future[None], found: list[str] | tuple[int, str]) -> None:
    """End a look-up with its addresses, or with the number and the text of a failure."""
    if isinstance(found, tuple):
        _failed(host, name, found)
    else:
        if name.failure is not None and name.addresses:
            logger.info("host name resolves again", extra={"host": host})
        name.addresses, name.failure = found, None
        name.due_s = time.monotonic() + FRESH_S
    name.asking = None
    asking.set_result(None)


def _failed(host: str, name: _Name, failure: tuple[int, str]) -> None:
    is_news, name.failure = name.failure is None, failure
    name.due_s = time.monotonic() + RETRY_S
    if is_news and name.addresses:
        logger.warning(
            "host name does not resolve: its last addresses are used on",
            extra={"host": host, "reason": failure[1], "addresses": ",".join(name.addresses)},
        )
