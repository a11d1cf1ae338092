"""router.index.cache_view: what is claimed, given back, believed and no longer believed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policies.view import CandidateId
from router.base.messages import KvGroup
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch
from router.index.cache_view import LINGER_S, CacheView
from router.index.candidate_stream import MIN_AUDITS, SUSPECT_BELOW
from router.index.hit_length import KvLayout
from router.kv_events.stream import RankStream
from tests.engine import BLOCK_SIZE, CONTRACT, batch, prompt, removed, stored

R1, R2 = CandidateId("r1"), CandidateId("r2")
CHAIN = CONTRACT.extend(None, prompt(1))[0]
EVENT = batch(stored(prompt(1)))


def caches(*candidates: CandidateId) -> CacheView:
    """Create a view of candidates whose streams have received nothing yet."""
    view = CacheView(BlockIndex())
    for candidate in candidates:
        stream = RankStream(candidate, view.index, block_size=BLOCK_SIZE, capacity_blocks=4)
        view.add(candidate, stream)
    return view


def received(view: CacheView, *payloads: bytes) -> CacheView:
    """Let a candidate's engine say something, from its first batch on."""
    stream = stream_of(view)
    stream.opened(has_replay=False)
    for sequence, payload in enumerate(payloads):
        stream.receive(sequence, payload)
    return view


def stream_of(view: CacheView) -> RankStream:
    stream = view.stream(R1)
    assert isinstance(stream, RankStream)
    return stream


def num_matched(view: CacheView, candidate: CandidateId = R1) -> int:
    return view.match(CHAIN, [candidate])[candidate].num_gpu_blocks


def test_a_candidate_that_was_not_added_is_unknown() -> None:
    view = caches()

    view.audit.record(R1, 1, 2)
    view.release(view.claim(R1, CHAIN, 0), computed=True, now_s=0.0)

    assert (view.contract(R1), view.state(R1), view.stream(R1)) == (None, "blind", None)
    assert view.trust(R1) == 1.0
    assert num_matched(view) == 0


def test_what_a_stream_says_is_matched() -> None:
    view = received(caches(R1, R2), EVENT)

    assert (num_matched(view), num_matched(view, R2)) == (3, 0)
    assert (view.state(R1), view.state(R2)) == ("exact", "blind")
    assert view.contract(R1) == CONTRACT


@pytest.mark.parametrize(("computed", "waited_s"), [(False, 0.0), (True, LINGER_S)])
def test_a_claim_without_events_ends_with_a_failure_or_soon(
    computed: bool, waited_s: float
) -> None:
    view = received(caches(R1), batch(stored(prompt(2))))

    view.release(view.claim(R1, CHAIN, 0), computed=computed, now_s=0.0)
    view.expire_claims(waited_s)

    assert num_matched(view) == 0


def test_a_finished_requests_claim_waits_for_its_events() -> None:
    view = received(caches(R1), batch(stored(prompt(2))))
    view.release(view.claim(R1, CHAIN, 0), computed=True, now_s=0.0)

    before = num_matched(view)
    view.expire_claims(LINGER_S / 2)
    meanwhile = num_matched(view)
    stream = stream_of(view)
    stream.receive(1, EVENT)
    view.expire_claims(LINGER_S / 2)
    stream.receive(2, batch(removed([int(key) for key in CHAIN])))

    assert (before, meanwhile, num_matched(view)) == (3, 3, 0)


def test_events_that_came_first_end_the_claim_at_once() -> None:
    view = received(caches(R1), batch(stored(prompt(2))))
    claim = view.claim(R1, CHAIN, 0)
    stream = stream_of(view)
    stream.receive(1, EVENT)

    view.release(claim, computed=True, now_s=0.0)
    stream.receive(2, batch(removed([int(key) for key in CHAIN])))

    assert num_matched(view) == 0


def test_a_blind_candidate_is_guessed_within_its_capacity() -> None:
    view = caches(R1)

    view.release(view.claim(R1, CHAIN, 0), computed=True, now_s=0.0)
    first = num_matched(view)
    other = CONTRACT.extend(None, prompt(2))[0]
    view.release(view.claim(R1, other, 0), computed=True, now_s=0.0)

    assert first == 3
    assert view.match(other, [R1])[R1].num_gpu_blocks == 3
    assert num_matched(view) == 1  # of four blocks, three are the newer prompt's


