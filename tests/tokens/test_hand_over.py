"""router.tokens.hand_over: when engines are handed token ids, and when not any more."""

from __future__ import annotations

import pytest

from loadtest.tiny_model import MODEL_DIR
from router.tokens import Prompters, load_prompter
from router.tokens.hand_over import HandOver, Kind, Mode
from router.tokens.id_probe import of_text

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
        for model, path in self.hand_over.to_probe("r1", ["tiny"], now_s):
            self.hand_over.observe_probe("r1", model, path, takes=True)

    def is_due(
        self,
        kind: Kind = KIND,
        *,
        model: str = "tiny",
        replica: str = "r1",
        num_tokens: int = LONG,
        now_s: float = 0.0,
    ) -> bool:
        return self.hand_over.is_due(model, kind, replica, num_tokens, now_s)


def test_it_begins_when_all_is_proven() -> None:
    """Prompts go as text until the model, the kind and the replica are proven."""
    setting = Setting()
    for _ in range(8):
        assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == []
        setting.hand_over.observe_match("tiny", KIND)
    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == []
    setting.prompter.trust.observe_proof(True, now_s=0.0)
    assert setting.hand_over.to_probe("r1", ["tiny", "else"], 0.0) == [("tiny", KIND.path)]
    assert not setting.is_due()
    setting.hand_over.observe_probe("r1", "tiny", KIND.path, takes=True)

    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == []
    assert setting.is_due()
    assert setting.is_due(model="sql")
    assert not setting.is_due(OTHER)
    assert not setting.is_due(replica="r2")
    assert not setting.is_due(num_tokens=1023)
    assert not setting.is_due(Kind("/v1/messages", 1))


def test_a_replica_that_does_not_take_them_is_asked_once() -> None:
    """It is asked again only after another process has started there."""
    setting = Setting()
    setting.prove()
    setting.hand_over.observe_probe("r1", "tiny", KIND.path, takes=False)

    assert not setting.is_due()
    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == []
    setting.hand_over.forget("r1")
    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == [("tiny", KIND.path)]


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
    setting.hand_over.suspend("tiny", "tokens", 0.0)

    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == []
    assert setting.suspended == []


def test_a_replica_with_other_ids_is_not_asked() -> None:
    """Nor is it handed any; others are."""
    setting = Setting()
    setting.prove()
    other = of_text("digits", "2024", ["202", "4"], ["2", "024"])
    setting.prompter.trust.observe_ids("r1", other, num_serving=2)
    setting.hand_over.observe_probe("r2", "tiny", KIND.path, takes=True)

    assert not setting.is_due()
    assert setting.is_due(replica="r2")
    setting.hand_over.forget("r1")
    assert setting.hand_over.to_probe("r1", ["tiny"], 1.0) == []
    setting.prompter.trust.forget("r1")
    assert setting.hand_over.to_probe("r1", ["tiny"], 1.0) == [("tiny", KIND.path)]


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


def test_on_needs_a_replica_that_takes_them() -> None:
    """It needs no evidence from requests."""
    setting = Setting("on")
    assert not setting.is_due()
    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == [("tiny", KIND.path)]
    setting.hand_over.observe_probe("r1", "tiny", KIND.path, takes=True)

    assert setting.is_due()


def test_off_is_off() -> None:
    """No evidence is kept, and no replica is asked."""
    setting = Setting("off")
    setting.prove()
    setting.hand_over.observe_probe("r1", "tiny", KIND.path, takes=True)

    assert not setting.is_due()
    assert setting.hand_over.to_probe("r1", ["tiny"], 0.0) == []


def test_kinds_are_bounded() -> None:
    """Invented template arguments cannot fill memory; forgotten kinds are proven again."""
    setting = Setting()
    setting.prove()
    assert setting.is_due()
    for number in range(1000):
        setting.hand_over.observe_match("tiny", Kind(KIND.path, number + 10))

    assert not setting.is_due()
