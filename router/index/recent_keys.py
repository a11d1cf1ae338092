"""Blocks that were removed recently: if they were removed after a prediction, it was not wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Final

from router.contracts import BlockKey

MAX_KEYS: Final = 8_192  # in a generation; half a megabyte


class RecentKeys:
    """The last keys added: at least `max_keys` of them, at most twice as many.

    `num_added` counts the calls of `add`. It serves as a clock for `since`.
    """

    __slots__ = ("_max_keys", "_new", "_num_old", "_old", "_times", "num_added")

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._new: dict[BlockKey, int] = {}
        self._old: dict[BlockKey, int] = {}
        self.num_added = 0
        self._num_old = 0  # calls before those of `_new`
        self._times: deque[float] = deque()  # of the calls whose keys are kept

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._new or key in self._old

    def since(self, key: BlockKey, num_added: int) -> bool:
        """Return whether the key was last added after `num_added` calls of `add`."""
        return self._new.get(key, self._old.get(key, 0)) > num_added

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Add keys; 0.03 us each."""
        self.num_added += 1
        self._times.append(monotonic())
        self._new.update(dict.fromkeys(keys, self.num_added))
        if len(self._new) >= self._max_keys:
            self._old, self._new = self._new, {}
            for _ in range(len(self._times) - (self.num_added - self._num_old)):
                self._times.popleft()
            self._num_old = self.num_added

    def added_s(self, key: BlockKey) -> float | None:
        """Return when the key was last added, monotonic; None: it is not known any more."""
        number = self._new.get(key, self._old.get(key))
        if number is None:
            return None
        return self._times[number - 1 - (self.num_added - len(self._times))]
