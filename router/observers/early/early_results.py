"""What became of beginnings that were computed early: used by the next prompt, or not.

A beginning is used as far as the next turn's engine reports its tokens as cached. A conversation
whose next prompt was another one is not predicted again.

Each model has credit. A beginning takes one; it is paid back twice if its turn used at least half
of it. So a model rests if fewer than half are used: nobody goes on, or clients write prompts in
another way. A model that rests gets a little credit each minute, and so is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final

from msgspec import Struct

from router.base.bounded import Bounded
from router.base.contracts import BlockKey
from router.metrics.counting import Counter
from router.metrics.instruments import Instruments, Spec

_MOST_SESSIONS: Final = 10_000
_MOST_MODELS: Final = 1_000
_LONGEST_S: Final = 3600.0  # a person who does not come back by then never does
_LEAST_USED: Final = 0.5

_FIRST_CREDIT: Final = 16.0
_MOST_CREDIT: Final = 256.0
_CREDIT_PER_S: Final = 1 / 60
_PAID_BACK: Final = 2.0
NEEDLESS: Final = 0.5
"""What a beginning takes of which nothing was missing: it costs two renderings."""


class _Made(Struct, frozen=True, kw_only=True):
    """A beginning that was computed, in tokens from `start` to `end`."""

    model: str
    replica: str
    start: int
    end: int
    anchor: tuple[int, BlockKey] | None  # the last block that was cached before
    at_s: float

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class _Credit(Struct):
    left: float
    at_s: float


class EarlyResults:
    """Judges predictions by the turns that come.

    Args:
        count: Takes "used" or "wasted", and a number of tokens.

    awaited: What was computed for a session's next prompt, which has not come yet.
    """

    def __init__(self, count: Callable[[str, float], None]) -> None:
        self._count = count
        self.awaited: Bounded[int, _Made] = Bounded(_MOST_SESSIONS)  # by session
        self._wrong: Bounded[int, None] = Bounded(_MOST_SESSIONS)
        self._credits: Bounded[str, _Credit] = Bounded(_MOST_MODELS)

    def may(self, session: int, model: str, now_s: float) -> bool:
        """Return whether a conversation's next prompt may be computed early."""
        return session not in self._wrong and self._credit(model, now_s).left >= 1.0

    def spend(self, model: str, credit: float, now_s: float) -> None:
        """Take credit of a model, down to none."""
        found = self._credit(model, now_s)
        found.left = max(0.0, found.left - credit)

    def rest(self, model: str, now_s: float) -> None:
        """Let a model rest: no engine computes its beginnings."""
        self._credit(model, now_s).left = 0.0

    def made(
        self,
        session: int,
        model: str,
        replica: str,
        *,
        keys: Sequence[BlockKey],
        blocks: range,
        block_size: int,
        now_s: float,
    ) -> None:
        """Record which blocks of a beginning were computed; `keys` are those of the beginning."""
        while self.awaited:
            oldest, found = next(iter(self.awaited.items()))
            if now_s - found.at_s < _LONGEST_S:
                break
            self._discard(oldest)
        self._discard(session)
        last = blocks.start - 1
        made = _Made(
            model=model,
            replica=replica,
            start=blocks.start * block_size,
            end=blocks.stop * block_size,
            anchor=(last, keys[last]) if last >= 0 else None,
            at_s=now_s,
        )
        for evicted in self.awaited.put(session, made):
            self._count("wasted", evicted.num_tokens)

    def came(
        self, session: int, replica: str, keys: Sequence[BlockKey], num_cached: int, now_s: float
    ) -> None:
        """Judge what was computed for a conversation by its next turn.

        Args:
            session: The conversation.
            replica: Where the turn was answered.
            keys: Of its prompt.
            num_cached: Tokens of its prompt that the engine reports as cached.
            now_s: Monotonic.
        """
        made = self.awaited.get(session)
        if made is None or not _has(keys, made.anchor):  # of another thread of the session
            return
        del self.awaited[session]
        num_used = 0
        if replica == made.replica:
            num_used = min(max(0, num_cached - made.start), made.num_tokens)
        self._count("used", num_used)
        self._count("wasted", made.num_tokens - num_used)
        if num_used < _LEAST_USED * made.num_tokens:
            self._wrong.put(session, None)
        else:
            found = self._credit(made.model, now_s)
            found.left = min(_MOST_CREDIT, found.left + _PAID_BACK)

    def _credit(self, model: str, now_s: float) -> _Credit:
        found = self._credits.use(model)
        if found is None:
            found = _Credit(_FIRST_CREDIT, now_s)
            self._credits.put(model, found)
        if found.left < _FIRST_CREDIT:
            grown = found.left + _CREDIT_PER_S * (now_s - found.at_s)
            found.left = min(_FIRST_CREDIT, grown)
        found.at_s = now_s
        return found

    def _discard(self, session: int) -> None:
        made = self.awaited.pop(session, None)
        if made is not None:
            self._count("wasted", made.num_tokens)


def _has(keys: Sequence[BlockKey], anchor: tuple[int, BlockKey] | None) -> bool:
    if anchor is None:
        return True
    position, key = anchor
    return position < len(keys) and keys[position] == key


class EarlyMetrics(Instruments):
    """Next prompts."""

    # fmt: off
    early: Annotated[Counter, Spec("warmroute_early", "result",
        "Next prompts to be computed early, by result: computed, cached (nothing to do), cut (by "
        "a request), busy (429, 503), no_room, lost (from the cache), unknown, refused, failed")]
    early_tokens: Annotated[Counter, Spec("warmroute_early_tokens", "kind",
        "Tokens of next prompts: sent to be computed early, then used or wasted")]
    # fmt: on
