"""A stream that starts from the blocks that another router's stream had."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from policies.view import CandidateId
from router.base.contracts import BlockKey, HashContract
from router.base.messages import Position, StreamStatus
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.candidate_stream import StreamCounters
from router.kv_events.sequence import MAX_FAILED_REPLAYS
from router.kv_events.stream import BLIND_AFTER_S, RankStream
from router.kv_events.wire import AllBlocksCleared, BlockStored
from tests.engine import BLOCK_SIZE, CONTRACT, batch, hashes, prompt, removed, stored

R1 = CandidateId("r1")
OTHER = HashContract(algorithm="sha256_cbor", block_size=BLOCK_SIZE)
RANDOM = HashContract(algorithm="xxhash", block_size=BLOCK_SIZE, seed="drawn at random")
RESUMING = "resuming: used as it was, until a replay confirms it"


class Engine:
    """An engine's batches, and the streams that one router after another follows it with."""

    def __init__(self, *payloads: bytes) -> None:
        self.index = BlockIndex()
        self.history = list(payloads)
        self.stream = self.new_stream()
        self.stream.connected()
        self.replay()

    def new_stream(self, **options: Any) -> RankStream:
        return RankStream(R1, self.index, block_size=BLOCK_SIZE, capacity_blocks=9, **options)

    def say(self, payload: bytes, *, received: bool = True) -> None:
        self.history.append(payload)
        if received:
            self.stream.receive(len(self.history) - 1, payload)

    def replay(self, *, oldest: int = 0) -> None:
        while self.stream.wanted_replay is not None:
            start = self.stream.begin_replay()
            for sequence in range(max(start, oldest), len(self.history)):
                self.stream.replayed(sequence, self.history[sequence])
            self.stream.end_replay(is_complete=True)

    def resume(self, *, newest: Position | None = None, **status: Any) -> bool:
        """Let another stream go on, as if its router had shared what the first one knew."""
        position = self.stream.position
        assert position is not None
        known = structs.replace(self.stream.status(), **status)
        self.stream = self.new_stream()
        return self.stream.resume(position, known, 100.0, newest=newest or position)

    def matched(self, *numbers: int, contract: HashContract = CONTRACT) -> list[int]:
        chains = [contract.extend(None, prompt(number))[0] for number in numbers]
        return [self.index.match(chain, [R1])[R1].num_gpu_blocks for chain in chains]


def said(*numbers: int, contract: HashContract = CONTRACT) -> list[bytes]:
    return [batch(stored(prompt(number), contract=contract)) for number in numbers]


def test_the_position_is_the_last_batch_applied() -> None:
    """None before any, and None again while everything is read anew."""
    engine = Engine()
    assert engine.stream.position is None
    engine.say(said(1)[0])
    assert engine.stream.position == Position(0, engine.history[0][:10])
    engine.stream.mark_suspect("wrong")

    assert engine.stream.position is None


def test_a_resumed_stream_believes_and_says_that_it_is_not_proven() -> None:
    """It is not blind: what the index holds is as old as the other router is dead."""
    engine = Engine(*said(1, 2))
    assert engine.resume()

    assert engine.stream.state_and_reason() == ("degraded", RESUMING)
    assert engine.matched(1, 2) == [3, 3]
    assert engine.stream.wanted_replay == 1
    assert engine.stream.contract == CONTRACT


def test_the_overlap_proves_the_engine_and_nothing_is_applied_twice() -> None:
    """Only what came behind the position; copies are counted as if nothing had happened."""
    engine = Engine(*said(1, 2))
    engine.resume()
    engine.say(said(3)[0], received=False)
    engine.say(batch(removed(hashes(prompt(1)))))
    engine.stream.connected()
    engine.replay()

    assert engine.stream.state_and_reason() == ("exact", "")
    assert engine.matched(1, 2, 3) == [0, 3, 3]
    engine.say(batch(removed(hashes(prompt(2)))))
    assert engine.matched(2) == [0]


