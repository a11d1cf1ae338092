"""The paged cache against a recording of vLLM's, and its invariants."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadtest.emulator.block_events import EventWriter
from loadtest.emulator.generation import Generation
from loadtest.engine_model.blocks import Blocks, Cleared, KvSequence, Removed, Stored
from router.base.contracts import ExtraKeys, HashContract
from router.kv_events.wire import BlockRemoved, BlockStored, KvEvent
from tests.effort import examples
from tests.loadtest.engine_model.requests import generation

GOLDEN = Path(__file__).parent / "golden" / "vllm_block_pool.json"


def as_recorded(event: KvEvent) -> list[Any]:
    match event:
        case BlockStored():
            return [
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.extra_keys,
                event.group_idx,
                event.medium,
                event.kv_cache_spec_kind,
            ]
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.group_idx, event.medium]
        case _:
            return [type(event).__name__]


def test_every_step_equals_the_recording_of_vllm() -> None:
    """Hits, refusals, block ids, free queue and events equal vLLM's, step by step."""
    golden = json.loads(GOLDEN.read_text())
    size = golden["block_size"]
    contract = HashContract(algorithm="sha256", block_size=size)
    blocks = Blocks(golden["num_blocks"], size)
    writer = EventWriter(blocks)
    live: dict[str, Generation] = {}
    computed: dict[str, int] = {}

    for number, step in enumerate(golden["steps"]):
        match step["op"]:
            case "new":
                tokens, salt = list(step["tokens"]), step["salt"]
                made = generation(contract, tokens, cache_salt=salt)
                hit = blocks.match(made)
                assert len(hit) * size == step["num_hit"], number
                num_tokens = step["num_hit"] + step["chunk"]
                ok = blocks.allocate(made, num_tokens, hit, whole=step["whole"])
                assert ok == step["ok"], number
                if ok:
                    live[step["id"]] = made
                    computed[step["id"]] = num_tokens
                assert made.blocks == step["blocks"], number
            case "grow":
                made = live[step["id"]]
                if step["appended"] is not None:
                    del made.token_ids[made.num_tokens :]
                    made.token_ids.append(step["appended"])
                    made.num_tokens += 1
                    extra = ExtraKeys(cache_salt=made.cache_salt)
                    made.keys = contract.digests(None, made.token_ids, extra)
                num_tokens = computed[step["id"]] + step["chunk"]
                assert blocks.allocate(made, num_tokens) == step["ok"], number
                if step["ok"]:
                    computed[step["id"]] = num_tokens
                assert made.blocks == step["blocks"], number
            case "free":
                blocks.free(live.pop(step["id"]))
            case "reset":
                assert blocks.reset() == step["ok"], number
        events = writer.events(blocks.take_changes())
        assert [as_recorded(event) for event in events] == step["events"], number
        assert blocks.free_block_ids() == step["free"], number


def test_a_pool_without_a_usable_block_is_refused() -> None:
    """One block is the null block."""
    with pytest.raises(ValueError, match="at least 2 blocks"):
        Blocks(1, 16)


def test_an_event_names_adapter_and_salt() -> None:
    """The salt belongs to the first block alone."""
    blocks = Blocks(4, 2)
    contract = HashContract(algorithm="sha256", block_size=2)
    made = generation(contract, [1, 2, 3, 4], lora=(1, "ad"), cache_salt="s")

    assert blocks.allocate(made, 4)

    (event,) = EventWriter(blocks).events(blocks.take_changes())
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [["ad", "s"], ["ad"]]
    assert (event.lora_id, event.lora_name) == (1, "ad")


def test_without_events_no_change_is_noted() -> None:
    """Neither stores, removals nor resets are reported."""
    blocks = Blocks(3, 1, notes_changes=False)
    for token in range(4):
        sequence = KvSequence([token], 1)
        assert blocks.allocate(sequence, 1)
        blocks.free(sequence)

    assert blocks.reset()
    assert blocks.num_evicted == 2
    assert blocks.take_changes() == []


class CacheMachine(RuleBasedStateMachine):
    """Any workload: no leak, true reference counts, changes that retell the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(12, 2)
        self.live: list[tuple[KvSequence, list[int], int]] = []
        self.published: Counter[object] = Counter()

    @staticmethod
    def keys(tokens: list[int]) -> list[object]:
        return [tuple(tokens[:stop]) for stop in range(2, len(tokens) + 1, 2)]

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        chunk=st.integers(1, 16),
        whole=st.booleans(),
    )
    def start(self, tokens: list[int], chunk: int, whole: bool) -> None:
        sequence = KvSequence(self.keys(tokens), len(tokens))
        cached = self.blocks.cached_keys()
        longest = 0
        while longest < len(sequence.keys) and sequence.keys[longest] in cached:
            longest += 1

        hit = self.blocks.match(sequence)

        assert len(hit) == min(longest, (len(tokens) - 1) // 2)
        num_tokens = min(len(hit) * 2 + chunk, len(tokens))
        if self.blocks.allocate(sequence, num_tokens, hit, whole=whole):
            self.live.append((sequence, tokens, num_tokens))

    @rule(pick=st.integers(0), token=st.integers(0, 1))
    def grow(self, pick: int, token: int) -> None:
        if not self.live:
            return
        index = pick % len(self.live)
        sequence, tokens, num_tokens = self.live[index]
        if num_tokens == len(tokens):
            tokens = [*tokens, token]
            sequence.keys, sequence.num_tokens = self.keys(tokens), len(tokens)
        before = self.blocks.num_free_blocks
        if self.blocks.allocate(sequence, num_tokens + 1):
            self.live[index] = sequence, tokens, num_tokens + 1
        else:
            assert before == self.blocks.num_free_blocks == 0

    @rule(pick=st.integers(0))
    def end(self, pick: int) -> None:
        if self.live:
            self.blocks.free(self.live.pop(pick % len(self.live))[0])

    @rule()
    def reset(self) -> None:
        assert self.blocks.reset() == (not self.live)

    @invariant()
    def no_block_is_lost(self) -> None:
        held = Counter(block for sequence, *_ in self.live for block in sequence.blocks)
        assert sorted([*self.blocks.free_block_ids(), *held]) == list(range(1, 12))
        assert self.blocks.usage == pytest.approx(len(held) / 11)

    @invariant()
    def changes_describe_the_cache(self) -> None:
        for change in self.blocks.take_changes():
            match change:
                case Stored():
                    self.published.update(change.keys)
                case Removed():
                    self.published.subtract(change.keys)
                case Cleared():
                    self.published.clear()
        assert {key: n for key, n in self.published.items() if n} == self.blocks.cached_keys()

    @invariant()
    def each_sequence_has_the_blocks_it_computed(self) -> None:
        for sequence, _, num_tokens in self.live:
            assert sequence.num_cached_blocks == num_tokens // 2
            assert len(sequence.blocks) == -(-num_tokens // 2)


CacheMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestCache = CacheMachine.TestCase
