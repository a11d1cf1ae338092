"""Blocks that were removed recently: a prediction that they overtook was not a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from router.contracts import BlockKey

MAX_KEYS: Final = 8_192  # in a generation; half a megabyte


class RecentKeys:
    """The last keys added: at least `max_keys` of them, at most twice as many."""

    __slots__ = ("_max_keys", "_new", "_old")

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._new: set[BlockKey] = set()
        self._old: set[BlockKey] = set()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._new or key in self._old

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Add keys; 0.03 us each."""
        self._new.update(keys)
        if len(self._new) >= self._max_keys:
            self._old, self._new = self._new, set()
