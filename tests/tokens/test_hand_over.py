"""router.tokens.hand_over: when engines are handed token ids, and when not any more."""

from __future__ import annotations

import pytest

from loadtest.tiny_model import MODEL_DIR
from router.tokens import Prompters, load_prompter
from router.tokens.hand_over import HandOver, Kind, Mode

KIND = Kind("/v1/chat/completions", 1)
OTHER = Kind("/v1/chat/completions", 2)
LONG = 5000


class Told:
    """A HandOver, its one model's prompter, and what it counted."""

    def __init__(self, mode: Mode = "auto") -> None:
        self.ended: list[tuple[str, str]] = []
        self.prompter = load_prompter(str(MODEL_DIR))
        prompters = Prompters()
        prompters.finish_loading("tiny", self.prompter)
        prompters.adapt({"sql": "tiny"})
        self.it = HandOver(
            mode, prompters, ended=lambda model, reason: self.ended.append((model, reason))
        )

    def prove(self, now_s: float = 0.0) -> None:
        """Bring all the evidence there is."""
        self.prompter.trust.observe_proof(True, now_s=now_s)
        for _ in range(8):
            self.it.agreed("tiny", KIND)
        for model, path in self.it.wanted("r1", ["tiny"], now_s):
            self.it.found("r1", model, path, takes=True)

    def is_due(
        self,
        kind: Kind = KIND,
        *,
        model: str = "tiny",
        replica: str = "r1",
        num_tokens: int = LONG,
        now_s: float = 0.0,
    ) -> bool:
        return self.it.is_due(model, kind, replica, num_tokens, now_s)


def test_it_begins_when_all_is_proven() -> None:
    """Whole encode, counts, the kind, the replica: without any of them it is text."""
    told = Told()
    for _ in range(8):
        assert told.it.wanted("r1", ["tiny"], 0.0) == []
        told.it.agreed("tiny", KIND)
    assert told.it.wanted("r1", ["tiny"], 0.0) == []
    told.prompter.trust.observe_proof(True, now_s=0.0)
    assert told.it.wanted("r1", ["tiny", "else"], 0.0) == [("tiny", KIND.path)]
    assert not told.is_due()
    told.it.found("r1", "tiny", KIND.path, takes=True)

    assert told.it.wanted("r1", ["tiny"], 0.0) == []
    assert told.is_due()
    assert told.is_due(model="sql")
    assert not told.is_due(OTHER)
    assert not told.is_due(replica="r2")
    assert not told.is_due(num_tokens=1023)
    assert not told.is_due(Kind("/v1/messages", 1))


def test_a_replica_that_does_not_take_them_is_asked_once() -> None:
    """Until another process is there."""
    told = Told()
    told.prove()
    told.it.found("r1", "tiny", KIND.path, takes=False)

    assert not told.is_due()
    assert told.it.wanted("r1", ["tiny"], 0.0) == []
    told.it.forget("r1")
    assert told.it.wanted("r1", ["tiny"], 0.0) == [("tiny", KIND.path)]


def test_some_go_as_text_all_the_same() -> None:
    """One of 32: what an engine counts of our ids says nothing about them."""
    told = Told()
    told.prove()

    assert sum(told.is_due() for _ in range(320)) == 310


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_doubt_ends_it_for_a_pause(mode: Mode) -> None:
    """At once, counted once; then everything is to be proven anew, after twice the time next."""
    told = Told(mode)
    now_s = 0.0
    for pause_s in (60.0, 120.0, 240.0):
        told.is_due(now_s=now_s)
        told.prove(now_s)
        assert told.is_due(now_s=now_s)
        told.it.doubt("sql", "count", now_s)
        told.it.doubt("tiny", "count", now_s)
        assert not told.is_due(now_s=now_s)
        told.prove(now_s + pause_s - 1.0)
        assert not told.is_due(now_s=now_s + pause_s - 1.0)
        now_s += pause_s

    assert told.ended == [("tiny", "count")] * 3


def test_a_doubt_before_it_began_takes_the_evidence_back() -> None:
    """And nothing has ended."""
    told = Told()
    for _ in range(8):
        told.it.agreed("tiny", KIND)
    told.prompter.trust.observe_proof(True, now_s=0.0)
    told.it.doubt("tiny", "tokens", 0.0)

    assert told.it.wanted("r1", ["tiny"], 0.0) == []
    assert told.ended == []


def test_wrong_ids_of_a_replica_are_a_doubt_before_it_begins() -> None:
    """The replica is not asked again and again."""
    told = Told()
    told.prove()
    told.it.forget("r1")
    told.it.doubt("tiny", "ids", 0.0)
    told.it.agreed("tiny", KIND)

    assert told.it.wanted("r1", ["tiny"], 1.0) == []
    assert told.ended == [("tiny", "ids")]


def test_failures_in_a_row_are_a_doubt() -> None:
    """Three; a success between them begins anew."""
    told = Told()
    told.prove()
    for failed in (True, True, False, True, True):
        told.it.tried("tiny", 0.0, failed=failed)
        assert told.is_due()
    told.it.tried("tiny", 0.0, failed=True)

    assert not told.is_due()
    assert told.ended == [("tiny", "failed")]


def test_it_needs_tokens_that_are_believed() -> None:
    """Not those of a model that is suspect, nor at a replica that counts others."""
    told = Told()
    told.prove()
    told.prompter.trust.observe_usage("r1", 1, 2, num_replicas=3, now_s=0.0)
    assert not told.is_due()
    told.prompter.trust.observe_usage("r1", 2, 2, num_replicas=3, now_s=0.0)
    assert told.is_due()
    told.prompter.trust.observe_proof(False, now_s=0.0)

    assert not told.is_due()


def test_on_needs_a_replica_that_takes_them() -> None:
    """And no evidence of requests."""
    told = Told("on")
    assert not told.is_due()
    assert told.it.wanted("r1", ["tiny"], 0.0) == [("tiny", KIND.path)]
    told.it.found("r1", "tiny", KIND.path, takes=True)

    assert told.is_due()


def test_off_is_off() -> None:
    """Nothing is kept, no replica is asked."""
    told = Told("off")
    told.prove()
    told.it.found("r1", "tiny", KIND.path, takes=True)

    assert not told.is_due()
    assert told.it.wanted("r1", ["tiny"], 0.0) == []


def test_kinds_are_bounded() -> None:
    """Whoever invents template arguments cannot fill memory; the others are proven again."""
    told = Told()
    told.prove()
    for number in range(1000):
        told.it.agreed("tiny", Kind(KIND.path, number + 10))

    assert len(told.it._models["tiny"].kinds) <= 256
