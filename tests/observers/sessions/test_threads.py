"""Threads of a conversation: which one a prompt goes on, and what it had of it."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from policies.view import CandidateId
from router.api.digests import PartDigests
from router.base.contracts import BlockKey, HashContract
from router.index.copies import num_common_blocks
from router.observers.sessions.session_ledger import (
    Match,
    SessionLedger,
    Thread,
    num_equal,
)
from router.observers.sessions.turns import Turn

CONTRACT = HashContract(algorithm="sha256", block_size=16)
SESSION, PARENT = 1, 2


def chain(*runs: tuple[int, int]) -> list[BlockKey]:
    """Make a chain: of each pair so many blocks of a number; a key stands for all before it."""
    keys, before = [], 0
    for number, length in runs:
        for position in range(length):
            before = hash((before, number, position)) & ((1 << 60) - 1)
            keys.append(BlockKey(before))
    return keys


class Client:
    """A client of one ledger: each prompt is matched, then remembered."""

    def __init__(self, **bounds: int) -> None:
        self.ledger = SessionLedger(**bounds)

    def match(
        self,
        keys: list[BlockKey],
        *messages: int,
        system: int = 3,
        tools: int = 4,
        key: int = SESSION,
        space: int = 5,
        last_system: int = -1,
    ) -> Match:
        parts = parts_of(*messages, system=system, tools=tools, last_system=last_system)
        return self.ledger.match(
            key,
            PARENT,
            space=space,
            keys=keys,
            contract=CONTRACT,
            num_tokens=16 * len(keys) + 7,
            parts=parts if messages else None,
        )

    def turn(
        self,
        keys: list[BlockKey],
        *messages: int,
        system: int = 3,
        tools: int = 4,
        key: int = SESSION,
        space: int = 5,
        last_system: int = -1,
    ) -> Match:
        """Have a turn; return what was known before it."""
        found = self.match(
            keys,
            *messages,
            system=system,
            tools=tools,
            key=key,
            space=space,
            last_system=last_system,
        )
        thread = Thread(
            space=space,
            contract=CONTRACT,
            keys=keys,
            num_tokens=16 * len(keys) + 7,
            parts=parts_of(*messages, system=system, tools=tools) if messages else None,
            candidate=CandidateId("r1"),
            num_emptied=0,
            at_s=0.0,
            change=found.change.part if found.change is not None else None,
            num_in_row=found.change.num_in_row if found.change is not None else 0,
        )
        self.ledger.remember(key, PARENT, thread, replaces=found.thread)
        return found


def parts_of(*messages: int, system: int = 3, tools: int = 4, last_system: int = -1) -> PartDigests:
    return PartDigests(
        tools=tools,
        tool_set=tools // 10,
        system=system,
        messages=array("Q", messages),
        num_system=1,
        last_system=last_system,
        has_answers=len(messages) > 1,
    )


def test_a_title_generator_is_a_thread_of_its_own() -> None:
    """Under the same session id; neither is a change of the other, nor unknown."""
    client = Client()
    client.turn(chain((1, 10)), 11)
    title = client.turn(chain((9, 2)), 91, system=8)
    more = client.turn(chain((1, 10), (2, 3)), 11, 12, 13)

    assert (title.thread, title.source, title.change, title.is_unknown) == (None, None, None, False)
    assert (more.num_common, more.change) == (160, None)
    assert len(client.ledger.threads(SESSION)) == 2


def test_turns_in_parallel_are_compared_with_what_they_share() -> None:
    """Both go on the same turn; the second to come is compared with the first."""
    client = Client()
    client.turn(chain((1, 10)), 11)
    client.turn(chain((1, 10), (2, 3)), 11, 12, 13)
    found = client.turn(chain((1, 10), (3, 3)), 11, 12, 14)

    assert found.num_common == 160
    assert found.change is not None
    assert (found.change.part, found.change.index, found.change.offset) == ("message", 3, 160)


def test_where_a_prompt_changed_is_named() -> None:
    """Tools before system before messages; the same tools in another order are told apart."""
    for changed, part in (
        ({"tools": 50}, "tools"),
        ({"tools": 5}, "tool_order"),
        ({"system": 9}, "system"),
        ({"last_system": 2}, "later_system"),
        ({"last_system": 1}, "template"),
        ({}, "template"),
    ):
        client = Client()
        client.turn(chain((1, 10)), 11, 12)
        found = client.turn(chain((2, 10)), 11, 12, **changed)
        assert found.change is not None
        assert found.change.part == part


def test_changes_in_a_row_are_counted() -> None:
    client = Client()
    client.turn(chain((1, 10)), 11, system=1)
    rows = [client.turn(chain((2 + n, 10)), 11, system=2 + n).change for n in range(4)]

    assert [each.num_in_row for each in rows if each is not None] == [1, 2, 3, 4]


def test_a_conversation_that_goes_on_unseen_is_unknown() -> None:
    """One that begins is not, and text without messages is found by its tokens."""
    client = Client()
    assert client.match(chain((1, 10)), 11, 12, 13).is_unknown
    assert not client.match(chain((1, 10)), 11).is_unknown
    client.turn(chain((1, 10)))
    assert client.match(chain((1, 9), (2, 3))).num_common == 144


def test_the_longest_silent_session_is_forgotten_first() -> None:
    """Its prompts and turns for want of bytes, all of it for want of sessions."""
    client = Client(max_sessions=3)
    for key in (10, 11, 12, 13):
        client.turn(chain((key, 2)), key, key=key)
    assert [session.key for session in client.ledger] == [13, 12, 11]
    assert client.ledger.num_forgotten == 1

    small = Client(max_bytes=1_000)
    for key in range(10, 30):
        small.turn(chain((key, 10)), key, key=key)
        small.ledger.add(key, turn_of(str(key)))
    oldest, newest = small.ledger.get(10), small.ledger.get(29)
    assert oldest is not None
    assert newest is not None
    assert (oldest.threads, oldest.turns) == ([], [])
    assert oldest.totals.num_turns == 1
    assert len(newest.threads) == 1
    assert small.match(chain((10, 12)), 10, 1, 2, key=10).is_unknown


def test_turns_that_are_booked_out_of_order_are_one_sum() -> None:
    """Causes of a turn may be clear after the next turn's, or first at another router."""
    one, other = Client(), Client()
    turns = [turn_of(str(at), at=float(at), total_ms=9_000.0) for at in (10, 20, 30)]
    for client, order in ((one, (0, 1, 2)), (other, (1, 2, 0))):
        client.turn(chain((1, 2)), 11)
        for number in order:
            client.ledger.add(SESSION, turns[number])
    first, second = one.ledger.get(SESSION), other.ledger.get(SESSION)
    assert first is not None
    assert second is not None

    assert (first.begun, first.last) == (second.begun, second.last) == (10.0, 39.0)
    assert first.totals == second.totals


