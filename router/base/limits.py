"""Limits of a caller: requests and uncached tokens a minute, requests at a time."""

from __future__ import annotations

from typing import Final

from router.base.errors import RateLimited

MINUTE_S: Final = 60.0


class Bucket:
    """What is left of a limit a minute.

    It fills evenly and holds one minute's worth. More than that may be taken at once from a full
    one: it is in debt afterwards, so the mean holds for any request that is allowed at all. It
    counts what was ever taken from it.
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
        """Use so much, or return it if negative."""
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


class Limits:
    """What a caller may use, and what is left of it; None: no such limit."""

    __slots__ = ("max_in_flight", "num_in_flight", "requests", "tokens")

    def __init__(self) -> None:
        self.max_in_flight: int | None = None
        self.num_in_flight = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def change(
        self,
        *,
        requests_per_minute: int | None,
        uncached_tokens_per_minute: int | None,
        max_in_flight: int | None,
        now_s: float,
    ) -> None:
        """Set the limits; what is used stays used."""
        self.max_in_flight = max_in_flight
        self.requests = _bucket(self.requests, requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, uncached_tokens_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """Count a request that has just come.

        Raises:
            RateLimited: it is one too many, a minute or at a time; it is not counted then.
        """
        most = self.max_in_flight
        if most is not None and self.num_in_flight >= most:
            raise RateLimited(
                f"Too many requests at a time: the limit is {most} in flight.",
                retry_after_s=1.0,
                headers=self.headers(now_s),
            )
        if self.requests is not None:
            wait_s = self.requests.wait_s(1, now_s)
            if wait_s > 0:
                raise RateLimited(
                    "Rate limit reached for requests: the limit is "
                    f"{self.requests.capacity} a minute.",
                    retry_after_s=wait_s,
                    headers=self.headers(now_s),
                )
            self.requests.take(1, now_s)
        self.num_in_flight += 1

    def leave(self) -> None:
        """End a request that entered."""
        self.num_in_flight -= 1

    def charge(self, num_tokens: int, now_s: float) -> Charge:
        """Charge the uncached tokens that a request is expected to have.

        Raises:
            RateLimited: there are not so many left.
        """
        if self.tokens is not None:
            wait_s = self.tokens.wait_s(num_tokens, now_s)
            if wait_s > 0:
                raise RateLimited(
                    f"Rate limit reached for uncached tokens: the limit is {self.tokens.capacity} "
                    f"a minute, this request needs about {num_tokens}.",
                    retry_after_s=wait_s,
                    headers=self.headers(now_s),
                )
            self.tokens.take(num_tokens, now_s)
        return Charge(self, num_tokens)

    def headers(self, now_s: float) -> dict[str, str]:
        """Return what is left of the limits, as OpenAI's API does; empty where there are none."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left = bucket.level(now_s)
                full_s = (bucket.capacity - left) * 60.0 / bucket.capacity
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(left)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{full_s:.3f}s"
        return headers


class Charge:
    """Uncached tokens taken for one request, to be corrected by what it really had."""

    __slots__ = ("_limits", "num_tokens")

    def __init__(self, limits: Limits, num_tokens: int) -> None:
        self._limits = limits
        self.num_tokens = num_tokens

    def settle(self, num_tokens: int, now_s: float) -> None:
        """Correct the charge to so many."""
        tokens = self._limits.tokens
        if tokens is not None and num_tokens != self.num_tokens:
            tokens.take(num_tokens - self.num_tokens, now_s)
        self.num_tokens = num_tokens


def _bucket(known: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if known is None:
        return Bucket(per_minute, now_s)
    if known.capacity != per_minute:
        known.resize(per_minute, now_s)
    return known
