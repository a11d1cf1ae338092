"""router.tokens.hand_over: when engines are handed token ids, and when not any more."""

from __future__ import annotations

import pytest

from loadtest.tiny_model import MODEL_DIR
from router.tokens import Prompters, load_prompter
from router.tokens.hand_over import HandOver, Kind, Mode
from router.tokens.trust import of_text

KIND = Kind("/v1/chat/completions", 1)
OTHER = Kind("/v1/chat/completions", 2)
LONG = 5000


class Setting:
    """A HandOver, its one model's prompter, and what it counted."""

    def __init__(self, mode: Mode = "auto") -> None:
        self.suspended: list[tuple[str, str]] = []
        self.prompter = load_prompter(str(MODEL_DIR))
        prompters = Prompters()
        prompters.finish_loading("tiny", self.prompter)
        prompters.adapt({"sql": "tiny"})
        self.hand_over = HandOver(
            mode,
            prompters,
            on_suspended=lambda model, reason: self.suspended.append((model, reason)),
        )

    def prove(self, now_s: float = 0.0) -> None:
        """Give it all the evidence it asks for."""
        self.prompter.trust.observe_proof(True, now_s=now_s)
        for _ in range(8):
            self.hand_over.observe_match("tiny", KIND)
        self.prompter.trust.observe_ids("r1", None)

    def is_due(
        self,
        kind: Kind = KIND,
        *,
        model: str = "tiny",
        replica: str = "r1",
        num_tokens: int = LONG,
        now_s: float = 0.0,
        version: str | None = "0.32.0",
    ) -> bool:
        return self.hand_over.is_due(model, kind, replica, num_tokens, now_s, version=version)


def test_it_begins_when_all_is_proven() -> None:
    """Prompts go as text until the model, the kind and the replica are proven."""
    setting = Setting()
    for _ in range(8):
        setting.hand_over.observe_match("tiny", KIND)
    setting.prompter.trust.observe_ids("r1", None)
    assert not setting.is_due()
    setting.prompter.trust.observe_proof(True, now_s=0.0)

    assert setting.is_due()
    assert setting.is_due(model="sql")
    assert not setting.is_due(OTHER)
    assert not setting.is_due(replica="r2"), "its ids were not compared"
    assert not setting.is_due(num_tokens=1023)
    assert not setting.is_due(Kind("/v1/messages", 1))


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        *((None, False), ("", False), ("unknown", False), ("0.31.9", False), ("0.9.2", False)),
        *(("0.0.0.dev", False), ("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", True)),
    ],
)
def test_a_replica_qualifies_by_its_release(version: str | None, takes: bool) -> None:
    """One that is older, or not known, gets none."""
    setting = Setting()
    setting.prove()

    assert setting.is_due(version=version) is takes


def test_some_go_as_text_all_the_same() -> None:
    """One of 32 does: the engine's count of our own ids proves nothing."""
    setting = Setting()
    setting.prove()

    assert sum(setting.is_due() for _ in range(320)) == 310


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_wrong_ids_suspend(mode: Mode) -> None:
    """Wrong ids suspend the model at once; each further pause is twice as long."""
    setting = Setting(mode)
    now_s = 0.0
    for pause_s in (60.0, 120.0, 240.0):
        setting.is_due(now_s=now_s)
        setting.prove(now_s)
        assert setting.is_due(now_s=now_s)
        setting.hand_over.suspend("sql", "count", now_s)
        setting.hand_over.suspend("tiny", "count", now_s)
        assert not setting.is_due(now_s=now_s)
        setting.prove(now_s + pause_s - 1.0)
        assert not setting.is_due(now_s=now_s + pause_s - 1.0)
        now_s += pause_s

    assert setting.suspended == [("tiny", "count")] * 3


def test_suspending_before_it_began_takes_the_evidence_back() -> None:
    """The evidence is forgotten, but no end is counted."""
    setting = Setting()
    for _ in range(8):
        setting.hand_over.observe_match("tiny", KIND)
    setting.prompter.trust.observe_proof(True, now_s=0.0)
    setting.prompter.trust.observe_ids("r1", None)
    setting.hand_over.suspend("tiny", "tokens", 0.0)

    assert not setting.is_due()
    assert setting.suspended == []


def test_a_replica_with_other_ids_gets_none() -> None:
    """Others do, and its next process once it was compared."""
    setting = Setting()
    setting.prove()
    other = of_text("digits", "2024", ["202", "4"], ["2", "024"])
    setting.prompter.trust.observe_ids("r1", other, num_serving=2)
    setting.prompter.trust.observe_ids("r2", None, num_serving=2)

    assert not setting.is_due()
    assert setting.is_due(replica="r2")
    setting.prompter.trust.forget("r1")
    assert not setting.is_due()
    setting.prompter.trust.observe_ids("r1", None, num_serving=2)
    assert setting.is_due()


def test_failures_in_a_row_suspend() -> None:
    """Three failures suspend; a success between them resets the count."""
    setting = Setting()
    setting.prove()
    for failed in (True, True, False, True, True):
        setting.hand_over.observe_attempt("tiny", 0.0, failed=failed)
        assert setting.is_due()
    setting.hand_over.observe_attempt("tiny", 0.0, failed=True)

    assert not setting.is_due()
    assert setting.suspended == [("tiny", "failed")]


def test_it_needs_tokens_that_are_trusted() -> None:
    """A suspect model gets none, nor does a replica that counts other tokens."""
    setting = Setting()
    setting.prove()
    setting.prompter.trust.observe_usage("r1", 1, 2, has_others=True, now_s=0.0)
    assert not setting.is_due()
    setting.prompter.trust.observe_usage("r1", 2, 2, has_others=True, now_s=0.0)
    assert setting.is_due()
    setting.prompter.trust.observe_proof(False, now_s=0.0)

    assert not setting.is_due()


def test_on_needs_a_replica_that_has_our_ids() -> None:
    """It needs no evidence from requests."""
    setting = Setting("on")
    assert not setting.is_due()
    setting.prompter.trust.observe_ids("r1", None)

    assert setting.is_due()


def test_off_is_off() -> None:
    """No evidence is kept."""
    setting = Setting("off")
    setting.prove()

    assert not setting.is_due()


def test_kinds_are_bounded() -> None:
    """Invented template arguments cannot fill memory; forgotten kinds are proven again."""
    setting = Setting()
    setting.prove()
    assert setting.is_due()
    for number in range(1000):
        setting.hand_over.observe_match("tiny", Kind(KIND.path, number + 10))

    assert not setting.is_due()
