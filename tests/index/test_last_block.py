"""Engines that drop the last block of each hit (EAGLE, MTP): predicted as they do."""

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
from router.kv_events.stream import RankStream

R1 = CandidateId("r1")
SIZE = 2
RECORDED = Path(__file__).parents[1] / "fixtures/kv_groups/coordinator-0.32.0.json"


def view(*, eagle: bool) -> CacheView:
    """Create a view of one candidate."""
    caches = CacheView(BlockIndex())
    stream = RankStream(R1, caches.index, block_size=SIZE, capacity_blocks=64)
    caches.add(R1, stream, eagle=eagle)
    return caches


@pytest.mark.parametrize("eagle", [False, True])
def test_hits_of_a_dense_model_are_the_engines(eagle: bool) -> None:
    recorded = next(
        each
        for each in json.loads(RECORDED.read_text())
        if (each["layout"]["name"], each["layout"]["eagle"]) == ("dense", eagle)
    )

    for num_tokens, (held,), reported in recorded["cases"]:
        caches = view(eagle=eagle)
        chain = [BlockKey(1000 + position) for position in range(num_tokens // SIZE)]
        has = [key for position, key in enumerate(chain) if held >> position & 1]
        caches.index.store(R1, has)
        found = caches.match(chain, [R1], limit=(num_tokens - 1) // SIZE)[R1]
        assert found.num_gpu_blocks * SIZE == reported, (num_tokens, held)


def test_a_candidate_that_is_gone_drops_nothing() -> None:
    caches = view(eagle=True)
    assert caches.index.dropping == {R1}
    caches.drop(R1)
    assert not caches.index.dropping


def test_each_tier_loses_a_block_and_nothing_stays_nothing() -> None:
    caches = view(eagle=True)
    chain = [BlockKey(key) for key in range(100, 104)]

    assert caches.match(chain, [R1])[R1].num_gpu_blocks == 0
    found = caches.match(chain, [R1], {R1: BlockMatch(2, 1, 4)}, 3)[R1]
    assert found == BlockMatch(1, 0, 2)


def test_several_groups_follow_their_own_rule() -> None:
    groups = KvGroup(0, "full_attention", SIZE), KvGroup(1, "sliding_window", SIZE, 3)
    caches = view(eagle=False)
    chain = [BlockKey(key) for key in range(100, 104)]
    layout = KvLayout(groups, SIZE)
    window = layout.salt(1)
    assert window is not None
    caches.index.store(R1, [*chain, *(BlockKey(key ^ window) for key in chain)])
    caches.index.lay_out(R1, layout)

    assert caches.match(chain, [R1], limit=3)[R1].num_gpu_blocks == 3
    caches.index.dropping.add(R1)
    assert caches.match(chain[:3], [R1])[R1].num_gpu_blocks == 2
    assert caches.match(chain, [R1], limit=3)[R1].num_gpu_blocks == 3
    caches.index.lay_out(R1, layout)
    assert caches.match(chain[:3], [R1])[R1].num_gpu_blocks == 2
    caches.index.dropping.clear()
    assert caches.match(chain[:3], [R1])[R1].num_gpu_blocks == 3


def test_what_a_prompt_leaves_serves_its_follow_up() -> None:
    groups = KvGroup(0, "full_attention", SIZE), KvGroup(1, "sliding_window", SIZE, 4)
    layout = KvLayout(groups, SIZE, drops_last=True)
    chain = [BlockKey(key) for key in range(100, 110)]
    salt = layout.salt(1)

    assert layout.kept(chain, 2 * SIZE) == []
    assert layout.kept(chain, 17) == [BlockKey(chain[end - 1] ^ (salt or 0)) for end in (6, 7, 8)]