def test_a_dropped_candidate_leaves_nothing() -> None:
    view = received(caches(R1), EVENT)
    claim = view.claim(R1, CONTRACT.extend(None, prompt(2))[0], 0)

    view.drop(R1)
    view.release(claim, computed=True, now_s=0.0)
    view.expire_claims(0.0)

    assert view.state(R1) == "blind"
    assert num_matched(view) == 0
    assert view.index.num_blocks(R1) == 0


@pytest.mark.parametrize("has_replay", [True, False])
def test_wrong_predictions_end_trust_until_history_is_read_again(has_replay: bool) -> None:
    view = received(caches(R1), EVENT)
    stream = stream_of(view)
    stream.opened(has_replay=has_replay)

    for _ in range(MIN_AUDITS - 1):
        view.audit.record(R1, 0, 12)
    before = (num_matched(view), stream.is_suspect)
    for _ in range(MIN_AUDITS):
        view.audit.record(R1, 0, 12)

    assert before == (3, False)
    assert num_matched(view) == 0
    assert stream.is_suspect is has_replay
    assert stream.wanted_replay == (0 if has_replay else None)


def test_an_eviction_overtakes_a_prediction() -> None:
    view = received(caches(R1), EVENT)
    claim = view.claim(R1, CHAIN, 3)
    assert not view.audit.was_overtaken(claim, BLOCK_SIZE)
    view.index.remove(R1, CHAIN[1:2])

    assert view.audit.was_overtaken(claim, BLOCK_SIZE)
    assert not view.audit.was_overtaken(claim, 0)
    assert not view.audit.was_overtaken(claim, 3 * BLOCK_SIZE)
    view.drop(R1)
    assert not view.audit.was_overtaken(claim, BLOCK_SIZE)


def test_an_eviction_before_a_prediction_is_no_excuse() -> None:
    view = received(caches(R1), EVENT, EVENT)
    view.index.remove(R1, CHAIN[1:2])
    claim = view.claim(R1, CHAIN, 3)

    assert not view.audit.was_overtaken(claim, BLOCK_SIZE)
    view.index.remove(R1, CHAIN[1:2])
    assert view.audit.was_overtaken(claim, BLOCK_SIZE)


def test_history_that_says_the_same_again_is_read_ever_more_seldom() -> None:
    view = received(caches(R1), EVENT)
    stream = stream_of(view)
    stream.opened(has_replay=True)
    reread_at = []
    for number in range(1000):
        view.audit.record(R1, 12, 0)
        if stream.wanted_replay is not None:
            reread_at.append(number + 1)
            (notice,) = stream.take_notices()
            assert notice.fields["reason"].startswith("only ")
            stream.begin_replay()
            stream.replayed(0, EVENT)
            stream.end_replay(is_complete=True)
            assert stream.state == view.state(R1) == "exact"
        elif number == 60:
            assert stream.state == "exact"
            assert view.state_and_reason(R1) == (
                "degraded",
                f"only {view.trust(R1):.0%} of recent predictions were right",
            )
    again = [later - before for before, later in pairwise(reread_at)]
    assert (reread_at[0], again) == (26, [40, 80, 160, 320])

    for _ in range(MIN_AUDITS):
        view.audit.record(R1, 12, 12)
    for _ in range(200):
        view.audit.record(R1, 12, 12)
    assert view.state(R1) == "exact"
    for _ in range(40):
        view.audit.record(R1, 12, 0)
    assert stream.wanted_replay == 0  # as if there never was a doubt


def tiered() -> CacheView:
    """Make a view of a candidate with a block on its GPU, and all three in its cpu tier."""
    return received(
        caches(R1),
        batch(stored(prompt(1)[:BLOCK_SIZE]), stored(prompt(1), medium="CPU")),
    )


