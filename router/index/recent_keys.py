"""Blocks that were removed recently: if they were removed after a prediction, it was not wrong."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Final, NamedTuple

from router.base.contracts import BlockKey

MAX_KEYS: Final = 8_192  # in a generation; half a megabyte, or 1.5 of one key a call


class _Stamp(NamedTuple):
    """One call of `add`; its keys share it."""

    number: int
    at_s: float


_NEVER: Final = _Stamp(0, 0.0)


class RecentKeys:
    """The last keys added: at least `max_keys` of them, at most twice as many.

    `num_added` counts the calls of `add`. It serves as a clock for `since`.
    """

    __slots__ = ("_max_keys", "_new", "_old", "num_added")

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._new: dict[BlockKey, _Stamp] = {}
        self._old: dict[BlockKey, _Stamp] = {}
        self.num_added = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._new or key in self._old

    def since(self, key: BlockKey, num_added: int) -> bool:
        """Return whether the key was last added after `num_added` calls of `add`."""
        return self._last(key).number > num_added

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Add keys; 0.03 us each."""
        self.num_added += 1
        self._new.update(dict.fromkeys(keys, _Stamp(self.num_added, monotonic())))
        if len(self._new) >= self._max_keys:
            self._old, self._new = self._new, {}

    def added_s(self, key: BlockKey) -> float | None:
        """Return when the key was last added, monotonic; None: it is not known any more."""
        last = self._last(key)
        return None if last is _NEVER else last.at_s

    def _last(self, key: BlockKey) -> _Stamp:
        return self._new.get(key, self._old.get(key, _NEVER))
