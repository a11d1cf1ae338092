"""The sessions' ledger, called directly: what prompts are compared with, and what goes first."""

from __future__ import annotations

from array import array

from policies.view import CandidateId
from router.api.digests import PartDigests
from router.base.contracts import BlockKey, HashContract
from router.observers.sessions.session_ledger import SessionLedger, Thread

CONTRACT = HashContract(algorithm="sha256", block_size=16)


def parts(*messages: int) -> PartDigests:
    return PartDigests(
        tools=1, tool_set=1, system=1, messages=array("Q", messages), has_answers=True
    )


def keys(number: int, length: int = 10) -> list[BlockKey]:
    return [BlockKey(1_000 * number + each) for each in range(length)]


def prompt(number: int, *messages: int) -> Thread:
    """A prompt of 160 tokens that shares no block with another number's."""
    return Thread(
        space=0,
        contract=CONTRACT,
        keys=keys(number),
        num_tokens=160,
        parts=parts(*messages),
        candidate=CandidateId("r1"),
        num_emptied=0,
        at_s=0.0,
    )


def remember(ledger: SessionLedger, key: int, thread: Thread) -> None:
    ledger.remember(key, None, thread, num_computed=160)


def test_ended_sessions_are_the_first_to_lose_their_prompts() -> None:
    ledger = SessionLedger(max_bytes=250)
    for key in (1, 2):
        remember(ledger, key, prompt(key, key))
    ledger.ended(2)
    remember(ledger, 3, prompt(3, 3))

    known = {each.key: bool(each.threads) for each in ledger}
    assert known == {1: True, 2: False, 3: True}


def test_a_session_that_ended_and_goes_on_has_its_prompt() -> None:
    """Agents resume sessions."""
    ledger = SessionLedger()
    remember(ledger, 1, prompt(1, 7))
    ended = ledger.ended(1)

    assert ended is not None
    assert ended.has_ended
    found = ledger.match(
        1, None, space=0, keys=keys(1), contract=CONTRACT, num_tokens=160, parts=parts(7)
    )
    assert (found.num_common, found.change) == (160, None)
    remember(ledger, 1, prompt(1, 7))
    assert not ended.has_ended


def test_what_is_not_known_has_no_end() -> None:
    ledger = SessionLedger()

    assert ledger.ended(1) is None


def fork(ledger: SessionLedger, tenant: str | None, *messages: int) -> Thread | None:
    """Return what a new conversation has a part of; None: of nothing that is known."""
    found = ledger.match(
        7,
        None,
        space=0,
        keys=keys(1, 12),
        contract=CONTRACT,
        num_tokens=200,
        parts=parts(*messages),
        tenant=tenant,
    )
    assert found.is_unknown is (found.source is None)
    return found.source


def test_a_fork_is_found_by_its_history_at_its_own_tenant_only() -> None:
    ledger, origin = SessionLedger(), prompt(1, 11, 12, 13)
    ledger.remember(1, None, origin, num_computed=0, tenant="a")

    assert fork(ledger, "a", 11, 12, 13, 14, 15) is origin
    assert fork(ledger, "a", 11, 12, 20) is origin
    assert fork(ledger, "b", 11, 12, 13, 14, 15) is None
    assert fork(ledger, None, 11, 12, 13, 14, 15) is None


def test_what_only_begins_alike_is_no_fork() -> None:
    """Its own history is not known."""
    ledger = SessionLedger()
    ledger.remember(1, None, prompt(1, 11), num_computed=0)

    assert fork(ledger, None, 11, 12, 13, 14, 15, 16) is None
    assert fork(ledger, None, 12, 11) is None


def test_the_openings_of_forgotten_conversations_take_no_room() -> None:
    ledger = SessionLedger(max_sessions=3)
    for key in range(1, 10):
        ledger.remember(key, None, prompt(key, key), num_computed=0)

    assert len(ledger._of_opening) == 3
    assert fork(ledger, None, 1, 2) is None
