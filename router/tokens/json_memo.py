"""Parse and print JSON once that repeats with every turn.

An agent's history repeats the arguments of every tool call as a JSON text. The engine parses them,
and most templates print them again. The tools do not change at all. All are remembered by their
text, within a budget of bytes. Requests may share values, because templates cannot change them: the
sandbox is immutable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from router.base.bounded import BoundedBytes
from router.tokens.needs_engine import NeedsEngine

Tojson = Callable[..., str]

_MAX_ARGUMENTS = 256 * 1024
"""Characters of one call's arguments: to parse them blocks the interpreter for up to 8 ms."""

_Key = str | bytes | tuple[str, str | bytes]


class _Entry(NamedTuple):
    value: Any
    printable: Sequence[Any]  # the objects in it whose JSON is remembered
    size_bytes: int


class JsonMemo:
    """Values by the text that they were parsed from, and the JSON of these values by identity."""

    __slots__ = ("_entries", "_printed")

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._entries: BoundedBytes[_Key, _Entry] = BoundedBytes(max_bytes)
        self._printed: dict[int, str | None] = {}  # by id(); None: not printed yet

    @property
    def size_bytes(self) -> int:
        """Return what is taken of the budget (estimated)."""
        return self._entries.size_bytes

    def arguments(self, text: str) -> dict[str, Any]:
        """Parse a tool call's arguments as the engine does: {} unless they are an object.

        Raises:
            NeedsEngine: JSON that the engine cannot parse: too deep, or with a too long number.
        """
        known: dict[str, Any] | None = self.get(text)
        if known is not None:
            return known
        if len(text) > _MAX_ARGUMENTS:
            raise NeedsEngine("arguments", "too long")
        try:
            value = json.loads(text) if text else {}
        except json.JSONDecodeError:
            value = {}
        except (ValueError, RecursionError) as exc:
            raise NeedsEngine("arguments", type(exc).__name__) from exc
        if not isinstance(value, dict):
            value = {}
        self.put(text, value, (value,))
        return value

    def get(self, key: _Key) -> Any:
        """Return the value of `key`; None if it is unknown or was evicted."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: _Key, value: Any, printable: Sequence[Any]) -> None:
        """Remember `value` under `key`, and evict the oldest entries above the budget."""
        size_bytes = _size(_text(key))
        if key in self._entries or size_bytes > self._entries.most:
            return
        for item in printable:
            self._printed[id(item)] = None
        for oldest in self._entries.put(key, _Entry(value, printable, size_bytes)):
            for item in oldest.printable:
                del self._printed[id(item)]

    def of(self, owner: str) -> JsonMemo:
        """Return an owner's part: of the same budget, but no other owner finds its values."""
        return _Owned(self, owner) if owner else self

    def wrap(self, tojson: Tojson) -> Tojson:
        """Make the filter `tojson` remember the JSON of known values, printed without options."""
        printed = self._printed

        def remembering(value: Any, *args: Any, **kwargs: Any) -> str:
            if args or kwargs or id(value) not in printed:
                return tojson(value, *args, **kwargs)
            text = printed[id(value)]
            if text is None:
                text = printed[id(value)] = tojson(value)
            return text

        return remembering


class _Owned(JsonMemo):
    """One owner's part of a memo."""

    __slots__ = ("_memo", "_owner")

    def __init__(self, memo: JsonMemo, owner: str) -> None:
        self._memo = memo
        self._owner = owner

    def get(self, key: _Key) -> Any:
        return self._memo.get((self._owner, _text(key)))

    def put(self, key: _Key, value: Any, printable: Sequence[Any]) -> None:
        self._memo.put((self._owner, _text(key)), value, printable)


def _size(text: str | bytes) -> int:
    """Estimate the memory of a text, the objects parsed from it, and their JSON.

    An empty list or object takes 64 bytes, an object's first key 120 more, a number or text 30.
    """
    if isinstance(text, str):
        text = text.encode(errors="surrogatepass")
    num_objects = text.count(b"{") + text.count(b"[")
    num_bytes = 64 * num_objects + 120 * text.count(b":") + 40 * text.count(b",")
    return 512 + 4 * len(text) + num_bytes


def _text(key: _Key) -> str | bytes:
    return key[1] if isinstance(key, tuple) else key
