"""A resolver whose answers a test decides, for names that end in `.test`."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from loadtest.emulator.emulator import Emulator

AGAIN: Final = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
NO_NAME: Final = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

_system = socket.getaddrinfo


class Resolver:
    """Answers by `hosts`, fails with `failure`, or says nothing for as long as `hangs`."""

    def __init__(self) -> None:
        self.hosts: dict[str, list[str]] = {}
        self.failure: socket.gaierror | None = None
        self.num_asked: Counter[str] = Counter()
        self._may_answer = threading.Event()
        self._may_answer.set()

    def hang(self) -> None:
        """Say nothing from now on."""
        self._may_answer.clear()

    def answer(self) -> None:
        """Answer again, also what was asked meanwhile."""
        self.failure = None
        self._may_answer.set()

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or not name.endswith(".test"):
            return _system(host, port, *args, **named)
        self.num_asked[name] += 1
        self._may_answer.wait(60.0)
        if self.failure is not None:
            raise self.failure
        if name not in self.hosts:
            raise NO_NAME
        named["flags"] = 0
        return [
            found
            for address in self.hosts[name]
            for found in _system(address, port, *args, **named)[:1]
        ]


@contextmanager
def resolver() -> Iterator[Resolver]:
    """Answer this process's questions for names."""
    made = Resolver()
    with mock.patch.object(socket, "getaddrinfo", made.getaddrinfo):
        try:
            yield made
        finally:
            made.answer()  # or threads would wait on


class Named:
    """An engine that is reached by a name."""

    def __init__(self, engine: Emulator, name: str) -> None:
        self.engine = engine
        self.replica = engine.replica
        self.name = name
        self.url = engine.url.replace("127.0.0.1", name)