def test_another_engine_is_recognised() -> None:
    """The batch that comes back is another one: everything is forgotten, then read."""
    engine = Engine(*said(1, 2))
    engine.resume()
    engine.history = said(7, 8, 9)
    engine.stream.connected()
    engine.replay()

    assert engine.matched(1, 2, 7, 8, 9) == [0, 0, 3, 3, 3]
    assert engine.stream.state_and_reason() == ("exact", "")
    assert engine.stream.counters.history.num_restarts == 1


def test_a_buffer_that_lost_the_position_begins_anew() -> None:
    """What is left of history is taken, and it is said that some is missing."""
    engine = Engine(*said(1, 2))
    engine.resume()
    engine.history += said(3, 4)
    engine.stream.connected()
    engine.replay(oldest=3)

    assert engine.matched(1, 2, 3, 4) == [0, 0, 0, 3]
    assert engine.stream.state_and_reason() == (
        "degraded",
        "history before the router joined is lost",
    )


def test_without_replay_a_sequence_that_goes_on_is_proof_enough() -> None:
    """As for a reconnection; one that does not go on begins anew."""
    engine = Engine(*said(1))
    engine.resume()
    engine.stream.opened(has_replay=False)
    engine.stream.connected()
    assert engine.stream.state_and_reason() == ("degraded", RESUMING)
    engine.say(said(2)[0])
    assert engine.stream.state_and_reason() == ("exact", "")
    assert engine.matched(1, 2) == [3, 3]

    engine.resume()
    engine.stream.opened(has_replay=False)
    engine.stream.connected()
    engine.say(said(3)[0], received=False)
    engine.say(said(4)[0])
    assert engine.matched(1, 2, 3, 4) == [0, 0, 0, 3]


def test_live_batches_do_not_pass_before_the_proof() -> None:
    """Not even the next in order: another engine may have counted as far."""
    engine = Engine(*said(1))
    engine.resume()
    engine.say(said(2)[0])

    assert engine.matched(2) == [0]
    engine.replay()
    assert engine.matched(1, 2) == [3, 3]


def test_replays_that_fail_leave_it_unproven() -> None:
    """It begins anew with the next batch; until then nothing is known to have changed."""
    engine = Engine(*said(1))
    engine.resume()
    engine.stream.connected()
    for _ in range(MAX_FAILED_REPLAYS):
        engine.stream.begin_replay()
        engine.stream.end_replay(is_complete=False)

    assert engine.stream.state_and_reason() == ("degraded", RESUMING)
    assert engine.stream.position is None
    engine.say(said(2)[0])
    assert engine.matched(1, 2) == [0, 3]
    assert engine.stream.state_and_reason() == (
        "degraded",
        "history before the router joined is lost",
    )


def test_an_engine_that_cannot_be_reached_is_not_believed_for_ever() -> None:
    """As one whose publisher has gone."""
    engine = Engine(*said(1))
    engine.resume()
    engine.stream.tick(100.0 + BLIND_AFTER_S - 1)
    assert engine.matched(1) == [3]
    engine.stream.tick(100.0 + BLIND_AFTER_S)

    assert engine.matched(1) == [0]
    assert engine.stream.state_and_reason() == ("blind", "event stream lost")


def test_what_the_other_router_had_missed_is_still_missing() -> None:
    """Until the cache is cleared."""
    engine = Engine(*said(1))
    engine.resume(state="degraded", lacks="a batch was not understood")
    engine.stream.connected()
    engine.replay()

    assert engine.stream.state_and_reason() == ("degraded", "a batch was not understood")
    assert engine.stream.status().lacks == "a batch was not understood"
    engine.say(batch(AllBlocksCleared()))
    assert engine.stream.state == "exact"


@pytest.mark.parametrize(
    "status",
    [
        {"contract": HashContract(algorithm="warmroute", block_size=BLOCK_SIZE)},
        {"state": "blind"},
        {"is_suspect": True},
    ],
)
def test_some_knowledge_cannot_be_resumed(status: dict[str, Any]) -> None:
    """Translations are not shared; suspect blocks are read again."""
    engine = Engine(*said(1))

    assert not engine.resume(**status)
    assert engine.stream.state_and_reason() == ("blind", "no events yet")
    engine.stream.connected()
    engine.replay()
    assert (engine.stream.state, engine.matched(1)) == ("exact", [3])


