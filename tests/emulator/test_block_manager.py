"""The paged cache does what vLLM's own does, and never loses a block."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadtest.emulator.block_manager import BlockManager, CachedSequence
from router.contracts import ExtraKeys, HashContract
from router.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from tests.effort import examples

GOLDEN = Path(__file__).parent / "golden" / "vllm_block_pool.json"


def digests_of(contract: HashContract, token_ids: list[int], salt: str | None) -> list[bytes]:
    size = contract.block_size
    parent: bytes | None = None
    chain: list[bytes] = []
    for start in range(0, len(token_ids) - size + 1, size):
        _, parent = contract.extend(
            parent, token_ids[start : start + size], ExtraKeys(cache_salt=salt)
        )
        assert parent is not None
        chain.append(parent)
    return chain


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
    contract = HashContract(algorithm="sha256", block_size=golden["block_size"])
    manager = BlockManager(golden["num_blocks"], golden["block_size"])
    live: dict[str, tuple[CachedSequence, str | None]] = {}
    computed: dict[str, int] = {}

    for number, step in enumerate(golden["steps"]):
        match step["op"]:
            case "new":
                tokens, salt = list(step["tokens"]), step["salt"]
                sequence = CachedSequence(
                    tokens, digests_of(contract, tokens, salt), cache_salt=salt
                )
                hit = manager.match(sequence)
                assert len(hit) * golden["block_size"] == step["num_hit"], number
                num_tokens = step["num_hit"] + step["chunk"]
                ok = manager.allocate(sequence, num_tokens, hit, whole=step["whole"])
                assert ok == step["ok"], number
                if ok:
                    live[step["id"]] = sequence, salt
                    computed[step["id"]] = num_tokens
                assert [b.id for b in sequence.blocks] == step["blocks"], number
            case "grow":
                sequence, salt = live[step["id"]]
                if step["appended"] is not None:
                    sequence.token_ids.append(step["appended"])
                    sequence.digests[:] = digests_of(contract, sequence.token_ids, salt)
                num_tokens = computed[step["id"]] + step["chunk"]
                assert manager.allocate(sequence, num_tokens) == step["ok"], number
                if step["ok"]:
                    computed[step["id"]] = num_tokens
                assert [b.id for b in sequence.blocks] == step["blocks"], number
            case "free":
                manager.free(live.pop(step["id"])[0])
            case "reset":
                assert manager.reset() == step["ok"], number
        assert [as_recorded(e) for e in manager.take_events()] == step["events"], number
        assert manager.free_block_ids() == step["free"], number


def test_a_pool_without_a_usable_block_is_refused() -> None:
    """One block is the null block, so a pool of one could hold nothing."""
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockManager(1, 16)


def test_events_can_name_blocks_by_all_their_bytes() -> None:
    """With byte hashes an event carries the digest itself, adapter and salt beside it."""
    manager = BlockManager(4, 2, hash_form="bytes")
    sequence = CachedSequence([1, 2, 3, 4], [b"a" * 32, b"b" * 32], lora=(1, "ad"), cache_salt="s")

    assert manager.allocate(sequence, 4)

    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [b"a" * 32, b"b" * 32]
    assert event.extra_keys == [["ad", "s"], ["ad"]]
    assert (event.lora_id, event.lora_name) == (1, "ad")
    assert manager.num_cached_tokens(sequence) == 4


def test_without_events_nothing_is_noted() -> None:
    """A manager that is not to note events reports neither stores, removals nor resets."""
    manager = BlockManager(3, 1, events=False)
    for token in range(4):
        sequence = CachedSequence([token], [bytes([token])])
        assert manager.allocate(sequence, 1)
        manager.free(sequence)

    assert manager.reset()
    assert manager.take_events() == []


class CacheMachine(RuleBasedStateMachine):
    """Any workload: no leak, true reference counts, events that retell the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.contract = HashContract(algorithm="xxhash", block_size=2)
        self.manager = BlockManager(12, 2)
        self.live: list[tuple[CachedSequence, int]] = []
        self.published: Counter[int] = Counter()

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        chunk=st.integers(1, 16),
        whole=st.booleans(),
    )
    def start(self, tokens: list[int], chunk: int, whole: bool) -> None:
        sequence = CachedSequence(tokens, digests_of(self.contract, tokens, None))
        cached = self.manager.cached_digests()
        longest = 0
        while longest < len(sequence.digests) and sequence.digests[longest] in cached:
            longest += 1

        hit = self.manager.match(sequence)

        assert len(hit) == min(longest, (len(tokens) - 1) // 2)
        num_tokens = min(len(hit) * 2 + chunk, len(tokens))
        if self.manager.allocate(sequence, num_tokens, hit, whole=whole):
            self.live.append((sequence, num_tokens))

    @rule(pick=st.integers(0), token=st.integers(0, 1))
    def grow(self, pick: int, token: int) -> None:
        if not self.live:
            return
        index = pick % len(self.live)
        sequence, num_tokens = self.live[index]
        if num_tokens == len(sequence.token_ids):
            sequence.token_ids.append(token)
            sequence.digests[:] = digests_of(self.contract, sequence.token_ids, None)
        before = self.manager.num_free_blocks
        if self.manager.allocate(sequence, num_tokens + 1):
            self.live[index] = sequence, num_tokens + 1
        else:
            assert before == self.manager.num_free_blocks == 0

    @rule(pick=st.integers(0))
    def end(self, pick: int) -> None:
        if self.live:
            self.manager.free(self.live.pop(pick % len(self.live))[0])

    @rule()
    def reset(self) -> None:
        assert self.manager.reset() == (not self.live)

    @invariant()
    def no_block_is_lost(self) -> None:
        held = Counter(b.id for sequence, _ in self.live for b in sequence.blocks)
        free = self.manager.free_block_ids()
        assert sorted([*free, *held]) == list(range(1, 12))
        for sequence, _ in self.live:
            assert all(b.ref_cnt == held[b.id] for b in sequence.blocks)
        assert self.manager.usage == pytest.approx(len(held) / 11)

    @invariant()
    def events_describe_the_cache(self) -> None:
        for event in self.manager.take_events():
            match event:
                case BlockStored():
                    self.published.update(event.block_hashes)  # type: ignore[arg-type]
                case BlockRemoved():
                    self.published.subtract(event.block_hashes)  # type: ignore[arg-type]
                case AllBlocksCleared():
                    self.published.clear()
        cached = {
            int.from_bytes(digest[-8:], "big"): copies
            for digest, copies in self.manager.cached_digests().items()
        }
        assert {key: n for key, n in self.published.items() if n} == cached

    @invariant()
    def each_sequence_holds_what_it_computed(self) -> None:
        for sequence, num_tokens in self.live:
            assert sequence.num_cached_blocks == num_tokens // 2
            assert len(sequence.blocks) == -(-num_tokens // 2)


CacheMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestCache = CacheMachine.TestCase


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    """Of two finished sequences the older goes first, each from its tail to its head."""
    manager = BlockManager(5, 1)
    first = CachedSequence([1, 2], [b"1" * 8, b"2" * 8])
    second = CachedSequence([3, 4], [b"3" * 8, b"4" * 8])
    for sequence in (first, second):
        assert manager.allocate(sequence, 2)
    for sequence in (first, second):
        manager.free(sequence)
    manager.take_events()

    assert manager.allocate(CachedSequence([5, 6, 7], [b"5" * 8, b"6" * 8, b"7" * 8]), 3)

    removed = [e.block_hashes[0] for e in manager.take_events() if isinstance(e, BlockRemoved)]
    assert removed == [int.from_bytes(b * 8, "big") for b in (b"2", b"1", b"4")]
