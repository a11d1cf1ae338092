"""What became of beginnings that were computed early: used by the next prompt, or not.

A conversation whose next prompt was another one is not predicted again. A model is left alone for
a while if less than half of what was computed for its conversations is used. So is one of which
nothing was missing many times in a row: its chat template keeps reasoning, or its clients have
none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from router.base.backoff import Suspects
from router.base.bounded import Bounded
from router.base.contracts import BlockKey
from router.observers.early.next_prompt import Beginning

_MOST_SESSIONS: Final = 10_000
_MOST_MODELS: Final = 1_000
_NUM_SAMPLES: Final = 16
_LONGEST_S: Final = 3600.0  # a person who does not come back by then never does
_NUM_RECENT: Final = 16
_LEAST_RECENT: Final = 8
_LEAST_USED: Final = 0.5
_MOST_NEEDLESS: Final = 32
_PAUSES_S: Final = (600.0, 7200.0)


class _Made(Struct, frozen=True, kw_only=True):
    """A beginning that was computed; `samples` are positions of blocks behind the anchor."""

    model: str
    num_tokens: int
    anchor: tuple[int, BlockKey] | None  # the last block that was cached before
    samples: Sequence[tuple[int, BlockKey]]
    at_s: float

    def used_share(self, keys: Sequence[BlockKey]) -> float | None:
        """Return which share of it a prompt has. None: it is of another thread."""
        if self.anchor is not None and not _has(keys, self.anchor):
            return None
        return sum(_has(keys, sample) for sample in self.samples) / len(self.samples)


class EarlyResults:
    """Judges predictions by the prompts that come.

    Args:
        count: Takes "used" or "wasted", and a number of tokens.

    awaited: What was computed for a session's next prompt, which has not come yet.
    """

    def __init__(self, count: Callable[[str, float], None]) -> None:
        self._count = count
        self.awaited: Bounded[int, _Made] = Bounded(_MOST_SESSIONS)  # by session
        self._wrong: Bounded[int, None] = Bounded(_MOST_SESSIONS)
        self._recent: Bounded[str, deque[float]] = Bounded(_MOST_MODELS)  # shares used, by model
        self._needless: Bounded[str, int] = Bounded(_MOST_MODELS)  # in a row, by model
        self._paused = Suspects(*_PAUSES_S)  # models

    def may(self, session: int, model: str, now_s: float) -> bool:
        """Return whether a conversation's next prompt may be computed early."""
        return session not in self._wrong and not self._paused.is_suspect(model, now_s)

    def needless(self, model: str, now_s: float) -> None:
        """Record a next prompt of which nothing was missing."""
        num = (self._needless.get(model) or 0) + 1
        self._needless.put(model, num % _MOST_NEEDLESS)
        if num == _MOST_NEEDLESS:
            self._paused.suspect(model, now_s, now_s)

    def made(
        self, session: int, model: str, beginning: Beginning, num_cached_blocks: int, now_s: float
    ) -> None:
        """Record that a beginning was computed from some block on."""
        self._expire(now_s)
        self._needless.pop(model, None)
        keys, num = beginning.keys, len(beginning.keys)
        step = max(1, (num - num_cached_blocks) // _NUM_SAMPLES)
        positions = range(num_cached_blocks + step - 1, num, step)
        last = num_cached_blocks - 1
        self._discard(session)
        made = _Made(
            model=model,
            num_tokens=(num - num_cached_blocks) * beginning.block_size,
            anchor=(last, keys[last]) if last >= 0 else None,
            samples=[(position, keys[position]) for position in positions],
            at_s=now_s,
        )
        for oldest in self.awaited.put(session, made):
            self._count("wasted", oldest.num_tokens)

    def came(self, session: int, keys: Sequence[BlockKey], now_s: float) -> None:
        """Judge what was computed for a conversation by its next prompt."""
        made = self.awaited.get(session)
        share = made.used_share(keys) if made is not None else None
        if made is None or share is None:
            return
        del self.awaited[session]
        num_used = round(share * made.num_tokens)
        self._count("used", num_used)
        self._count("wasted", made.num_tokens - num_used)
        if share < _LEAST_USED:
            self._wrong.put(session, None)
        else:
            self._paused.succeeded(made.model, made.at_s)
        recent = self._recent.get(made.model) or deque(maxlen=_NUM_RECENT)
        recent.append(share)
        self._recent.put(made.model, recent)
        if len(recent) >= _LEAST_RECENT and sum(recent) < _LEAST_USED * len(recent):
            recent.clear()
            self._paused.suspect(made.model, now_s, now_s)

    def _expire(self, now_s: float) -> None:
        while self.awaited:
            session, oldest = next(iter(self.awaited.items()))
            if now_s - oldest.at_s < _LONGEST_S:
                return
            self._discard(session)

    def _discard(self, session: int) -> None:
        made = self.awaited.pop(session, None)
        if made is not None:
            self._count("wasted", made.num_tokens)


def _has(keys: Sequence[BlockKey], sample: tuple[int, BlockKey]) -> bool:
    position, key = sample
    return position < len(keys) and keys[position] == key