def test_memory_is_counted_as_it_comes_and_goes() -> None:
    """Whatever the order, the sum is that of what is there."""
    client = Client(max_bytes=200_000)
    for number in range(300):
        key = 10 + number % 7
        client.turn(chain((key, 10 + number)), key, number, key=key)
        client.ledger.add(key, turn_of(str(number)))

    assert client.ledger.num_bytes == sum(session.num_bytes for session in client.ledger)
    assert client.ledger.num_bytes <= 200_000 + 8 * 400
    assert all(len(session.packed) <= 64 for session in client.ledger)


def test_a_client_with_another_system_prompt_in_each_turn_takes_no_memory() -> None:
    """Routing knows it by another name each time; the newest are kept."""
    client = Client()
    for number in range(100):
        thread = Thread(
            space=1,
            contract=CONTRACT,
            keys=chain((1, 2)),
            num_tokens=40,
            parts=parts_of(1),
            candidate=CandidateId("r1"),
            num_emptied=0,
            at_s=0.0,
        )
        client.ledger.remember(SESSION, None, thread, routing=number)

    session = client.ledger.get(SESSION)
    assert session is not None
    assert list(session.routing) == list(range(92, 100))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_what_two_prompts_share_is_found(common: int, one: int, other: int) -> None:
    """By halves, as by counting."""
    first, second = chain((1, common), (2, one)), chain((1, common), (3, other))

    assert num_common_blocks(first, second) == num_common_blocks(second, first) == common
    assert num_equal(parts_of(*first), parts_of(*second)) == common


def turn_of(request_id: str, at: float = 1e9, total_ms: float = 0.0) -> Turn:
    return Turn(
        request_id=request_id,
        at=at,
        total_ms=total_ms,
        candidate=CandidateId("r1"),
        model="m",
        outcome="ok",
        num_tokens=9,
    )
