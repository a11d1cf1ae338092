"""Peers and Outbox: two routers that share notes are as one, whatever becomes of the notes."""

from __future__ import annotations

import random

import pytest

from policies import CandidateId, create
from router.base.messages import (
    Alive,
    Answered,
    Began,
    Ended,
    Left,
    Notes,
    SessionState,
    StreamId,
    pack_keys,
)
from router.cluster.peers import LEASE_S
from router.config import ReplicaConfig
from router.index.cache_view import LINGER_S
from router.records.record import Outcome
from router.replicas import EngineLoad
from router.replicas.ledger import Booking
from router.scheduling.conversations import Conversations
from tests.engine import BLOCK_SIZE
from tests.nodes import Node, chain_of

R1, R2 = CandidateId("r1"), CandidateId("r2")
X = StreamId("http://x#0")
POLICY = create("kv_aware")


def began(number: int, stream_id: str = X, *, tokens: int = 100, claimed: bytes = b"") -> Began:
    return Began(number, StreamId(stream_id), tokens, 0, 0, True, claimed)


def say(node: Node, *notes: object, now_s: float = 0.0) -> None:
    node.peers.apply(Notes("other", notes), now_s)  # type: ignore[arg-type]


def test_a_conversation_has_its_class_at_both_routers() -> None:
    """Interactive requests there wait for no room of it, either."""
    a, b = Node("a", ("x",)), Node("b", ("x",))
    booking = Booking(num_uncached_tokens=100, num_cached_tokens=0, session_hash=5, is_batch=True)
    lease = a.fleet.load.admit(R1, booking, 1.0)
    a.outbox.began(lease, claim=None, num_held_blocks=0, session_hash=5)
    b.receive(a, now_s=1.0)

    for node in (a, b):
        assert node.fleet.conversations.working_set(R1).num_tokens > 0
        last = node.fleet.conversations.last(5)
        assert last is not None
        assert last.is_batch


# -- as one --------------------------------------------------------------------------------------


def test_a_request_counts_at_both_routers() -> None:
    """From its begin through its first token to its end; replicas may be named differently."""
    a, b = Node("a", ("x", "y")), Node("b", ("y", "x"))
    chain = chain_of(1, 10)

    lease, claim = a.begin("r1", chain, 1.0, session_hash=5)
    b.receive(a, now_s=1.0)
    assert b.load(1.0) == a.load(1.0)
    assert b.load(1.0)["http://x"][:3] == (1, 1, 10 * BLOCK_SIZE + 1)
    assert b.held("r2", chain) == a.held("r1", chain) == 10
    session = b.conversations.get(5, 1.0)
    assert session is not None
    assert session.candidate == b.fleet.conversations.home(5) == "r2"
    assert session.num_own_tokens == 10 * BLOCK_SIZE + 1

    a.first_token(lease, 1.2)
    b.receive(a, now_s=1.2)
    assert b.load(1.2) == a.load(1.2)
    assert b.fleet.load.status(1.2)[1].num_observations == 1

    a.end(lease, claim, 2.0)
    b.receive(a, now_s=2.0)
    assert b.held("r2", chain) == a.held("r1", chain) == 10  # blind: guessed, at both
    session = b.conversations.get(5, 2.0)
    assert session is not None
    assert session.num_tokens == 10 * BLOCK_SIZE + 1
    for node in (a, b):
        node.caches.expire_claims(2.0 + LINGER_S)
        assert node.leftovers() == []


