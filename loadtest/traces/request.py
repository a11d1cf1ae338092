"""One request of a trace, as its reader found it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

from msgspec import Struct

from loadtest.traces.errors import BadLine, in_range
from loadtest.workload import TurnKey

MAX_TOKENS: Final = 1 << 24  # of one prompt or reply; ten times what any model takes
MAX_TIMESTAMP_MS: Final = 1e14  # unix time in ms stays below it until the year 5138
MAX_SPAN_MS: Final = 366 * 86_400_000.0  # from the first request to the last
MAX_DELAY_MS: Final = 7 * 86_400_000.0
MAX_HASH_ID: Final = (1 << 64) - 1


class Draft(Struct, frozen=True, kw_only=True, gc=False):
    """One request as its file has it, in the order of the file; the whole prompt.

    None: the file does not say. `session_id` is then derived from what requests share,
    `timestamp_ms` from the turn before, `delay_ms` from the gap between the two, and `after` is
    that turn.
    """

    timestamp_ms: float | None
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    session_id: str | None = None
    delay_ms: float | None = None  # from the end of what it comes after
    after: tuple[TurnKey, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None


def check_tokens(num_input_tokens: int, num_output_tokens: int) -> None:
    """Refuse impossible lengths.

    Raises:
        BadLine: One is negative or enormous, or the prompt is empty.
    """
    in_range("input_length", num_input_tokens, 1, MAX_TOKENS)
    in_range("output_length", num_output_tokens, 0, MAX_TOKENS)


def check_hash_ids(hash_ids: tuple[int, ...], num_input_tokens: int, block_size: int) -> None:
    """Refuse ids that are not one for each block of the prompt.

    Raises:
        BadLine: Too many, too few, or an id that is no 64-bit number.
    """
    expected = -(-num_input_tokens // block_size)
    if len(hash_ids) != expected:
        raise BadLine(
            "hash_ids",
            f"{len(hash_ids):,} ids for input_length {num_input_tokens:,}; allowed: {expected:,}, "
            f"one for each block of {block_size} tokens",
        )
    in_range("hash_ids", min(hash_ids), 0, MAX_HASH_ID)
    in_range("hash_ids", max(hash_ids), 0, MAX_HASH_ID)


class LineReader(ABC):
    """Takes one file, line by line.

    Args:
        block_size: Tokens of a block that a hash id names.
    """

    __slots__ = ("_drafts", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._drafts: list[Draft] = []

    @property
    def num_requests(self) -> int:
        """Count the requests taken so far."""
        return len(self._drafts)

    @abstractmethod
    def add(self, raw: bytes) -> None:
        """Add one line or array entry.

        Raises:
            BadLine: It is not one; nothing of it is kept.
        """

    def drafts(self) -> list[Draft]:
        """Hand over what was taken, in the order of the file, every prompt whole."""
        return self._drafts


class Clock:
    """Checks timestamps: in order, and within a year of the first."""

    __slots__ = ("_first_ms", "_last_ms")

    def __init__(self) -> None:
        self._first_ms: float | None = None
        self._last_ms: dict[str | None, float] = {}

    def check(self, field_ms: float, session_id: str | None = None) -> None:
        """Refuse a timestamp before the last one: of its session, where the file names sessions.

        Raises:
            BadLine: Unordered, negative or enormous.
        """
        in_range("timestamp", field_ms, 0, MAX_TIMESTAMP_MS)
        first_ms = field_ms if self._first_ms is None else self._first_ms
        if field_ms - first_ms > MAX_SPAN_MS:
            raise BadLine(
                "timestamp",
                f"{field_ms:,.0f} ms is more than a year after the first line's; allowed: "
                f"{first_ms:,.0f} to {first_ms + MAX_SPAN_MS:,.0f} ms",
            )
        last_ms = self._last_ms.get(session_id, 0.0)
        if field_ms < last_ms:
            raise BadLine(
                "timestamp",
                f"{field_ms:,.0f} ms is before the last line's {last_ms:,.0f} ms; allowed: lines "
                "in order of arrival",
            )

    def set(self, field_ms: float, session_id: str | None = None) -> None:
        """Store the timestamp of a line that is good."""
        if self._first_ms is None:
            self._first_ms = field_ms
        self._last_ms[session_id] = field_ms
