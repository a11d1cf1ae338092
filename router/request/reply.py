"""Where an answer goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from multidict import CIMultiDict


class Reply(Protocol):
    """Where the answer goes: the client's connection."""

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer; `is_own`: no engine gave it."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length."""

    async def keep_alive(self, every_s: float, headers: Callable[[], Mapping[str, str]]) -> None:
        """Write a keep-alive to a stream's client after each silence of so long; runs on.

        headers: Of the stream, if it begins with one.
        """

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once; wait for a client that is behind."""

    def put(self, chunk: bytes, framed: bytes | None = None) -> bool:
        """Send the next piece, at once; False: the client is behind, see `catch_up`.

        framed: The piece in whole chunks of HTTP. None: it did not come so.

        Raises:
            ConnectionError: the client has left.
        """

    async def catch_up(self) -> None:
        """Wait until a client that was behind has taken most of what waits for it."""