@pytest.mark.parametrize("seed", range(5))
def test_two_routers_decide_as_one_would(seed: int) -> None:
    """With notes that take no time every decision and every prediction is the same.

    A tenth of a second apart: for so long a router keeps a candidate's slow figures.
    """
    dice = random.Random(seed)
    one, two = Node("one", ("x", "y", "z")), [Node(n, ("x", "y", "z")) for n in "ab"]
    flying: list[tuple[Node, tuple[object, ...], tuple[object, ...]]] = []
    now_s = 0.0
    for number in range(300):
        now_s += 0.1 + dice.expovariate(20.0)
        chain = chain_of(dice.randrange(8), dice.choice([5, 40, 120]), shared=4)
        node = dice.choice(two)
        alone = one.place(POLICY, chain, number, now_s)
        shared = node.place(POLICY, chain, number, now_s)
        flying.append((node, alone, shared))
        for other in two:
            if other is not node:
                other.receive(node, now_s=now_s)

        assert shared[0].candidate == alone[0].candidate
        assert shared[0].predicted_ms == pytest.approx(alone[0].predicted_ms)
        while len(flying) > dice.randrange(1, 12):
            node, alone, shared = flying.pop(dice.randrange(len(flying)))
            now_s += 0.06  # others' first tokens teach no faster than that
            outcome = dice.choice([Outcome.OK, Outcome.OK, Outcome.CLIENT_GONE])
            one.first_token(alone[0], now_s)  # type: ignore[arg-type]
            node.first_token(shared[0], now_s)  # type: ignore[arg-type]
            one.end(*alone, now_s, outcome)  # type: ignore[arg-type]
            node.end(*shared, now_s, outcome)  # type: ignore[arg-type]
            for other in two:
                if other is not node:
                    other.receive(node, now_s=now_s)
            for each in (one, *two):
                each.caches.expire_claims(now_s)
        assert one.load(now_s) == two[0].load(now_s) == two[1].load(now_s)


def test_health_is_each_routers_own() -> None:
    """Another router's request is no trial, and its end neither clears nor blames."""
    a, b = Node("a"), Node("b")
    b.fleet.load.end(b.begin("r1", chain_of(1, 2), 0.0)[0], 0.0, Outcome.REPLICA_UNREACHABLE)
    lease, claim = a.begin("r1", chain_of(2, 2), 40.0)
    b.receive(a, now_s=40.0)
    assert b.fleet.members.is_up("r1", 40.0)  # the trial is still to be had

    a.first_token(lease, 40.1)
    a.end(lease, claim, 40.2)
    b.receive(a, now_s=40.2)
    assert {s.replica: s.state for s in b.fleet.load.status(40.2)} == {"r1": "trial", "r2": "up"}


def test_replicas_are_idle_when_ours_are_done() -> None:
    """Whether a removed replica may go here is not for others' requests to say."""
    a, b = Node("a"), Node("b")
    a.begin("r1", chain_of(1, 2), 0.0)
    b.receive(a, now_s=0.0)

    assert [(s.num_requests, s.num_elsewhere) for s in b.fleet.load.status(0.0)] == [(1, 1), (0, 0)]
    assert b.fleet.load.is_idle("r1")
    assert not a.fleet.load.is_idle("r1")
    b.begin("r1", chain_of(2, 2), 0.0)
    assert not b.fleet.load.is_idle("r1")


def test_engine_figures_do_not_count_others_twice() -> None:
    """What a reading shows beyond own and others' leases is foreign, and that alone."""
    a, b = Node("a"), Node("b")
    a.begin("r1", chain_of(1, 2), 0.0)
    a.begin("r1", chain_of(2, 2), 0.0)
    b.begin("r1", chain_of(3, 2), 0.0)
    b.receive(a, now_s=0.0)
    b.fleet.load.note_engine_load(R1, EngineLoad(num_running=1, num_waiting=3, at_s=0.1))

    view = b.fleet.load.views(b.fleet.offers.candidates("m", 0.1), {}, 0.1)[0]
    assert (view.num_requests, view.num_waiting) == (4, 3)


# -- late, lost, twice ---------------------------------------------------------------------------


def test_our_own_notes_are_passed_over() -> None:
    """The stream brings them back."""
    a = Node("a")
    a.begin("r1", chain_of(1, 2), 0.0)
    a.peers.apply(a.take_notes(), 0.0)

    assert a.load(0.0)["http://x"][0] == 1
    assert a.peers.routers == ()


def test_notes_received_twice_do_nothing() -> None:
    """Begin, first token and end; nor does a begin after the end."""
    b = Node("b")
    for _ in range(2):
        say(b, began(1), Answered(1, 50.0))
    assert b.load(0.0)["http://x"][0] == 1
    assert b.fleet.load.status(0.0)[0].num_observations == 1

    for _ in range(2):
        say(b, Ended(1, True))
    say(b, began(1), Answered(9, 1.0), Ended(9, False))
    assert b.leftovers() == []


