"""A reply whose answer is read on its way to the client."""

from __future__ import annotations

from multidict import CIMultiDict

from router.api.answer_text import AnswerText
from router.request.reply import Reply
from router.upstream.socket import Socket


class Tee:
    """Passes everything on to a reply, and its bytes to the answer's text."""

    __slots__ = ("_reply", "answer")

    def __init__(self, reply: Reply, answer: AnswerText) -> None:
        self._reply = reply
        self.answer = answer

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer."""
        self.answer.take(body)
        await self._reply.send(status, headers, body, is_own=is_own)

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length."""
        await self._reply.start(status, headers)

    async def upgrade(self, headers: CIMultiDict[str]) -> Socket:
        """Make the client's connection a WebSocket, which is not read."""
        return await self._reply.upgrade(headers)

    async def keep_alive(self, every_s: float) -> None:
        """Write comments while there is silence."""
        await self._reply.keep_alive(every_s)

    async def write(self, chunk: bytes) -> None:
        """Send the next piece; wait for a client that is behind."""
        self.answer.take(chunk)
        await self._reply.write(chunk)

    def put(self, chunk: bytes) -> bool:
        """Send the next piece; False: the client is behind."""
        self.answer.take(chunk)
        return self._reply.put(chunk)

    async def catch_up(self) -> None:
        """Wait until a client that was behind has taken most of what waits for it."""
        await self._reply.catch_up()
