"""router.request.observer: what observers see, and that they cannot harm a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from router.base.errors import ConfigError
from router.records.record import DecisionRecord, Outcome
from router.request.observer import Facts, Observer, Observers
from router.request.results import Passage, Placement, Prompt, Read
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, arm, chat, on_stage, streamed, words

_METHODS = (
    "read", "leased", "sent", "first_token", "listen", "released", "failed", "refused", "counted",
    "ended", "settled", "recorded", "close",
)  # fmt: skip


class Seen(Observer):
    """Writes down what it is told, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.facts: list[Facts] = []
        self.records: list[DecisionRecord] = []
        self.body = b""

    def read(self, read: Read) -> None:
        self.calls.append("read")

    def leased(self, prompt: Prompt, placement: Placement) -> None:
        self.calls.append(f"leased {placement.replica}")

    def sent(self, prompt: Prompt, placement: Placement, headers: CIMultiDict[str]) -> None:
        self.calls.append(f"sent {placement.replica}")
        headers["X-Seen"] = "yes"

    def first_token(self, placement: Placement, at_s: float) -> None:
        self.calls.append("first token")

    def listen(self, passage: Passage) -> Callable[[bytes], None] | None:
        self.calls.append("listen")
        return self._take

    def _take(self, chunk: bytes) -> None:
        self.body += chunk

    def released(self, placement: Placement, outcome: Outcome) -> None:
        self.calls.append(f"released {placement.replica} {outcome.value}")

    def failed(self, prompt: Prompt, placement: Placement, failure: str) -> None:
        self.calls.append(f"failed {failure}")

    def refused(self, request_id: str, code: str) -> None:
        self.calls.append(f"refused {code}")

    def ended(self, facts: Facts) -> None:
        self.calls.append("ended")
        self.facts.append(facts)

    def settled(self, facts: Facts) -> None:
        assert facts is self.facts[-1]
        self.calls.append("settled")

    def recorded(self, record: DecisionRecord) -> None:
        self.calls.append("recorded")
        self.records.append(record)


def raising(name: str) -> Observer:
    """Make an observer of which one method raises."""

    def fail(self: Observer, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} failed")

    observer: Observer = type("Raising", (Observer,), {name: fail})()
    return observer


@pytest.mark.parametrize("streams", [False, True])
async def test_an_observer_sees_a_request_in_the_order_of_its_story(streams: bool) -> None:
    """It gets the answer's own bytes, and what the record says."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        seen = Seen()
        stage.router.story.steps.observers.add(seen)
        body = chat(words(1))
        reply = await stage.ask(streamed(body) if streams else body)
        await stage.settled(*engines)
        await stage.until(lambda: "recorded" in seen.calls)

    first = ["first token"] if streams else []
    assert seen.calls == [
        *("read", "leased r1", "sent r1", *first, "listen", "released r1 ok"),
        *("ended", "settled", "recorded"),
    ]
    assert seen.body == reply.body
    [facts], [record] = seen.facts, seen.records
    assert (facts.status, facts.outcome, facts.is_answered) == (200, Outcome.OK, True)
    assert facts.usage is not None
    assert facts.usage.prompt_tokens == record.num_prompt_tokens
    assert record.request_id == reply.headers["x-warmroute-request-id"]


async def test_each_lease_begins_and_ends_for_observers() -> None:
    """A request that moves on has two; the failure is told between them."""
    async with Engines(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        arm(engines[0], "status", status=503, count=1)
        seen = Seen()
        stage.router.story.steps.observers.add(seen)
        for number in range(2):
            assert (await stage.ask(chat(words(number)))).status == 200

    leased = [call for call in seen.calls if call.startswith("leased")]
    released = [call for call in seen.calls if call.startswith("released")]
    assert len(leased) == len(released) == 3
    assert seen.calls.count("failed status_503") == 1
    assert len(seen.facts) == 2


async def test_an_observer_sees_what_the_router_refuses() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        seen = Seen()
        stage.router.story.steps.observers.add(seen)
        await stage.ask(b"no json")

    assert seen.calls == ["refused invalid_request_error"]


async def test_what_observers_raise_fails_no_request() -> None:
    """Whatever the method: it is counted each time and logged once; the next observer is told."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        stage.has_failing_observers = True
        for name in _METHODS:
            stage.router.story.steps.observers.add(raising(name))
        seen = Seen()
        stage.router.story.steps.observers.add(seen)
        for number in range(3):
            reply = await stage.ask(streamed(chat(words(number))))
            assert (reply.status, reply.events[-1]) == (200, "[DONE]")
        await stage.settled(*engines)
        await stage.until(lambda: len(seen.records) == 3)

        counted = stage.metric("warmroute_observer_failures_total", observer="Raising")
        raised = set(_METHODS) - {"failed", "refused", "counted", "close"}
        assert counted == 3 * len(raised)
        assert stage.log.count("error   an observer failed; requests go on") == 1
        assert len(seen.facts) == 3


def test_what_is_not_overridden_costs_nothing() -> None:
    """It is not even called."""
    observers = Observers([Seen()])

    assert observers.read
    assert not observers.counted
    assert not Observers().ended


OWN = """
from router.request.observer import Observer

class Mine(Observer):
    records = []
    def recorded(self, record):
        Mine.records.append(record.request_id)

class Needy(Observer):
    def __init__(self, url): ...

class Other: ...
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of the operator's into the current directory."""
    (tmp_path / "own_observers_of_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "own_observers_of_a_test"


async def test_an_observer_of_ones_own_is_loaded(own_module: str) -> None:
    """From a module of the current directory."""
    async with FakeEngine() as engine:
        async with on_stage(engine, observers__load=(f"{own_module}:Mine",)) as stage:
            reply = await stage.ask(chat(words(1)))
            import own_observers_of_a_test as module  # type: ignore[import-not-found]

            await stage.until(lambda: module.Mine.records)
            assert module.Mine.records == [reply.headers["x-warmroute-request-id"]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("{}", "is not MODULE:CLASS"),
        ("{}:", "is not MODULE:CLASS"),
        ("missing_module:Mine", "cannot import 'missing_module': No module named"),
        ("{}:Missing", "has no class Missing"),
        ("{}:Other", "is not an Observer: Other"),
        ("{}:Needy", r"Needy\(\) failed: TypeError"),
    ],
)
async def test_what_is_no_observer_is_refused(own_module: str, name: str, why: str) -> None:
    """The message names the field and says what is wrong."""
    options: dict[str, Any] = {"observers__load": (name.format(own_module),)}
    async with FakeEngine() as engine:
        with pytest.raises(ConfigError, match=rf"observers\.load\[0\]: .*{why}"):
            async with on_stage(engine, **options):
                pass