def test_a_heartbeat_ends_what_was_lost() -> None:
    """An end that never came; but not a lease that began after the heartbeat."""
    b = Node("b")
    say(b, began(1), began(2), began(3), Alive((2,), 2))

    assert b.load(0.0)["http://x"][0] == 2
    assert b.peers.wanted() == ()


def test_a_lost_begin_is_asked_for() -> None:
    """The heartbeat names it, and the router's load has it."""
    a, b = Node("a"), Node("b")
    a.begin("r1", chain_of(1, 4), 0.0)
    a.outbox.take()  # lost
    a.outbox.alive()
    b.receive(a, now_s=0.5)
    assert b.peers.wanted() == ("a",)

    b.peers.join({"a": a.outbox.load(1.0), "b": b.outbox.load(1.0)}, 1.0)
    assert b.peers.wanted() == ()
    assert b.load(1.0) == a.load(1.0)
    assert b.held("r1", chain_of(1, 4)) == 4


def test_a_router_that_joins_knows_all_at_once() -> None:
    """Waiting and answered leases, in the order they began, whichever router sent them."""
    a, b, late = Node("a"), Node("b"), Node("late")
    first, _ = a.begin("r1", chain_of(1, 10), 0.0)
    b.receive(a, now_s=0.0)
    b.begin("r1", chain_of(2, 10), 0.05)
    a.receive(b, now_s=0.05)
    done, _ = a.begin("r2", chain_of(3, 10), 0.06)
    a.first_token(done, 0.09)
    b.receive(a, now_s=0.09)

    late.peers.join({"b": b.outbox.load(0.1), "a": a.outbox.load(0.1)}, 0.1)
    for url, load in late.load(0.1).items():
        assert load == pytest.approx(a.load(0.1)[url])
        assert load == pytest.approx(b.load(0.1)[url])
    assert set(late.peers.routers) == {"a", "b"}
    assert late.held("r1", chain_of(1, 10)) == 10
    a.first_token(first, 0.2)
    late.receive(a, now_s=0.2)
    assert late.fleet.load.status(0.2)[0].num_waiting == 1


def test_an_outbox_that_is_not_emptied_is_sent_anew() -> None:
    """Above its bound all is dropped; then come the open leases, and a heartbeat."""
    a, b = Node("a", max_notes=4), Node("b")
    done = a.begin("r1", chain_of(1, 2), 0.0)
    b.receive(a, now_s=0.0)
    a.end(*done, 0.1)
    for number in range(5):
        lease, _ = a.begin("r2", chain_of(number, 2), 0.1)
    a.first_token(lease, 0.2)

    notes = a.take_notes()
    assert [type(note) for note in notes.notes] == [*[Began] * 5, Answered, Alive]
    assert a.metrics.registry.get_sample_value("warmroute_notes_dropped_total") == 5.0
    b.peers.apply(notes, 0.2)
    assert {url: load[:3] for url, load in b.load(0.2).items()} == {
        url: load[:3] for url, load in a.load(0.2).items()
    }


def test_claims_count_against_the_bound() -> None:
    """Cold prompts fill the outbox by their keys."""
    a = Node("a", max_bytes=100)
    a.begin("r1", chain_of(1, 10), 0.0)
    assert len(a.outbox.take()) == 1
    a.begin("r1", chain_of(2, 13), 0.0)

    assert [type(note) for note in a.outbox.take()] == [Began, Began, Alive]


def test_what_may_not_have_arrived_is_sent_anew() -> None:
    """Taken, but the store did not take it."""
    a, b = Node("a"), Node("b")
    a.begin("r1", chain_of(1, 2), 0.0)
    a.outbox.take()
    a.outbox.resend()
    notes = a.take_notes()
    b.peers.apply(notes, 0.0)

    assert [type(note) for note in notes.notes] == [Began, Alive]
    assert b.load(0.0) == a.load(0.0)


# -- gone ----------------------------------------------------------------------------------------


