"""The block index against a plain model: what is held, how long a prefix, whose claims.

Blocks loaded into an index: swapped in whole, freed in slices.

router.index.candidate_stream: the last ones are known, and never many more.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import chain as joined
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.messages import SharedTier, TierChange, pack_keys
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch, Speculation
from router.index.copies import RecentKeys, StagedBlocks, Tier
from tests.samples import keys

A, B, C = CandidateId("a"), CandidateId("b"), CandidateId("c")
CANDIDATES = (A, B, C)


def chain(num_blocks: int, start: int = 0) -> list[BlockKey]:
    return keys(*range(start, start + num_blocks))


class IndexAgainstModel(RuleBasedStateMachine):
    """Random stores, evictions, clears, claims; the model is a Counter per candidate and tier."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(min_deferred=100)  # when they are entered: see below
        self.held: dict[tuple[CandidateId, Tier], Counter[int]] = {
            (candidate, tier): Counter() for candidate in CANDIDATES for tier in ("gpu", "cpu")
        }
        self.claims: list[tuple[CandidateId, list[BlockKey], Speculation]] = []

    candidates = st.sampled_from(CANDIDATES)
    tiers = st.sampled_from(["gpu", "cpu"])
    names = st.one_of(
        st.lists(st.integers(0, 12), max_size=20),
        st.builds(lambda end: [*range(end)], st.integers(1, 13)),
    )

    @rule(candidate=candidates, tier=tiers, names=names)
    def store(self, candidate: CandidateId, tier: Tier, names: list[int]) -> None:
        self.index.store(candidate, keys(*names), tier)
        self.held[candidate, tier].update(names)

    @rule(candidate=candidates, tier=tiers, names=names)
    def remove(self, candidate: CandidateId, tier: Tier, names: list[int]) -> None:
        held = self.held[candidate, tier]
        num_missing = 0
        for name in names:
            num_missing += held[name] == 0
            held[name] = max(0, held[name] - 1)
        assert self.index.remove(candidate, keys(*names), tier) == num_missing

    @rule(candidate=candidates)
    def clear(self, candidate: CandidateId) -> None:
        self.index.clear(candidate)
        self.held[candidate, "gpu"].clear()
        self.held[candidate, "cpu"].clear()
        for who, claimed, _ in self.claims:
            if who == candidate:
                claimed.clear()

    @rule(candidate=candidates, names=names)
    def begin(self, candidate: CandidateId, names: list[int]) -> None:
        speculation = self.index.speculate(candidate, keys(*names))
        self.claims.append((candidate, keys(*names), speculation))

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        if number < len(self.claims):
            _, _, claim = self.claims.pop(number)
            claim.end()
            claim.end()

    @rule(max_blocks=st.integers(0, 5))
    def sweep(self, max_blocks: int) -> None:
        self.index.sweep(max_blocks)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for (candidate, tier), held in self.held.items():
            assert self.index.held(candidate)[tier] == +held
            assert self.index.num_blocks(candidate, tier) == len(+held)
        for candidate in CANDIDATES:
            gpu, cpu = self.held[candidate, "gpu"], self.held[candidate, "cpu"]
            for name in range(13):
                is_held = bool(gpu[name] or cpu[name])
                assert self.index.holds(candidate, BlockKey(name)) == is_held
        claimed = {(who, key) for who, claimed, _ in self.claims for key in claimed}
        assert self.index.claimed() == Counter(who for who, _ in claimed)

    @invariant()
    def a_match_is_a_prefix_end(self) -> None:
        """It is the longest prefix where no block is missing before the last one."""
        matches = self.index.match(chain(13), CANDIDATES)
        for candidate, match in matches.items():
            gpu = set(+self.held[candidate, "gpu"])
            computing = {
                key for who, claimed, _ in self.claims if who == candidate for key in claimed
            }
            cpu = set(+self.held[candidate, "cpu"])
            is_closed = True
            for num_blocks, held in (
                (match.num_gpu_stored_blocks, gpu),
                (match.num_gpu_blocks, gpu | computing),
                (match.num_cpu_blocks, gpu | computing | cpu),
            ):
                assert num_blocks == 0 or {0, num_blocks - 1} <= held
                assert set(range(max(0, num_blocks - 3), num_blocks)) <= held
                if is_closed := is_closed and len(held) == max(held, default=-1) + 1:
                    assert num_blocks == len(held)
            assert match.num_gpu_stored_blocks <= match.num_gpu_blocks <= match.num_cpu_blocks


TestIndexAgainstModel = IndexAgainstModel.TestCase


