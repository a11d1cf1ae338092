"""The date in an engine's prompts: proven by its own tokens, unknown around a midnight."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from router.api.openai import parse_chat
from router.discovery.dates import DateWatch
from router.discovery.engine_api import EngineApi
from router.errors import UpstreamBroken
from router.tokens import NeedsEngine, Prompter
from tests.tokens.prove_families import load

CHAT = parse_chat({"messages": [{"role": "user", "content": "Hi"}]})
START = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)


@functools.cache
def _loaded(_: str) -> Prompter:
    """Load a prompter, half a second; one for each side."""
    return load("gpt-oss")


class Engine(EngineApi):
    """An engine with a clock of its own, which answers with its prompt's tokens."""

    def __init__(self, say: Callable[[], date | None]) -> None:
        self._say = say
        self._prompter = _loaded("engine")
        self.num_asked = 0

    async def chat_ids(self, replica: str, url: str, body: Any, *, timeout_s: float) -> list[int]:
        self.num_asked += 1
        said = self._say()
        if said is None:
            raise UpstreamBroken(replica, "no tokens")
        self._prompter.set_date(said)
        plan = self._prompter.plan_chat(CHAT)
        return self._prompter.commit(plan, plan.encode()).ids()


class Time:
    """Passes when a task sleeps, and ends a watch after a while."""

    def __init__(self, look: Callable[[datetime], None], hours: float) -> None:
        self.now = START
        self._look = look
        self._end = START + timedelta(hours=hours)

    async def sleep(self, seconds: float) -> None:
        self._look(self.now)
        self.now += timedelta(seconds=seconds)
        if self.now > self._end:
            raise asyncio.CancelledError


@pytest.fixture
def prompter() -> Iterator[Prompter]:
    prompter = _loaded("router")
    prompter.set_date(None)
    yield prompter
    for replica in ("r1", "r2"):
        prompter.forget_date(replica)


async def _watch(prompter: Prompter, engine: Engine, time: Time) -> None:
    watch = DateWatch(
        "m",
        prompter,
        replica="r1",
        url="http://r1",
        api=engine,
        now=lambda: time.now,
        sleep=time.sleep,
    )
    with pytest.raises(asyncio.CancelledError):
        await watch.run()


def _shown(prompter: Prompter) -> date | None:
    """Return the date with which a chat is rendered."""
    try:
        text = prompter.render(CHAT)
    except NeedsEngine:
        return None
    return date.fromisoformat(text[3:13])


@pytest.mark.parametrize("offset_h", [0, -7, 9])
async def test_no_other_date_than_the_engines(prompter: Prompter, offset_h: int) -> None:
    """Over two days each prompt has the engine's date, and few are not known at all."""
    shown: list[date | None] = []

    def look(now: datetime) -> None:
        shown.append(_shown(prompter))
        assert shown[-1] in (None, (now + timedelta(hours=offset_h)).date())

    time = Time(look, hours=48)
    engine = Engine(lambda: (time.now + timedelta(hours=offset_h)).date())

    await _watch(prompter, engine, time)

    assert shown.count(None) < 0.2 * len(shown)
    assert engine.num_asked < 120
    assert _shown(prompter) is None  # the replica is gone


async def test_a_pinned_date(prompter: Prompter) -> None:
    """A date that no clock shows is read from the engine's prompt, and seldom asked for again."""
    pinned = date(2025, 6, 28)
    shown: list[date | None] = []
    time = Time(lambda now: shown.append(_shown(prompter)), hours=20)
    engine = Engine(lambda: pinned)

    await _watch(prompter, engine, time)

    assert set(shown) == {pinned}
    assert engine.num_asked == 1


async def test_an_engine_that_does_not_tell(prompter: Prompter) -> None:
    """Then the date is not known, and it is asked again."""
    time = Time(lambda now: None, hours=0.1)
    engine = Engine(lambda: None)

    await _watch(prompter, engine, time)

    assert _shown(prompter) is None
    assert engine.num_asked > 5


def test_replicas_must_agree(prompter: Prompter) -> None:
    """One prompt cannot have two dates: while replicas differ, it has none here."""
    prompter.note_date("r1", START.date())
    prompter.note_date("r2", None)
    assert _shown(prompter) is None

    prompter.note_date("r2", START.date())
    assert _shown(prompter) == START.date()

    prompter.note_date("r2", date(2025, 1, 1))
    assert _shown(prompter) is None

    prompter.forget_date("r2")
    assert _shown(prompter) == START.date()
