"""A stream that follows another router: which deltas count, what is believed, what is called."""

from __future__ import annotations

import pytest

from policies.view import CandidateId
from router.cluster.shared_stream import SharedStream
from router.contracts import BlockKey, HashContract
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.counters import StreamCounters
from router.index.staged_blocks import StagedBlocks
from router.messages import (
    Delta,
    Position,
    StreamHead,
    StreamId,
    StreamStatus,
    TierChange,
    pack_keys,
)
from tests.engine import BLOCK_SIZE, CONTRACT

A = CandidateId("a")
STREAM = StreamId("a#0")
OTHER = HashContract(algorithm="sha256_cbor", block_size=BLOCK_SIZE)
EXACT = StreamStatus("exact", "", OTHER, 77)
GUESSED = StreamStatus(
    "degraded", "hash contract is not verified yet", CONTRACT, 77, is_verified=False
)
P5, P6 = Position(5, b"five"), Position(6, b"six")


def keys(*names: int) -> list[BlockKey]:
    return [BlockKey(name) for name in names]


def stored(*names: int) -> TierChange:
    return TierChange("gpu", stored=pack_keys(keys(*names)))


def staged(*names: int) -> StagedBlocks:
    made = StagedBlocks()
    made.add("gpu", keys(*names))
    return made


class Follower:
    """A router that follows one stream."""

    def __init__(self) -> None:
        self.caches = CacheView(BlockIndex())
        self.counters = StreamCounters()
        self.stream = SharedStream(
            A,
            self.caches.index,
            block_size=BLOCK_SIZE,
            capacity_blocks=9,
            seed="s",
            counters=self.counters,
        )
        self.caches.add(A, self.stream)

    def joined(self, *names: int, status: StreamStatus | None = EXACT) -> Follower:
        self.stream.load(StreamHead(10, P5, status), staged(*names))
        return self

    def num_matched(self) -> int:
        return self.caches.match(keys(*range(9)), [A])[A].num_gpu_blocks


def test_a_stream_without_a_snapshot_is_blind() -> None:
    """Nothing is known, deltas of before are of no use, and a snapshot is wanted."""
    follower = Follower()
    follower.stream.apply(Delta(STREAM, 4, changes=(stored(0),)))

    assert follower.stream.state_and_reason() == ("blind", "no events yet")
    assert follower.stream.wants_snapshot
    assert not follower.stream.has_history
    assert follower.num_matched() == 0
    assert follower.stream.contract == HashContract(
        algorithm="sha256", block_size=BLOCK_SIZE, seed="s"
    )
    assert (follower.stream.capacity_blocks, follower.stream.position) == (9, None)


def test_a_snapshot_brings_blocks_status_and_position() -> None:
    """As exact as its leader."""
    follower = Follower().joined(0, 1)

    assert follower.stream.state_and_reason() == ("exact", "")
    assert (follower.stream.state, follower.stream.reason) == ("exact", "")
    assert (follower.stream.contract, follower.stream.capacity_blocks) == (OTHER, 77)
    assert (follower.stream.number, follower.stream.position) == (10, P5)
    assert follower.stream.has_history
    assert follower.num_matched() == 2
    assert follower.stream.epoch == 1


def test_a_snapshot_of_a_stream_that_never_sent_its_status_is_blind() -> None:
    """A router holds the lease and has received no events."""
    assert Follower().joined(status=None).stream.state_and_reason() == ("blind", "no events yet")


def test_deltas_go_on_behind_the_snapshot() -> None:
    """Those in it are ignored, the next is applied, what it does not say stays."""
    follower = Follower().joined(0)
    follower.stream.apply(Delta(STREAM, 10, changes=(stored(5),)))
    follower.stream.apply(Delta(STREAM, 11, changes=(stored(1),), status=GUESSED))
    follower.stream.apply(Delta(STREAM, 12, changes=(stored(2),), position=P6))

    assert follower.num_matched() == 3
    assert not follower.caches.index.holds(A, BlockKey(5))
    assert follower.stream.state_and_reason() == ("degraded", "hash contract is not verified yet")
    assert (follower.stream.number, follower.stream.position) == (12, P6)
    assert (follower.counters.num_duplicates, follower.counters.num_batches) == (1, 2)


def test_a_gap_wants_a_snapshot_and_changes_nothing() -> None:
    """What is known is of one moment still, and can be resumed from there."""
    follower = Follower().joined(0)
    follower.stream.apply(Delta(STREAM, 12, changes=(stored(1),), position=P6))
    follower.stream.apply(Delta(STREAM, 13, changes=(stored(1),), position=P6))

    assert follower.stream.state_and_reason() == ("degraded", "part of its stream was lost")
    assert follower.stream.wants_snapshot
    assert (follower.num_matched(), follower.stream.position) == (1, P5)
    assert follower.counters.num_gaps == 1
    follower.stream.load(StreamHead(13, P6, EXACT), staged(0, 1))
    assert (follower.stream.state, follower.num_matched()) == ("exact", 2)