def audited(view: CacheView, num_reported: int) -> int:
    """Send a prompt of these blocks, and have the engine report; return what was predicted."""
    found = view.match(CHAIN, [R1])[R1]
    claim = view.claim(R1, CHAIN, found.num_gpu_blocks, 3 * BLOCK_SIZE + 1)
    num_predicted = found.num_cpu_blocks * BLOCK_SIZE
    num_cpu_tokens = (found.num_cpu_blocks - found.num_gpu_blocks) * BLOCK_SIZE
    view.audit.record(R1, num_predicted, num_reported, claim, num_cpu_tokens=num_cpu_tokens)
    view.release(claim, computed=False, now_s=0.0)
    return num_predicted


def test_a_tier_that_is_wrong_counts_no_more_until_it_would_be_right() -> None:
    view = tiered()

    predicted = [audited(view, BLOCK_SIZE) for _ in range(60)]
    assert (predicted[0], predicted[9:12]) == (12, [12, 4, 4])
    assert (view.trust(R1), view.state(R1)) == (1.0, "exact")
    assert (view.cpu_trust(R1) or 0.0) < SUSPECT_BELOW
    predicted = [audited(view, 3 * BLOCK_SIZE) for _ in range(150)]
    assert (predicted[0], predicted[-1]) == (4, 12)
    assert (view.trust(R1), view.state(R1)) == (1.0, "exact")


def test_a_gpu_that_has_less_than_its_part_is_not_excused_by_the_tier() -> None:
    view = tiered()
    audited(view, 0)

    assert view.trust(R1) < 1.0
    assert (view.cpu_trust(R1) or 0.0) < 1.0


def test_a_few_wrong_predictions_cost_no_trust() -> None:
    view = received(caches(R1), EVENT)

    for number in range(200):
        view.audit.record(R1, 12, 12 if number % 4 else 0)

    assert SUSPECT_BELOW < view.trust(R1) < 1.0
    assert num_matched(view) == 3


def test_a_degraded_stream_is_not_read_again_for_its_mistakes() -> None:
    view = caches(R1)
    stream = stream_of(view)
    stream.opened(has_replay=False)
    stream.receive(7, EVENT)

    for _ in range(3 * MIN_AUDITS):
        view.audit.record(R1, 0, 12)

    assert view.state(R1) == "degraded"
    assert not stream.is_suspect
    assert num_matched(view) == 3


def test_what_a_prompt_will_leave_in_other_groups_is_claimed() -> None:
    index = BlockIndex()
    groups = KvGroup(0, "full_attention", BLOCK_SIZE), KvGroup(1, "sliding_window", BLOCK_SIZE, 3)
    index.lay_out(R1, KvLayout(groups, BLOCK_SIZE))
    view = CacheView(index)
    chain = CONTRACT.extend(None, prompt(1, 6))[0]
    claim = view.claim(R1, chain[:4], 0, num_tokens=4 * BLOCK_SIZE + 1)

    assert view.match(chain, [R1])[R1] == BlockMatch(4, 0, 4)
    assert view.match(chain[:3], [R1])[R1] == NO_BLOCKS
    view.release(claim, computed=False, now_s=0.0)
    assert view.match(chain, [R1])[R1] == NO_BLOCKS


def test_an_eviction_in_another_group_overtakes_a_prediction() -> None:
    index = BlockIndex()
    groups = KvGroup(0, "full_attention", BLOCK_SIZE), KvGroup(1, "sliding_window", BLOCK_SIZE, 3)
    layout = KvLayout(groups, BLOCK_SIZE)
    index.lay_out(R1, layout)
    view = CacheView(index)
    view.add(R1, RankStream(R1, BlockIndex(), block_size=BLOCK_SIZE, capacity_blocks=1))
    chain = CONTRACT.extend(None, prompt(1, 6))[0]
    claim = view.claim(R1, chain, 4)

    assert not view.audit.was_overtaken(claim, 0, 4 * BLOCK_SIZE)
    index.remove(R1, layout.needed(chain, 5))
    assert not view.audit.was_overtaken(claim, 0, 4 * BLOCK_SIZE)
    assert view.audit.was_overtaken(claim, 0, 5 * BLOCK_SIZE)