@given(
    num_blocks=st.integers(0, 300),
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=40),
)
def test_closed_prefixes_match_exactly(num_blocks: int, lengths: list[tuple[int, int]]) -> None:
    index = BlockIndex()
    asked = [CandidateId(f"r{number}") for number in range(len(lengths))]
    for candidate, (num_gpu, num_cpu) in zip(asked, lengths, strict=True):
        index.store(candidate, chain(num_gpu))
        index.store(candidate, chain(num_cpu), "cpu")

    matches = index.match(chain(num_blocks), asked)

    assert list(matches) == asked
    for match, (num_gpu, num_cpu) in zip(matches.values(), lengths, strict=True):
        gpu = min(num_gpu, num_blocks)
        assert match == BlockMatch(gpu, gpu, max(gpu, min(num_cpu, num_blocks)))


@pytest.mark.parametrize(
    ("held", "num_matched"),
    [
        ([1, 1, 0, 1, 1, 1], 2),
        ([1, 0, 1, 1, 1, 1], 1),
        ([0, 1, 1, 1, 1, 1], 0),
        ([1, 1, 0, 0, 1, 0, 1, 1], 2),
        ([1] * 20 + [0] + [1] * 40, 20),
        ([1] * 200 + [0] + [1] * 2, 200),
    ],
)
@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_blocks_behind_a_hole_are_not_matched(
    held: list[int], num_matched: int, tier: Tier
) -> None:
    index = BlockIndex()
    blocks = chain(len(held))
    for candidate, holds in ((A, [1] * len(held)), (B, held)):
        kept = [key for key, is_held in zip(blocks, holds, strict=True) if is_held]
        index.store(candidate, kept, tier)

    found = index.match(blocks, [A, B, A])

    assert found[A].num_cpu_blocks == len(held)
    assert found[B].num_cpu_blocks == num_matched


steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.booleans(), st.integers(0, 12)),
        st.tuples(st.just("evict"), st.booleans(), st.integers(0, 12)),
        st.tuples(st.just("claim"), st.booleans(), st.integers(0, 12), st.integers(1, 12)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("match"), st.booleans(), st.integers(1, 12)),
    ),
    max_size=25,
)


@given(script=steps)
def test_when_a_claim_is_entered_changes_no_match(script: list[tuple[Any, ...]]) -> None:
    """Claims of two conversations with the same beginning; blocks come and go from their ends.

    An engine evicts no block of a running request, so none of an open claim.
    """
    late, soon = BlockIndex(min_deferred=1), BlockIndex(min_deferred=1_000)
    chains = (chain(12), [*chain(5), *chain(7, start=100)])
    held = [0, 0]
    claims: list[tuple[Speculation, Speculation]] = []
    claimed: list[list[BlockKey]] = []  # of each of them
    for kind, *words in script:
        if kind == "store":
            which, end = words
            stored = chains[which][held[which] : end]
            for index in (late, soon):
                index.store(A, index.missing(A, stored, "gpu"))
            held[which] = max(held[which], end)
            held[not which] = max(held[not which], min(5, end))
        elif kind == "evict":
            which, start = words
            start = max(start, 5 if held[not which] > 5 else 0)
            lost = chains[which][start : held[which]]
            if not set(lost).isdisjoint(joined.from_iterable(claimed)):
                continue
            for index in (late, soon):
                index.remove(A, lost)
            held[which] = min(held[which], start)
            held[not which] = min(held[not which], start) if start < 5 else held[not which]
        elif kind == "claim":
            which, start, num_blocks = words
            claimed.append(chains[which][start : start + num_blocks])
            claims.append((late.speculate(A, claimed[-1]), soon.speculate(A, claimed[-1])))
        elif kind == "end" and words[0] < len(claims):
            del claimed[words[0]]
            for claim in claims.pop(words[0]):
                claim.end()
        elif kind == "match":
            which, num_blocks = words
            asked = chains[which][:num_blocks]
            assert late.match(asked, [A]) == soon.match(asked, [A])
    assert all(late.match(each, [A]) == soon.match(each, [A]) for each in chains)
    for claim in claims:
        for each in claim:
            each.end()
    assert late.claimed() == soon.claimed() == {}


def test_many_blocks_that_are_named_twice_are_missing_once() -> None:
    index = BlockIndex()
    index.store(A, chain(8))

    assert index.remove(A, chain(8) * 2) == 8
    assert not index.num_blocks(A)


def test_a_cpu_tier_without_removals_is_bounded() -> None:
    index = BlockIndex(max_cpu_blocks=128)
    for start in range(0, 1000, 10):
        index.store(A, chain(10, start), "cpu")

    assert index.num_blocks(A, "cpu") <= 128
    assert index.holds(A, BlockKey(999))
    assert not index.holds(A, BlockKey(500))


