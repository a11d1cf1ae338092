"""Sessions among routers: what one books, the others know, from no more than what was added."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from policies import CandidateId
from router.api.digests import PartDigests
from router.base.contracts import BlockKey, HashContract
from router.base.messages import Notes, encode
from router.observers.sessions.session_ledger import Match, SessionLedger, Thread
from router.observers.sessions.turn_share import Booked, Remembered, Run
from router.observers.sessions.turns import Turn
from router.records.record import Change, Computed, Loss, Move
from tests.engine import CONTRACT
from tests.nodes import Node, chain_of

SESSION, PARENT = 7, 8
R1 = CandidateId("r1")
SPACE = (1 << 64) - 1
OTHER = HashContract(algorithm="sha256", block_size=32)


def parts(*messages: int) -> PartDigests:
    return PartDigests(
        tools=1, tool_set=2, system=3, messages=array("Q", messages), has_answers=True
    )


def thread(
    chain: Sequence[BlockKey],
    *messages: int,
    contract: HashContract = CONTRACT,
) -> Thread:
    return Thread(
        space=SPACE,
        contract=contract,
        keys=cast("Sequence[BlockKey]", array("Q", chain)),
        num_tokens=len(chain) * contract.block_size + 5,
        parts=parts(*messages),
        candidate=R1,
        num_emptied=0,
        at_s=0.0,
    )


def match(
    ledger: SessionLedger, chain: Sequence[BlockKey], *messages: int, key: int = SESSION
) -> Match:
    return ledger.match(
        key,
        PARENT,
        space=SPACE,
        keys=chain,
        contract=CONTRACT,
        num_tokens=len(chain) * CONTRACT.block_size + 5,
        parts=parts(*messages),
    )


def book(node: Node, told: Thread, *, key: int = SESSION, replaces: Thread | None = None) -> None:
    """Book a turn at one router, as the bookkeeper does."""
    node.ledger.remember(
        key, PARENT, told, num_computed=5, tenant="t", routing=99, replaces=replaces
    )
    node.ledger.add(key, turn_of(told))


def turn_of(told: Thread, **fields: object) -> Turn:
    turn = {
        "request_id": "a-1",
        "at": 1e9,
        "candidate": told.candidate,
        "model": "m",
        "outcome": "ok",
        "num_tokens": told.num_tokens,
        "num_cached": told.num_tokens - 5,
        "num_gpu": told.num_tokens - 5,
        "computed": Computed(tokens={"new": 5}),
    }
    return Turn(**turn | fields)  # type: ignore[arg-type]


def test_a_turn_is_known_at_the_other_router() -> None:
    """Prompt, totals and home; the replica's name is the other router's own."""
    a, b = Node("a", ("x", "y")), Node("b", ("y", "x"))
    book(a, thread(chain_of(1, 10), 11, 12))
    b.receive(a, now_s=1.0)

    session = b.ledger.get(SESSION)
    assert session is not None
    assert (session.tenant, session.parent, list(session.routing)) == ("t", PARENT, [99])
    assert session.home == session.turns[0].candidate == "r2"
    assert session.totals == a.ledger.get(SESSION).totals  # type: ignore[union-attr]
    assert b.ledger.of_request("a-1") is session
    assert b.ledger.num_computed["r2"] == a.ledger.num_computed[R1] == 5
    found = match(b.ledger, chain_of(1, 12), 11, 12, 13)
    assert found.num_common == 10 * CONTRACT.block_size
    assert (found.change, found.is_unknown) == (None, False)


def test_only_what_a_turn_adds_is_sent() -> None:
    """A conversation that goes to and fro between routers is whole at both."""
    a, b = Node("a"), Node("b")
    for turn in range(6):
        here, there = (a, b) if turn % 2 == 0 else (b, a)
        chain, messages = chain_of(1, 100 + 5 * turn), range(1, 10 + 2 * turn)
        before = match(here.ledger, chain, *messages).thread
        book(here, thread(chain, *messages), replaces=before)
        notes = here.take_notes()
        there.peers.apply(notes, 1.0)
        note = next(each for each in notes.notes if isinstance(each, Remembered))

        assert len(note.keys.added) == 8 * (5 if turn else 100)
        assert note.parts is not None
        assert len(note.parts.messages.added) == 8 * (2 if turn else 9)
        for node in (a, b):
            (kept,) = node.ledger.threads(SESSION)
            assert list(kept.keys) == chain
            assert kept.parts == parts(*messages)


def test_a_sub_agents_prompt_goes_on_its_parents() -> None:
    """What the parent had is not sent again."""
    a, b = Node("a"), Node("b")
    book(a, thread(chain_of(1, 100), 1), key=PARENT)
    b.receive(a, now_s=1.0)
    book(a, thread(chain_of(1, 103), 1, 2))
    notes = a.take_notes()
    b.peers.apply(notes, 1.0)

    assert len(cast("Remembered", notes.notes[0]).keys.added) == 8 * 3
    assert list(b.ledger.threads(SESSION)[0].keys) == chain_of(1, 103)


def test_a_router_that_joined_late_has_totals_and_no_keys() -> None:
    """Its next cause is unknown; from the turn that it serves itself, all of it is known again."""
    a, late = Node("a"), Node("late")
    first = thread(chain_of(1, 10), 11)
    book(a, first)
    a.take_notes()
    book(a, thread(chain_of(1, 12), 11, 12, 13), replaces=first)
    late.receive(a, now_s=1.0)

    assert late.count("malformed") == 0
    session = late.ledger.get(SESSION)
    assert session is not None
    assert session.totals.num_turns == 1
    assert late.ledger.threads(SESSION) == []
    found = match(late.ledger, chain_of(1, 14), 11, 12, 13, 14)
    assert found.is_unknown
    book(late, thread(chain_of(1, 14), 11, 12, 13, 14), replaces=found.thread)
    a.receive(late, now_s=2.0)
    assert len(a.ledger.threads(SESSION)) == len(late.ledger.threads(SESSION)) == 1
    assert match(a.ledger, chain_of(1, 15), 11, 12).num_common == 14 * CONTRACT.block_size


def test_other_blocks_of_that_number_are_not_taken_for_its_own() -> None:
    """A receiver whose thread is another one puts no prompt together from it."""
    a, b = Node("a"), Node("b")
    first = thread(chain_of(1, 10), 11)
    book(a, first)
    a.take_notes()
    book(b, thread(chain_of(2, 10), 21))
    book(a, thread(chain_of(1, 12), 11, 12), replaces=first)
    b.receive(a, now_s=1.0)

    (kept,) = b.ledger.threads(SESSION)
    assert list(kept.keys) == chain_of(2, 10)


def test_a_note_that_the_next_turn_overtook_takes_nothing_back() -> None:
    """The next turn was at the other router before the note of the turn before it."""
    a, b = Node("a"), Node("b")
    first = thread(chain_of(1, 10), 11)
    book(a, first)
    b.receive(a, now_s=1.0)
    book(a, thread(chain_of(1, 12), 11, 12), replaces=first)
    late = a.take_notes()
    told = thread(chain_of(1, 14), 11, 12, 13)
    told.at_s = 1e12
    book(b, told, replaces=b.ledger.threads(SESSION)[0])
    b.peers.apply(late, 1.0)

    (kept,) = b.ledger.threads(SESSION)
    assert list(kept.keys) == chain_of(1, 14)
    assert b.ledger.get(SESSION).totals.num_turns == 3  # type: ignore[union-attr]


def test_a_router_that_is_gone_takes_no_session_with_it() -> None:
    a, b = Node("a"), Node("b")
    book(a, thread(chain_of(1, 10), 11))
    b.receive(a, now_s=1.0)
    assert b.peers.expire(1_000.0) == ("a",)

    assert b.ledger.get(SESSION).totals.num_turns == 1  # type: ignore[union-attr]
    assert match(b.ledger, chain_of(1, 12), 11, 12).num_common == 10 * CONTRACT.block_size


def test_names_in_causes_are_the_receivers() -> None:
    """Where it moved from, and who lost it; a replica that is not known keeps its long name."""
    a, b = Node("a", ("x", "y", "z")), Node("b", ("y", "x"))
    told = thread(chain_of(1, 10), 11)
    computed = Computed(
        tokens={"moved": 3, "evicted": 2},
        change=Change(part="system", offset=16),
        move=Move(origin="r2"),
        loss=Loss(replica="r3", since_s=2.0, num_between_tokens=5),
    )
    a.ledger.remember(SESSION, None, told, num_computed=5)
    a.ledger.add(SESSION, turn_of(told, computed=computed, prefill_at=R1))
    b.receive(a, now_s=1.0)

    (turn,) = b.ledger.get(SESSION).turns  # type: ignore[union-attr]
    assert turn.computed is not None
    assert turn.computed.move is not None
    assert turn.computed.loss is not None
    assert (turn.candidate, turn.prefill_at) == ("r2", "r2")
    assert (turn.computed.move.origin, turn.computed.loss.replica) == ("r1", "http://z#0")
    assert turn.computed.tokens == computed.tokens


def test_another_contract_shares_no_blocks() -> None:
    a, b = Node("a"), Node("b")
    first = thread(chain_of(1, 10), 11)
    book(a, first)
    book(a, thread(chain_of(1, 10), 11, 12, contract=OTHER), replaces=first)
    b.receive(a, now_s=1.0)

    assert list(b.ledger.threads(SESSION)[0].keys) == chain_of(1, 10)
    assert match(b.ledger, chain_of(1, 11), 11, 12, 13).is_unknown


@pytest.mark.parametrize(
    "note",
    [
        Booked(SESSION, b"\xc1"),
        Booked(SESSION, encode(("id", float("nan"), "r1", "m", "ok", 1))),
        Booked(SESSION, encode(("id", 1.0, "r1", "m", "ok", -1))),
        Remembered(
            conversation=SESSION,
            parent=None,
            tenant=None,
            routing=None,
            stream_id="http://x#0",
            space=1,
            contract=CONTRACT,
            keys=Run(0, 0, b"12345"),
            num_tokens=1,
            num_computed=1,
            num_pool_tokens=0,
            parts=None,
            change=None,
            num_in_row=0,
        ),
    ],
)
def test_a_malformed_note_is_counted(note: Booked | Remembered) -> None:
    """It changes nothing, and what follows is read."""
    a, b = Node("a"), Node("b")
    book(a, thread(chain_of(1, 3), 11))
    good = a.take_notes()
    b.peers.apply(b.peers.notes.decode(encode(Notes("x", (note, *good.notes)))), 1.0)

    assert b.count("malformed") == 1
    assert b.ledger.get(SESSION).totals.num_turns == 1  # type: ignore[union-attr]


def test_what_earlier_routers_of_the_schema_send_besides_is_ignored() -> None:
    """Their notes of prompts have two more items; the conversation and its load are known."""
    a, b = Node("a"), Node("b")
    book(a, thread(chain_of(1, 3), 11))
    router, (prompt, *others) = msgspec.msgpack.decode(encode(a.take_notes()))
    longer = [*prompt, "tiny", [[5, 48, 1]]]
    b.peers.apply(b.peers.notes.decode(encode([router, [longer, *others]])), 1.0)

    assert b.count("malformed") == 0
    assert b.ledger.get(SESSION).totals.num_turns == 1  # type: ignore[union-attr]
    assert list(b.ledger.threads(SESSION)[0].keys) == chain_of(1, 3)


def test_the_oldest_notes_are_dropped_while_nobody_takes_them() -> None:
    """Redis is away: they are bounded by bytes, and counted."""
    a, b = Node("a", max_later_bytes=20_000), Node("b")
    for number in range(50):
        book(a, thread(chain_of(number, 100), number), key=number + 1)
    b.receive(a, now_s=1.0)

    assert 0 < len(b.ledger) < 20
    assert b.ledger.get(50) is not None
    assert a.metrics.notes_dropped._series[()].value > 60