def test_blocks_newer_than_the_position_count_once() -> None:
    """The blocks were read while batches were written: the replay brings these again."""
    engine = Engine(*said(1))
    position = engine.stream.position
    assert position is not None
    engine.say(said(2)[0])
    newest = engine.stream.position
    known = engine.stream.status()
    engine.stream = engine.new_stream()
    engine.stream.resume(position, known, 100.0, newest=newest)
    engine.stream.connected()
    engine.say(said(2)[0], received=False)  # a second copy, after the blocks were read
    engine.replay()

    engine.say(batch(removed(hashes(prompt(2)))))
    assert engine.matched(1, 2) == [3, 3]
    engine.say(batch(removed(hashes(prompt(2)))))
    assert engine.matched(1, 2) == [3, 0]


# -- the contract --------------------------------------------------------------------------------


def test_a_contract_found_elsewhere_is_verified_once() -> None:
    """At the first prompt that can; it is not searched for."""
    engine = Engine(*said(1, contract=OTHER))
    engine.resume()
    engine.stream.connected()
    engine.replay()

    assert engine.stream.status() == StreamStatus("exact", "", OTHER, 9)
    engine.say(said(2, contract=OTHER)[0])
    assert engine.stream.state == "exact"
    assert engine.matched(1, 2, contract=OTHER) == [3, 3]


def test_a_contract_that_turns_out_wrong_costs_no_blocks() -> None:
    """They are named by the engine; the search begins anew and finds the right one."""
    engine = Engine(*said(1))
    engine.resume(contract=OTHER)
    engine.stream.connected()
    engine.replay()
    engine.say(said(2)[0])
    assert engine.stream.state_and_reason() == ("degraded", "hash contract is not verified yet")
    engine.say(said(3)[0])

    assert engine.stream.contract == CONTRACT
    assert engine.stream.state == "exact"
    assert engine.matched(1, 2, 3) == [3, 3, 3]


def test_a_mere_guess_is_searched_for() -> None:
    """The other router had not seen a prompt either."""
    engine = Engine(*said(1))
    engine.resume(is_verified=False, contract=OTHER)
    engine.stream.connected()
    engine.replay()

    assert engine.stream.state_and_reason() == ("degraded", "hash contract is not verified yet")
    assert not engine.stream.status().is_verified
    engine.say(said(2)[0])
    assert engine.stream.state_and_reason() == ("exact", "")


def test_removals_of_groups_that_are_unknown_here_count() -> None:
    """Better too little is held than too much; stores of such a group wait for its kind."""
    names = prompt(1)
    engine = Engine(batch(stored(names, group=1)))
    assert engine.matched(1) == [3]
    engine.resume()
    engine.stream.connected()
    engine.replay()
    engine.say(batch(removed(hashes(names)[2:], group=1)))

    assert engine.matched(1) == [2]
    engine.say(batch(AllBlocksCleared(), stored(names, group=0)))
    engine.say(batch(removed(hashes(names), group=1)))
    assert engine.matched(1) == [3]


# -- around it -----------------------------------------------------------------------------------


def test_counters_claims_and_trust_survive_a_hand_over() -> None:
    """The candidate is the same, only the source of knowledge is another."""
    engine = Engine(*said(1))
    caches = CacheView(engine.index)
    caches.hand_over(R1, engine.stream)
    for _ in range(5):
        caches.audit.record(R1, 1, 2)
    chain = CONTRACT.extend(None, prompt(2))[0]
    claim = caches.claim(R1, chain, 0)
    old, trust = engine.stream, caches.trust(R1)
    engine.stream = engine.new_stream(counters=old.counters)
    position = old.position
    assert position is not None
    engine.stream.resume(position, old.status(), 0.0, newest=position)
    caches.hand_over(R1, engine.stream)
    engine.stream.connected()
    engine.replay()

    assert caches.match(chain, [R1])[R1].num_gpu_blocks == 3
    assert (caches.trust(R1), caches.stream(R1)) == (trust, engine.stream)
    assert (old.on_applied, engine.stream.counters.num_batches) == (None, 1)
    engine.say(said(2)[0])
    assert claim.speculation is None


