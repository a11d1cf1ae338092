"""A token bucket that holds a minute's worth, and counts what was ever taken from it."""

from __future__ import annotations

from typing import Final

MINUTE_S: Final = 60.0


class Bucket:
    """What is left of a limit a minute.

    It fills evenly and holds one minute's worth. More than that may be taken at once from a full
    one: it is in debt afterwards, so the mean holds for any request that is allowed at all.
    """

    __slots__ = ("_at_s", "_level", "capacity", "taken")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        self.taken = 0
        """Ever, less what was given back: what other routers receive."""
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Count what is left; negative: in debt."""
        if now_s > self._at_s:
            filled = (now_s - self._at_s) * self.capacity / MINUTE_S
            self._level = min(float(self.capacity), self._level + filled)
            self._at_s = now_s
        return self._level

    def wait_s(self, amount: int, now_s: float) -> float:
        """Return how long until `amount` may be taken; 0.0: now."""
        lacking = min(amount, self.capacity) - self.level(now_s)
        return max(0.0, lacking * MINUTE_S / self.capacity)

    def take(self, amount: int, now_s: float) -> None:
        """Take so much, or give it back if negative."""
        self.taken += amount
        self._level = min(float(self.capacity), self.level(now_s) - amount)

    def taken_elsewhere(self, amount: int, now_s: float) -> None:
        """Count what another router took; it leaves no debt above a minute's worth."""
        level = self.level(now_s)
        least = min(level, -float(self.capacity))
        self._level = min(float(self.capacity), max(level - amount, least))

    def at_most(self, level: int, now_s: float) -> None:
        """Lower the level to what another router has left of the same limit."""
        least = min(self.level(now_s), -float(self.capacity))
        self._level = max(min(self.level(now_s), float(level)), least)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the limit: what is used of it stays used."""
        used = self.capacity - self.level(now_s)
        self.capacity = per_minute
        self._level = per_minute - used
