"""The date in an engine's prompts: asked of it, and again after each midnight that it may have.

gpt-oss prompts begin with the engine's date, and some chat templates print it. From shortly before
a time at which it may change until it is asked anew, such prompts are unknown here (router.tokens).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from typing import Final

import orjson

from router.api.openai import parse_chat
from router.discovery.engine_api import EngineApi
from router.errors import RouterError
from router.tokens import NeedsEngine, Prompter
from router.tokens.engine_clock import EngineClock

_MARGIN: Final = timedelta(seconds=5)  # what the engine's clock may differ from ours
_DAY: Final = timedelta(days=1)
_RETRY: Final = timedelta(seconds=15)
_TIMEOUT_S: Final = 10.0
_LONGEST_SLEEP_S: Final = 60.0  # the clock may be set meanwhile

Now = Callable[[], datetime]
Sleep = Callable[[float], Awaitable[None]]


def _utc_now() -> datetime:
    return datetime.now(UTC)


class DateWatch:
    """Keeps a prompter informed of the date in one replica's prompts of a model."""

    def __init__(
        self,
        model: str,
        prompter: Prompter,
        *,
        replica: str,
        url: str,
        api: EngineApi,
        now: Now = _utc_now,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
        self._prompter = prompter
        self._replica = replica
        self._url = url
        self._api = api
        self._now = now
        self._sleep = sleep
        self._clock = EngineClock()

    async def run(self) -> None:
        """Watch the date until cancelled."""
        self._prompter.note_date(self._replica, None)
        try:
            while True:
                asked = self._now()
                said = await self._ask(asked.date())
                if said is None:
                    await self._until(asked + _RETRY)
                    continue
                self._clock.observe(said, asked)
                midnight = self._clock.next_midnight(asked) or asked + _DAY
                if self._now() < midnight - _MARGIN:
                    self._prompter.note_date(self._replica, said)
                    await self._until(midnight - _MARGIN)
                    self._prompter.note_date(self._replica, None)
                await self._until(midnight + _MARGIN)
        finally:
            self._prompter.forget_date(self._replica)

    async def _ask(self, today: date) -> date | None:
        """Find the date in a prompt of the engine's; None: it does not tell."""
        try:
            if self._prompter.asks_engine:
                body = orjson.dumps(self._body)
                ids = await self._api.tokenize(self._replica, self._url, body, timeout_s=_TIMEOUT_S)
            else:
                ids = await self._api.chat_ids(
                    self._replica, self._url, self._body, timeout_s=_TIMEOUT_S
                )
            return self._prompter.find_date(parse_chat(self._body), ids, today)
        except (RouterError, NeedsEngine):
            return None

    async def _until(self, due: datetime) -> None:
        while (left_s := (due - self._now()).total_seconds()) > 0:
            await self._sleep(min(left_s, _LONGEST_SLEEP_S))