def test_a_second_suspicion_does_not_begin_the_reading_again() -> None:
    """Once reading has begun, a new reason counts."""
    engine = Engine(*said(1, 2))
    engine.stream.mark_suspect("wrong")
    engine.stream.begin_replay()
    engine.stream.mark_suspect("wrong here, too")
    assert engine.stream.reason == "wrong here, too"
    for sequence, payload in enumerate(engine.history):
        engine.stream.replayed(sequence, payload)
    engine.stream.end_replay(is_complete=True)

    assert engine.stream.wanted_replay is None
    assert engine.matched(1, 2) == [3, 3]
    engine.stream.mark_suspect("wrong again")
    assert engine.stream.wanted_replay == 0


# -- the pool ------------------------------------------------------------------------------------


class Pooled(Engine):
    """An engine whose connector reports what it writes to the shared pool."""

    def __init__(self, *payloads: bytes) -> None:
        self.pooled: list[BlockKey] = []
        super().__init__(*payloads)

    def new_stream(self, **options: Any) -> RankStream:
        def note(keys: Any) -> None:
            self.pooled += keys

        return super().new_stream(pool_stored=note, **options)


def connectors(tokens: list[int], contract: HashContract = CONTRACT) -> list[BlockStored]:
    """Mooncake's events: one a block, without extra keys."""
    events = []
    for skip in range(3):
        event = stored(tokens[: (skip + 1) * BLOCK_SIZE], skip=skip, medium="cpu", kind=None)
        event.block_hashes = [hashes(tokens, contract)[skip]]
        event.extra_keys = None
        events.append(event)
    return events


def test_what_a_connector_stores_goes_to_the_pool_and_not_to_the_replica() -> None:
    """A removal there is one replica's view of the pool: it does not count."""
    engine = Pooled(batch(stored(prompt(1)), *connectors(prompt(1))))
    engine.say(batch(removed(hashes(prompt(1)), medium="cpu")))

    assert engine.pooled == CONTRACT.extend(None, prompt(1))[0]
    assert engine.index.num_blocks(R1, "cpu") == 0
    assert engine.matched(1) == [3]
    assert (
        engine.stream.counters.blocks.num_stored,
        engine.stream.counters.blocks.num_missing,
    ) == (6, 0)


def test_a_replica_without_a_pool_keeps_its_own() -> None:
    """The same events, another meaning."""
    engine = Engine(batch(stored(prompt(1)), *connectors(prompt(1))))

    assert engine.index.num_blocks(R1, "cpu") == 3


def test_translated_names_mean_nothing_to_a_pool() -> None:
    """Nothing is passed on, and nothing is held."""
    engine = Pooled(*said(1, 2, 3, contract=RANDOM))
    assert engine.stream.contract.algorithm == "warmroute"
    engine.say(batch(*connectors(prompt(1), RANDOM)))

    assert engine.pooled == []
    assert engine.index.num_blocks(R1, "cpu") == 0
    assert engine.stream.counters.blocks.num_untranslated == 3


def test_a_pool_needs_no_counters_of_its_own() -> None:
    """A stream counts alone unless it goes on with another's."""
    mine = StreamCounters()

    assert Engine().new_stream(counters=mine).counters is mine


def test_lost_history_that_was_taken_over_ends_as_ones_own_does() -> None:
    """Another router lost it; a cache full of known evictions later nothing of it is left."""
    engine = Engine(*said(1, 2))
    engine.resume(lacks="history before the router joined is lost")
    engine.stream.connected()
    engine.replay()
    taken_over = engine.stream.state_and_reason()
    for number in (3, 4, 5):
        engine.say(said(number)[0])
        engine.say(batch(removed(hashes(prompt(number)))))

    assert taken_over == ("degraded", "history before the router joined is lost")
    assert engine.stream.state == "exact"
