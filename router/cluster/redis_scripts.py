"""The scripts that run in Redis, and how they are called.

The scripts are in `lua/`, each with its arguments at the top. All of them get one key, `…:meta`,
and derive the others. They run on Redis 6.2 and 7 and on Valkey. Scripts may read the clock,
because Redis replicates their effects.

Deltas are calls of the scripts that write them. What became of a replica's blocks is one entry of
its stream's log. What was learned of a pool is written block by block, because every router writes
it. Redis serves no other client during that (1.7 us a block), so a large delta of a pool is written
in parts, removals first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from msgspec import Struct
from redis.exceptions import NoScriptError

from router.base.messages import Delta, encode
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


MAX_KEYS: Final = 1_000
"""Keys of a pool in one call."""

_KEY_BYTES: Final = 8


def append_words(delta: Delta, *, incarnation: str, router: str) -> tuple[Word, ...]:
    """Return the arguments of the call that appends a delta to its stream's log.

    Args:
        delta: The changes to write.
        incarnation: Of the namespace that they belong to.
        router: The writer, which must hold the stream's lease.
    """
    return (
        incarnation,
        router,
        delta.stream_id,
        int(delta.cleared),
        encode(delta.position) if delta.position is not None else b"",
        encode(delta.newest) if delta.newest is not None else b"",
        encode(delta.status) if delta.status is not None else b"",
        int(any(change.stored or change.copies for change in delta.changes)),
        encode(delta.changes) if delta.changes else b"",
    )


def pool_calls(delta: Delta, *, incarnation: str) -> Iterator[tuple[Word, ...]]:
    """Yield the arguments of each call that writes a delta of a pool; see lua/write.lua."""
    size = MAX_KEYS * _KEY_BYTES
    removed = b"".join(change.removed for change in delta.changes)
    stored = b"".join(change.stored for change in delta.changes)
    parts: list[tuple[bytes, bytes]] = []
    parts += [(b"", removed[at : at + size]) for at in range(0, len(removed), size)]
    parts += [(stored[at : at + size], b"") for at in range(0, len(stored), size)]
    for number, (some_stored, some_removed) in enumerate(parts or [(b"", b"")]):
        is_cleared = int(delta.cleared and not number)
        yield incarnation, delta.stream_id, is_cleared, some_stored, some_removed
