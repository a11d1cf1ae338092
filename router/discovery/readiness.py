"""Whether requests may come yet: replicas found, tokenizers loaded, event histories replayed."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from router.discovery.status import UNDISCOVERED, Waiting
from router.discovery.watches import HISTORY
from router.replicas.fleet import Fleet
from router.tokens import Prompters

START_S: Final = 5.0  # after a router began, requests wait at most until then
_START_LOOK_S: Final = 0.02
_OTHERS_S: Final = 1.0  # from the first replica on: only another one may have a model or a route


class Readiness:
    """Answers /readyz, and whether an early request is worth holding.

    Args:
        waiting: Why a replica is not usable (yet).
    """

    def __init__(self, *, fleet: Fleet, prompters: Prompters, waiting: Waiting) -> None:
        self._members = fleet.members
        self._prompters = prompters
        self._waiting = waiting
        self._was_ready = False
        self._may_wait_until_s = time.monotonic() + START_S
        self._first_s: float | None = None  # when a replica was there first

    def not_ready(self) -> str | None:
        """Return why requests should not come yet; None: they may.

        A router that was ready stays so while it knows a replica. What comes later, such as
        another model's tokenizer or a restarted engine's history, concerns all routers at once:
        they serve on with what they know.
        """
        if not self._members.can_answer:
            self._was_ready = False
            first = next(iter(self._waiting.items()), None)
            return f"no replica yet: {first[0]}: {first[1]}" if first else "no replica"
        if self._was_ready:
            return None
        loading = self._prompters.loading()
        reason = f"loading tokenizers: {', '.join(loading)}" if loading else None
        reason = reason or self._history_missing()
        self._was_ready = reason is None
        return reason

    def is_starting(self) -> bool:
        """Whether requests will be served, or served better, in a moment."""
        is_asking = any(reason == UNDISCOVERED for reason in self._waiting.values())
        if not self._members.can_answer:
            return is_asking
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        return self.not_ready() is not None or (is_asking and now_s < self._first_s + _OTHERS_S)

    async def until_started(self) -> None:
        """Hold a request while the router has just started and is about to know its replicas.

        A client that retries after one router was killed gets no 503 from its successor.
        """
        while time.monotonic() < self._may_wait_until_s:
            if not self.is_starting():
                break
            await asyncio.sleep(_START_LOOK_S)

    def _history_missing(self) -> str | None:
        for name, reason in self._waiting.items():
            if reason == HISTORY:
                return f"{name}: {reason}"
        return None