def test_what_was_routed_to_a_blind_candidate_is_remembered_least_recent_out() -> None:
    index = BlockIndex()
    index.remember(A, chain(4), 6)
    index.remember(A, chain(4, start=100), 6)

    assert index.num_blocks(A) == 6
    assert index.match(chain(4), [A])[A].num_gpu_blocks == 2
    assert index.match(chain(4, start=100), [A])[A].num_gpu_blocks == 4


def test_using_a_remembered_chain_keeps_it() -> None:
    index = BlockIndex()
    index.remember(A, chain(3), 6)
    index.remember(A, chain(3, start=100), 6)
    index.remember(A, chain(3), 6)
    index.remember(A, chain(3, start=200), 6)

    assert index.match(chain(3), [A])[A].num_gpu_blocks == 3
    assert index.match(chain(3, start=100), [A])[A] == NO_BLOCKS


def test_a_guess_does_not_mix_with_what_was_known() -> None:
    index = BlockIndex()
    index.store(A, chain(3))
    index.remember(A, chain(2, start=100), 10)

    assert index.num_blocks(A) == 2


def test_clearing_is_immediate_and_freeing_comes_in_slices() -> None:
    index = BlockIndex()
    index.store(A, chain(10))
    index.store(A, chain(3), "cpu")
    index.clear(A)

    assert index.match(chain(10), [A])[A] == NO_BLOCKS
    assert [index.sweep(5) for _ in range(3)] == [True, True, False]
    assert not index.sweep()


STAGED = CandidateId("a")


def stored(tier: SharedTier, *named: int) -> TierChange:
    return TierChange(tier, pack_keys(keys(*named)))


def num_matched(index: BlockIndex, num_blocks: int = 9) -> int:
    return index.match(keys(*range(num_blocks)), [STAGED])[STAGED].num_gpu_blocks


def test_a_snapshot_is_swapped_in_whole_and_claims_live_on() -> None:
    index = BlockIndex()
    index.store(STAGED, keys(0, 1, 2, 3))
    claim = index.speculate(STAGED, keys(2, 3))
    staged = StagedBlocks()
    staged.apply(stored("gpu", 0, 9))
    staged.apply(TierChange("gpu", pack_keys(keys(1, 5)), pack_keys(keys(9)), ((BlockKey(5), 2),)))
    staged.apply(stored("cpu", 4))

    assert staged.num_blocks() == 3
    assert num_matched(index) == 4
    index.replace(STAGED, staged)
    assert index.match(keys(0, 1, 2, 3, 4), [STAGED])[STAGED] == BlockMatch(4, 2, 5)
    claim.end()
    assert num_matched(index) == 2
    assert staged.num_blocks() == 0


def test_what_is_swapped_out_or_given_up_is_freed_in_slices() -> None:
    """Blocks that were there, and blocks that were loaded in vain."""
    index = BlockIndex()
    index.store(STAGED, keys(0, 1, 2))
    staged, given_up = StagedBlocks(), StagedBlocks()
    staged.apply(stored("gpu", 1, 2))
    given_up.apply(stored("cpu", 3))
    index.replace(STAGED, staged)
    index.discard(given_up)

    assert index.match(keys(1), [STAGED])[STAGED] != NO_BLOCKS
    assert [index.sweep(2) for _ in range(2)] == [True, False]
    assert index.num_blocks(STAGED) == 2


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=20), max_size=60), st.integers(20, 50))
def test_the_last_keys_are_known_and_old_ones_forgotten(
    batches: list[list[int]], max_keys: int
) -> None:
    recent = RecentKeys(max_keys=max_keys)
    for batch in batches:
        recent.add(batch)

    added = [key for batch in batches for key in batch]
    assert all(key in recent for key in added[-max_keys:])
    assert sum(key in recent for key in set(added)) <= 2 * (max_keys + 20)


def test_nothing_is_recent_at_first() -> None:
    assert 1 not in RecentKeys()


def test_keys_that_come_again_and_again_take_no_more_memory() -> None:
    """A cache evicts the same few prompts in turn for weeks."""
    recent = RecentKeys()
    tracemalloc.start()
    try:
        for _ in range(20_000):
            recent.add((1, 2, 3))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert num_bytes < 10_000


def test_the_time_of_a_key_is_that_of_its_last_call() -> None:
    recent = RecentKeys()
    before_s = monotonic()
    recent.add((1, 2))
    between_s = monotonic()
    recent.add((2,))

    first_s, second_s = recent.added_s(1), recent.added_s(2)
    assert first_s is not None
    assert second_s is not None
    assert before_s <= first_s <= between_s <= second_s
    assert recent.added_s(3) is None