@pytest.mark.parametrize("number", [1, 11, 40])
def test_a_clear_counts_whatever_its_number(number: int) -> None:
    """A flushed server counts from 1 again; after a clear no history is missing."""
    follower = Follower().joined(0, 1)
    epoch = follower.stream.epoch
    follower.stream.apply(Delta(STREAM, number, cleared=True, changes=(stored(0),)))
    follower.stream.apply(Delta(STREAM, number + 1, changes=(stored(1),), position=P6))

    assert follower.num_matched() == 2
    assert (follower.stream.epoch, follower.stream.position) == (epoch + 1, P6)
    assert not follower.stream.wants_snapshot


def test_a_clear_forgets_the_position() -> None:
    """An empty index is not what the engine had after any batch."""
    follower = Follower().joined(0)
    follower.stream.apply(Delta(STREAM, 11, cleared=True))

    assert follower.stream.position is None


def test_there_is_no_position_while_moments_are_mixed() -> None:
    """In the middle of what one moment changed, and before a snapshot's end was reached."""
    follower = Follower().joined(0)
    follower.stream.apply(Delta(STREAM, 11, continues=True))
    assert follower.stream.position is None
    follower.stream.apply(Delta(STREAM, 12, position=P6))
    assert follower.stream.position == P6

    follower.stream.load(StreamHead(20, P5, EXACT), staged(0), through=22)
    assert follower.stream.position is None
    follower.stream.apply(Delta(STREAM, 21, position=P6))
    assert follower.stream.position is None
    follower.stream.apply(Delta(STREAM, 22, changes=(stored(1),)))
    assert follower.stream.position == P6


def test_what_cannot_be_understood_is_counted_and_missed_until_the_next_epoch() -> None:
    """Cut-off keys, impossible copies, other tiers; the rest of the delta counts."""
    follower = Follower().joined(0)
    bad = (
        TierChange("gpu", stored=b"1234567"),
        TierChange("gpu", removed=b"123456789"),
        TierChange("gpu", copies=((BlockKey(3), 0),)),
    )
    pool = TierChange("pool", stored=pack_keys(keys(7)))
    follower.stream.apply(Delta(STREAM, 11, changes=(*bad, pool, stored(1))))

    lacks = "part of its stream was not understood"
    assert follower.stream.state_and_reason() == ("degraded", lacks)
    assert follower.stream.status().lacks == lacks
    assert (follower.counters.num_undecodable, follower.counters.num_unknown_medium) == (3, 1)
    assert follower.num_matched() == 2
    follower.stream.apply(Delta(STREAM, 12, cleared=True))
    assert follower.stream.state == "exact"


def test_suspicions_are_passed_on_until_history_is_read_again() -> None:
    """Nothing is believed until a delta clears; a snapshot would repeat what was wrong."""
    follower = Follower().joined(0)
    follower.stream.mark_suspect("3 of 10 predictions were right")

    assert follower.stream.suspicion == "3 of 10 predictions were right"
    assert follower.stream.state_and_reason() == ("degraded", "3 of 10 predictions were right")
    assert follower.num_matched() == 0
    follower.stream.apply(Delta(STREAM, 11, changes=(stored(1),)))
    follower.joined(0, 1)
    assert follower.stream.is_suspect
    follower.stream.apply(Delta(STREAM, 11, cleared=True, changes=(stored(0),)))
    assert follower.stream.suspicion is None
    assert (follower.stream.state, follower.num_matched()) == ("exact", 1)


def test_what_the_leader_does_not_believe_no_router_does() -> None:
    """It reads history again; then it says so."""
    follower = Follower().joined(0)
    suspect = StreamStatus("degraded", "wrong", OTHER, 77, is_suspect=True)
    follower.stream.apply(Delta(STREAM, 11, status=suspect))

    assert (follower.num_matched(), follower.stream.suspicion) == (0, None)
    follower.stream.apply(Delta(STREAM, 12, cleared=True, changes=(stored(0),), status=EXACT))
    assert follower.num_matched() == 1


def test_a_snapshot_without_a_leader_is_believed_but_is_no_history() -> None:
    """Until the leader of now sends its status, and has read what its engine did since."""
    follower = Follower()
    follower.stream.load(StreamHead(10, P5, EXACT, has_leader=False), staged(0))
    seen = [(follower.stream.state, follower.num_matched(), follower.stream.has_history)]
    resuming = StreamStatus("degraded", "resuming", OTHER, 77, is_proven=False)
    for delta in (Delta(STREAM, 11, status=resuming), Delta(STREAM, 12, status=EXACT)):
        follower.stream.apply(delta)
        seen.append((follower.stream.state, follower.num_matched(), follower.stream.has_history))

    assert seen == [("degraded", 1, False), ("degraded", 1, False), ("exact", 1, True)]


def test_what_it_knows_can_be_resumed() -> None:
    """The leader's status, as far as it is known here."""
    follower = Follower().joined(0, status=GUESSED)
    seen = follower.stream.status()

    assert seen == GUESSED
    follower.stream.mark_suspect("wrong")
    assert follower.stream.status().is_suspect


def test_its_callback_is_called_when_blocks_have_changed() -> None:
    """There may be none."""
    follower = Follower()
    changed: list[CandidateId] = []
    follower.stream.on_applied = changed.append
    follower.joined(0)
    follower.stream.apply(Delta(STREAM, 11))
    follower.stream.on_applied = None
    follower.stream.apply(Delta(STREAM, 12))

    assert changed == [A, A]