def test_a_silent_router_is_forgotten() -> None:
    """With leases and claims; what it had in flight does not count as computed."""
    a, b = Node("a"), Node("b")
    chain = chain_of(1, 10)
    a.begin("r1", chain, 0.0)
    b.receive(a, now_s=0.0)
    a.outbox.alive()
    b.receive(a, now_s=2.0)
    assert b.peers.expire(2.0 + LEASE_S) == ()
    assert b.held("r1", chain) == 10

    assert b.peers.expire(2.1 + LEASE_S) == ("a",)
    assert b.held("r1", chain) == 0
    assert b.leftovers() == []
    assert b.metrics.registry.get_sample_value("warmroute_peers_forgotten_total") == 1.0
    b.peers.forget("a", 9.0)


def test_a_router_that_ends_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It is no loss to warn of; what it had left open is ended. One that nobody knew is none."""
    a, b = Node("a"), Node("b")
    chain = chain_of(1, 10)
    a.begin("r1", chain, 0.0)
    b.receive(a, now_s=0.0)
    with caplog.at_level("INFO", logger="router"):
        for name in ("a", "stranger"):
            b.peers.apply(Notes(name, (Left(),)), 1.0)

    assert b.peers.routers == ()
    assert b.held("r1", chain) == 0
    assert b.leftovers() == []
    assert b.peers.expire(2.1 + LEASE_S) == ()
    assert b.metrics.registry.get_sample_value("warmroute_peers_forgotten_total") == 0.0
    assert [(r.levelname, r.message) for r in caplog.records] == [("INFO", "router left")]


def test_one_that_was_forgotten_in_vain_comes_back_whole() -> None:
    """It was cut off for a while: its next heartbeat names what it has, its load brings it."""
    a, b = Node("a"), Node("b")
    lease, claim = a.begin("r1", chain_of(1, 10), 0.0)
    b.receive(a, now_s=0.0)
    b.peers.expire(10.0)
    a.outbox.alive()
    b.receive(a, now_s=11.0)
    assert b.peers.wanted() == ("a",)
    b.peers.join({"a": a.outbox.load(11.0)}, 11.0)

    assert b.load(11.0)["http://x"][:3] == a.load(11.0)["http://x"][:3]
    a.end(lease, claim, 12.0, Outcome.REPLICA_FAILED)
    b.receive(a, now_s=12.0)
    assert b.leftovers() == []


# -- claims --------------------------------------------------------------------------------------


def test_a_failed_request_takes_its_claim_back() -> None:
    """At the other router, too, and at once."""
    a, b = Node("a"), Node("b")
    chain = chain_of(1, 10)
    lease, claim = a.begin("r1", chain, 0.0)
    b.receive(a, now_s=0.0)
    a.end(lease, claim, 0.1, Outcome.REPLICA_FAILED)
    b.receive(a, now_s=0.1)

    assert b.held("r1", chain) == 0


def test_a_claim_ends_when_its_blocks_are_there() -> None:
    """A delta brings them, from whatever router; or nothing does, and it ends after a while."""
    b = Node("b")
    stream = b.caches.stream(R1)
    assert stream is not None
    stream.is_blind = False  # its state is not blind: blocks are brought, not guessed
    for number in (1, 2):
        say(b, began(number, claimed=pack_keys(chain_of(number, 3))))
    b.caches.index.store(R1, chain_of(1, 3))
    assert stream.on_applied is not None
    stream.on_applied(R1)
    say(b, Ended(1, True), Ended(2, True), now_s=5.0)
    assert (b.held("r1", chain_of(1, 3)), b.held("r1", chain_of(2, 3))) == (3, 3)

    b.caches.expire_claims(5.0 + LINGER_S)
    assert (b.held("r1", chain_of(1, 3)), b.held("r1", chain_of(2, 3))) == (3, 0)


# -- streams -------------------------------------------------------------------------------------


def test_a_note_about_an_unknown_candidate_is_ignored_and_counted() -> None:
    """Unknown replicas, ranks that are not there, no rank at all."""
    b = Node("b")
    for number, id_ in enumerate(["http://z#0", "http://x#1", "http://x", "http://x#y", "#0", ""]):
        say(b, began(number + 1, id_), Answered(number + 1, 1.0))

    assert b.count("unknown_feed") == 6
    say(b, *(Ended(number + 1, True) for number in range(6)))
    assert b.leftovers() == []


def test_what_was_unknown_is_booked_once_it_is_known() -> None:
    """With the next heartbeat: a replica that this router discovers late; ranks by number."""
    b = Node("b", ("x",))
    b.registry.add(ReplicaConfig(url="http://late"))
    late = [began(1, "http://late#1"), began(2, "http://late#1"), Answered(2, 9.0)]
    say(b, *late)
    b.find("r2", num_ranks=2)
    say(b, Alive((1, 2), 2))

    by_id = {s.id: (s.num_requests, s.num_waiting) for s in b.fleet.load.status(0.0)}
    assert by_id == {"r1": (0, 0), "r2#0": (0, 0), "r2#1": (2, 1)}


def test_no_notes_are_sent_of_a_removed_replica() -> None:
    """Requests that still run there have no stream any more; their ends are no news."""
    a = Node("a")
    lease, claim = a.begin("r1", chain_of(1, 2), 0.0)
    a.outbox.take()
    a.registry.remove("r1")
    a.registry.forget("r1")
    a.begin("r1", chain_of(2, 2), 0.0)
    a.outbox.answered(lease, 0.1)
    a.outbox.answered(lease, 0.2)
    a.end(lease, claim, 0.3)
    a.outbox.ended(lease, computed=True)

    assert [type(note) for note in a.outbox.take()] == [Answered, Ended]


def test_nonsense_is_counted_and_survived() -> None:
    """Half keys, negative tokens, a load that is none, a time that no token takes."""
    b = Node("b")
    say(b, began(1, claimed=b"123"), began(2, tokens=-1), Answered(1, float("nan")))
    b.peers.join({"other": b"\xc1"}, 0.0)

    assert b.count("malformed") == 3
    assert b.load(0.0)["http://x"][0] == 1
    assert b.fleet.load.status(0.0)[0].num_observations == 0


# -- sessions ------------------------------------------------------------------------------------


def test_sessions_reach_a_router_that_joins_late() -> None:
    """Each that had a turn is handed out once; what is known here already is newer."""
    a, late = Node("a", ("x", "y")), Node("late", ("y", "x"))
    for turn in range(3):
        a.begin("r1", chain_of(1, 2), 10.0 * turn, session_hash=7)
    a.begin("r2", chain_of(2, 2), 30.0, session_hash=8)
    a.begin("r2", chain_of(2, 2), 30.0)
    late.begin("r2", chain_of(2, 2), 30.0, session_hash=8)

    stored = a.outbox.take_sessions(1) | a.outbox.take_sessions()
    assert a.outbox.take_sessions() == {}
    a.conversations.computed(7, CandidateId("r1"), 50)
    assert stored[7] == SessionState(X)
    late.peers.learn_sessions(stored | {9: SessionState(StreamId("http://z#0"))}, 40.0)
    seven, eight = late.conversations.get(7, 40.0), late.conversations.get(8, 40.0)
    assert seven is not None
    assert eight is not None
    assert seven.candidate == "r2"
    assert eight.last_s == 30.0
    assert late.conversations.get(9, 40.0) is None


def test_a_session_without_a_name_is_stored_from_its_second_turn_on() -> None:
    """Redis need not remember each request that nothing follows."""
    a = Node("a")
    for turn in range(2):
        lease, _ = a.begin("r1", chain_of(1, 2), float(turn))
        assert a.outbox.take_sessions() == {}
        a.conversations.begin(7, CandidateId("r1"), 32, 0, float(turn))
        a.conversations.end(7, 32, float(turn))
        a.outbox.began(
            lease, claim=None, num_held_blocks=0, session_hash=7, has_named_session=False
        )

    assert 7 in a.outbox.take_sessions()


def test_of_sessions_that_no_redis_takes_the_last_are_kept() -> None:
    """As many as are remembered at all; while Redis was away each one stayed, for ever."""
    a = Node("a", conversations=Conversations(max_sessions=3))
    for number in range(5):
        a.begin("r1", chain_of(number, 2), 0.0, session_hash=number)

    assert list(a.outbox.take_sessions()) == [2, 3, 4]


def test_a_session_whose_replica_is_gone_is_not_stored() -> None:
    """No router could find it there."""
    a = Node("a")
    a.begin("r1", chain_of(1, 2), 0.0, session_hash=7)
    a.registry.forget("r1")

    assert a.outbox.take_sessions() == {}
