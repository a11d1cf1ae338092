"""Engines that drop the last block of each hit (EAGLE, MTP): learned, and predicted as they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.messages import KvGroup
from router.index.block_index import BlockIndex, BlockMatch
from router.index.cache_view import CacheView
from router.index.hit_length import KvLayout
from router.index.last_block import RUN, Drop, LastBlock
from router.kv_events.stream import RankStream

R1 = CandidateId("r1")
SIZE = 2
RECORDED = Path(__file__).parents[1] / "fixtures/kv_groups/coordinator-0.32.0.json"


def view(last_block: LastBlock | None) -> CacheView:
    """Create a view of one candidate."""
    caches = CacheView(BlockIndex())
    stream = RankStream(R1, caches.index, block_size=SIZE, capacity_blocks=64)
    caches.add(R1, stream, last_block)
    return caches


@pytest.mark.parametrize("eagle", [False, True])
def test_hits_of_a_dense_model_are_the_engines(eagle: bool) -> None:
    recorded = next(
        each
        for each in json.loads(RECORDED.read_text())
        if (each["layout"]["name"], each["layout"]["eagle"]) == ("dense", eagle)
    )

    for num_tokens, (held,), reported in recorded["cases"]:
        caches = view(LastBlock(eagle, speculates=True))
        chain = [BlockKey(1000 + position) for position in range(num_tokens // SIZE)]
        has = [key for position, key in enumerate(chain) if held >> position & 1]
        caches.index.store(R1, has)
        found = caches.match(chain, [R1], limit=(num_tokens - 1) // SIZE)[R1]
        assert found.num_gpu_blocks * SIZE == reported, (num_tokens, held)


def test_six_answers_a_block_short_show_a_dropped_block() -> None:
    last = LastBlock(None, speculates=True)

    for _ in range(RUN - 1):
        assert not last.observe(64, 48, 16)
    assert not last.observe(64, 64, 16)
    for _ in range(RUN - 1):
        assert not last.observe(64, 48, 16)
    assert not last.observe(64, 16, 16)
    assert not last.observe(16, 0, 16)  # a plain miss looks the same
    assert not last.is_dropped
    assert last.observe(80, 64, 16)

    assert (last.is_dropped, last.is_learned, last.num_changes) == (True, True, 1)


def test_a_wrong_conclusion_is_taken_back_and_needs_more_the_next_time() -> None:
    last = LastBlock(None, speculates=True)
    changes = []

    for drops in (True, False, True):
        for number in range(1, 100):
            step = 16 if last.is_dropped else -16
            if last.observe(64, 64 + step, 16):
                changes.append((number, last.is_dropped))
                break
        assert last.is_dropped is drops
    assert [number for number, _ in changes] == [RUN, 2 * RUN, 4 * RUN]


@pytest.mark.parametrize("configured", [True, None])
def test_the_groups_that_drop_are_learned(
    configured: bool | None,
) -> None:
    last = LastBlock(configured, speculates=True)
    while not last.is_dropped:
        last.observe(64, 48, 16, is_mixed=True)
    before = last.num_changes

    assert last.drop is Drop.EVERYWHERE
    while last.num_changes == before:
        last.observe(0, 160, 16, is_mixed=True)
    assert last.drop is Drop.IN_FULL_ATTENTION
    while last.num_changes == before + 1:
        last.observe(96, 112, 16, is_mixed=True)  # two things may be wrong of it: no common run
        for _ in range(4 * RUN):
            last.observe(96, 80, 16, is_mixed=True)
    assert last.drop is Drop.EVERYWHERE


def test_a_configured_drop_is_not_unlearned() -> None:
    last = LastBlock(True, speculates=True)

    for is_mixed in (False, True):
        for _ in range(10 * RUN):
            last.observe(64, 80, 16, is_mixed=is_mixed)
        assert last.is_dropped


@pytest.mark.parametrize(
    "last", [LastBlock(False, speculates=True), LastBlock(None, speculates=False)]
)
def test_nothing_is_learned_if_configured_or_without_speculation(last: LastBlock) -> None:
    for _ in range(10 * RUN):
        assert not last.observe(64, 48, 16)
    assert not last.is_dropped


def test_the_audit_learns_a_dropped_block_and_resets_trust() -> None:
    caches = view(LastBlock(None, speculates=True))
    chain = [BlockKey(key) for key in range(100, 108)]
    caches.index.store(R1, chain)

    changed = [caches.audit.record(R1, 16, 14) for _ in range(RUN)]

    assert [each is not None for each in changed] == [False] * (RUN - 1) + [True]
    assert caches.match(chain, [R1])[R1].num_gpu_blocks == 7
    assert caches.trust(R1) == 1.0
    caches.drop(R1)
    assert R1 not in caches.index.last_blocks
    assert not caches.index.drops_last(R1)


def test_each_tier_loses_a_block_and_nothing_stays_nothing() -> None:
    caches = view(LastBlock(True, speculates=False))
    chain = [BlockKey(key) for key in range(100, 104)]

    assert caches.match(chain, [R1])[R1].num_gpu_blocks == 0
    found = caches.match(chain, [R1], {R1: BlockMatch(2, 1, 4)}, 3)[R1]
    assert found == BlockMatch(1, 0, 2)


def test_several_groups_follow_their_own_rule() -> None:
    groups = KvGroup(0, "full_attention", SIZE), KvGroup(1, "sliding_window", SIZE, 3)
    caches = view(None)
    chain = [BlockKey(key) for key in range(100, 104)]
    layout = KvLayout(groups, SIZE)
    window = layout.salt(1)
    assert window is not None
    caches.index.store(R1, [*chain, *(BlockKey(key ^ window) for key in chain)])
    caches.index.lay_out(R1, layout)

    assert caches.match(chain, [R1], limit=3)[R1].num_gpu_blocks == 3
    caches.index.last_blocks[R1] = LastBlock(True, speculates=True)
    assert caches.match(chain[:3], [R1])[R1].num_gpu_blocks == 2
    assert caches.match(chain, [R1], limit=3)[R1].num_gpu_blocks == 3
    caches.index.lay_out(R1, layout)
    assert caches.match(chain[:3], [R1])[R1].num_gpu_blocks == 2
    del caches.index.last_blocks[R1]
    assert caches.match(chain[:3], [R1])[R1].num_gpu_blocks == 3


def test_what_a_prompt_leaves_serves_its_follow_up() -> None:
    groups = KvGroup(0, "full_attention", SIZE), KvGroup(1, "sliding_window", SIZE, 4)
    layout = KvLayout(groups, SIZE, drop=Drop.EVERYWHERE)
    chain = [BlockKey(key) for key in range(100, 110)]
    salt = layout.salt(1)

    assert layout.kept(chain, 2 * SIZE) == []
    assert layout.kept(chain, 17) == [BlockKey(chain[end - 1] ^ (salt or 0)) for end in (6, 7, 8)]