OTHER = CONTRACT.extend(None, prompt(2))[0]
NEW = CONTRACT.extend(None, prompt(3))[0]


def overrun(capacity_blocks: int = 8) -> CacheView:
    """Make a view of a candidate that has two chains."""
    view = CacheView(BlockIndex())
    view.add(R1, RankStream(R1, view.index, block_size=4, capacity_blocks=capacity_blocks))
    received(view, EVENT, batch(stored(prompt(2))))
    for keys in (CHAIN, OTHER):
        view.release(view.claim(R1, keys, 3), computed=True, now_s=0.0)
    return view


def test_there_is_room_for_a_prompt_beside_what_is_in_use() -> None:
    view = overrun()
    assert view.has_room(CHAIN, R1, 40)
    claim = view.claim(R1, CHAIN, 3)

    assert view.has_room(OTHER, R1, 12)
    assert not view.has_room(OTHER, R1, 13)
    assert view.has_room([*CHAIN, *OTHER], R1, 24)
    assert not view.has_room([*CHAIN, *OTHER], R1, 25)
    view.release(claim, computed=True, now_s=0.0)
    assert view.has_room(OTHER, R1, 13)


@pytest.mark.parametrize("why", ["no stream", "blind", "small", "groups"])
def test_a_candidate_of_unknown_room_has_room(why: str) -> None:
    view = caches() if why == "no stream" else overrun(6 if why == "small" else 8)
    view.claim(R1, NEW, 0)
    if why in ("blind", "groups"):
        assert not view.has_room(OTHER, R1, 900)
    if why == "blind":
        view.hand_over(R1, RankStream(R1, BlockIndex(), block_size=4, capacity_blocks=8))
    elif why == "groups":
        view.index.lay_out(R1, None)

    assert view.has_room(OTHER, R1, 900)


def late() -> CacheView:
    """Create a view of a replica that had `CHAIN`'s first 2 blocks before the router joined."""
    view = caches(R1)
    stream = stream_of(view)
    stream.opened(has_replay=False)
    stream.receive(7, batch(stored(prompt(2))))
    return view


def turned(view: CacheView, *payloads: bytes) -> int:
    """Send the prompt of `CHAIN`, let its events come, and count what its next turn would find."""
    claim = view.claim(R1, CHAIN, num_matched(view))
    stream = stream_of(view)
    for number, payload in enumerate(payloads, start=8):
        stream.receive(number, payload)
    view.release(claim, computed=True, now_s=0.0)
    view.expire_claims(LINGER_S)
    return num_matched(view)


LAST = batch(stored(prompt(1), skip=2))


def test_a_turn_proves_the_blocks_of_lost_history_before_its_own() -> None:
    view = late()
    stream = stream_of(view)

    before = num_matched(view)
    after = turned(view, LAST)

    assert (before, after) == (0, 3)
    assert stream.counters.blocks.num_recovered == 2
    assert view.state(R1) == "degraded"


def test_recovered_blocks_go_with_their_removal() -> None:
    names = [int(key) for key in CHAIN]

    assert turned(late(), LAST, batch(removed(names[1:]))) == 1
    assert turned(late(), LAST, batch(removed(names))) == 0


def test_a_turn_without_a_stored_block_proves_nothing() -> None:
    assert turned(late()) == 0
    assert turned(late(), batch(stored(prompt(1)[:8], skip=1))) == 0


def test_a_last_block_that_was_there_before_proves_nothing() -> None:
    """The blocks before it may have been evicted since, and are computed again."""
    view = late()
    stream = stream_of(view)
    stream.receive(8, LAST)

    claim = view.claim(R1, CHAIN, 0)
    stream.receive(9, batch(stored(prompt(3))))
    view.release(claim, computed=True, now_s=0.0)

    assert num_matched(view) == 0


def test_a_complete_history_needs_no_proof() -> None:
    """A missing block is then a lost event, which the audit finds."""
    view = received(caches(R1), batch(stored(prompt(2))))
    claim = view.claim(R1, CHAIN, 0)
    stream = stream_of(view)
    stream.receive(1, LAST)
    view.release(claim, computed=True, now_s=0.0)

    assert num_matched(view) == 0
