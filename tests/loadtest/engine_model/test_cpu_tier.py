"""The CPU tier against a recording of vLLM's scheduler, and its invariants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadtest.engine_model.blocks import KvSequence
from loadtest.engine_model.cpu_tier import CpuTier, Offloaded
from tests.effort import examples
from tests.loadtest.engine_model.recorded_tier import Json, differences

GOLDEN = Path(__file__).parent / "golden" / "vllm_cpu_tier.json"


@pytest.mark.parametrize("recorded", json.loads(GOLDEN.read_text()), ids=lambda each: each["name"])
def test_every_step_equals_the_recording_of_vllm(recorded: Json) -> None:
    """What is scheduled, cached, read, written and evicted equals vLLM's, step by step."""
    assert differences(recorded) == []


def sequence(*keys: Any) -> KvSequence:
    return KvSequence(list(keys), 2 * len(keys))


def written(tier: CpuTier, *sequences: KvSequence) -> None:
    """Write all blocks of requests, and end them."""
    for each in sequences:
        tier.offer(each, each.num_tokens)
        tier.finish(each)
        for _ in range(2):
            tier.end_step()


def test_a_tier_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        CpuTier(0, 16)


def test_a_reset_leaves_nothing_and_requests_offer_their_blocks_again() -> None:
    tier = CpuTier(4, 2)
    running, reading = sequence("a", "b"), sequence("c", "d")
    written(tier, sequence("c"))
    tier.offer(running, 4)
    tier.begin_read(reading, 0, 1)

    tier.reset()
    tier.end_read(reading)
    assert (len(tier), tier.is_writing) == (0, False)
    tier.offer(running, 4)
    assert tier.keys() == ["a", "b"]


class TierMachine(RuleBasedStateMachine):
    """Any use: never too many blocks, nothing in use is evicted, changes retell the tier."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = CpuTier(6, 2)
        self.running: list[KvSequence] = []
        self.reading: dict[KvSequence, list[Any]] = {}
        self.published: set[Any] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=12), num_held=st.integers(0, 3))
    def start(self, tokens: list[int], num_held: int) -> None:
        keys = [tuple(tokens[:stop]) for stop in range(2, len(tokens) + 1, 2)]
        made = KvSequence(keys, len(tokens))
        num_held = min(num_held, len(keys))
        found = self.tier.num_leading(made, num_held)
        if found is None:
            return
        assert num_held <= found <= len(keys)
        if found > num_held:
            self.tier.begin_read(made, num_held, found)
            self.reading[made] = keys[num_held:found]
        self.running.append(made)

    @rule(pick=st.integers(0), num_tokens=st.integers(1, 12))
    def compute(self, pick: int, num_tokens: int) -> None:
        able = [each for each in self.running if each not in self.reading]
        if able:
            self.tier.offer(able[pick % len(able)], num_tokens)

    @rule(pick=st.integers(0))
    def end_read(self, pick: int) -> None:
        if self.reading:
            each = list(self.reading)[pick % len(self.reading)]
            del self.reading[each]
            self.tier.end_read(each)

    @rule(pick=st.integers(0))
    def finish(self, pick: int) -> None:
        able = [each for each in self.running if each not in self.reading]
        if able:
            self.running.remove(able[pick % len(able)])
            self.tier.finish(able[pick % len(able)])

    @rule()
    def end_step(self) -> None:
        self.tier.end_step()

    @invariant()
    def nothing_in_use_is_evicted(self) -> None:
        held = set(self.tier.keys())
        assert len(held) <= 6
        for each, blocks in self.reading.items():
            assert held.issuperset(blocks), each
        for change in self.tier.take_changes():
            if isinstance(change, Offloaded):
                assert not self.published & set(change.keys)
                self.published.update(change.keys)
            else:
                self.published.difference_update(change.keys)
        assert self.published <= held
        if not self.tier.is_writing:
            assert self.published == held


TierMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestTier = TierMachine.TestCase
