"""The scripts that run in Redis, and how they are called.

The scripts are in `lua/`, each with its arguments at the top. All of them get one key, `…:meta`,
and derive the others. They run on Redis 6.2 and 7 and on Valkey. Scripts may read the clock,
because Redis replicates their effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from msgspec import Struct
from redis.exceptions import NoScriptError

from router.cluster.redis_connection import Command, RedisConnection, Word


class Script(Struct, frozen=True):
    """One script: its text, and the digest that Redis knows it by once loaded."""

    text: str
    digest: str


def _read(name: str) -> Script:
    text = (files("router.cluster") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


WRITE: Final = _read("write")
APPEND: Final = _read("append")
LOG: Final = _read("log")
BEGIN: Final = _read("begin")
SLICE: Final = _read("slice")
BEAT: Final = _read("beat")
LOADS: Final = _read("loads")
HOLD: Final = _read("hold")
RELEASE: Final = _read("release")
DEAD: Final = _read("dead")
SWEEP: Final = _read("sweep")
FREE: Final = _read("free")
REMEMBER: Final = _read("remember")
SESSIONS: Final = _read("sessions")

ALL: Final = (
    WRITE, APPEND, LOG, BEGIN, SLICE, BEAT, LOADS, HOLD, RELEASE, DEAD, SWEEP, FREE, REMEMBER,
    SESSIONS,
)  # fmt: skip


class Scripts:
    """Calls scripts on one namespace; loads them again if Redis has forgotten them."""

    def __init__(self, connection: RedisConnection, meta: str) -> None:
        self._connection = connection
        self._meta = meta

    async def load(self) -> None:
        """Load all of them.

        Raises:
            StoreError: see `RedisConnection.ask`.
        """
        for value in await self._connection.ask_all([("SCRIPT", "LOAD", s.text) for s in ALL]):
            if isinstance(value, Exception):
                raise await self._connection.refusal(value)

    async def run(self, script: Script, *words: Word, timeout_s: float | None = None) -> Any:
        """Run one script.

        Raises:
            StoreError: see `RedisConnection.ask`.
        """
        (value,) = await self.run_all(script, [words], timeout_s=timeout_s)
        if isinstance(value, Exception):
            raise await self._connection.refusal(value)
        return value

    async def run_all(
        self, script: Script, calls: Sequence[Sequence[Word]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """Run a script several times in one pipeline; errors are given as replies.

        Raises:
            StoreError: see `RedisConnection.ask_all`.
        """
        commands: list[Command] = [
            ("EVALSHA", script.digest, 1, self._meta, *words) for words in calls
        ]
        replies = await self._connection.ask_all(commands, timeout_s=timeout_s)
        missed = [i for i, v in enumerate(replies) if isinstance(v, NoScriptError)]
        if missed:  # restarted, flushed, failed over
            await self.load()
            again = [commands[i] for i in missed]
            later = await self._connection.ask_all(again, timeout_s=timeout_s)
            for i, value in zip(missed, later, strict=True):
                replies[i] = value
        return replies
