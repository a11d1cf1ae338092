"""Conversations with streams of models that have several KV groups."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import pytest

from router.base.contracts import ExtraKeys, HashContract
from router.base.messages import MAX_GROUPS, KvGroup, Position, decode_status, encode
from router.index.block_index import NO_BLOCKS, BlockIndex
from router.index.candidate_stream import StreamReason
from router.index.copies import StagedBlocks
from router.kv_events.contract_search import VERIFY_EVERY
from router.kv_events.stream import RankStream
from router.kv_events.wire import BlockStored, KvEvent
from tests.engine import BLOCK_SIZE, CONTRACT, batch, hashes, prompt, removed, stored
from tests.kv_events.talk import R1, Talk

WINDOW = 2 * BLOCK_SIZE + 1  # two blocks


def window_stored(tokens: list[int], *, skip: int = 0, **fields: Any) -> BlockStored:
    """The event of a sliding window, which keeps the last two blocks before a prompt's end."""
    kept = {"group": 1, "kind": "sliding_window", **fields}
    event = stored(tokens, skip=skip, **kept)
    event.block_hashes = event.block_hashes[-2:]
    event.extra_keys = (event.extra_keys or [])[-2:]
    event.kv_cache_spec_sliding_window = WINDOW
    return event


def hybrid(tokens: list[int], *, skip: int = 0, **fields: Any) -> list[KvEvent]:
    """What a step stores: the window's group first, as in Gemma 3."""
    return [
        window_stored(tokens, skip=skip, group=0, **fields),
        stored(tokens, skip=skip, group=1, **fields),
    ]


def test_a_hit_ends_where_the_window_is() -> None:
    """Blocks of full attention count only as far as the window's blocks allow."""
    talk = Talk().join()
    talk.tell(*hybrid(prompt(1, 6)))

    assert talk.stream.state_and_reason() == ("exact", "")
    assert talk.stream.contract == CONTRACT
    assert talk.num_matched(prompt(1, 6)) == 6
    assert talk.num_matched(prompt(1, 8)) == 6
    assert talk.num_matched(prompt(1, 5)) == 0
    assert talk.index.num_blocks(R1) == 8
    assert talk.stream.counters.blocks.num_other_groups == 0


def test_evictions_count_in_their_group() -> None:
    """A block that leaves the window's group ends the hit; a second copy keeps it."""
    talk = Talk().join()
    talk.tell(*hybrid(prompt(1, 6)), window_stored(prompt(1, 6), group=0))
    last = hashes(prompt(1, 6))[-1:]

    talk.tell(removed(last, group=0))
    assert talk.num_matched(prompt(1, 6)) == 6
    talk.tell(removed(last, group=0))
    assert talk.num_matched(prompt(1, 6)) == 0
    talk.tell(window_stored(prompt(1, 6), skip=4, group=0), removed(last, group=1))
    assert talk.num_matched(prompt(1, 6)) == 0
    talk.tell(removed(last, group=7))
    assert talk.stream.counters.blocks.num_other_groups == 1


def test_a_group_that_is_seen_later_counts_from_then_on() -> None:
    """What was known of full attention stays, and needs the new group's blocks as well."""
    talk = Talk().join()
    talk.tell(stored(prompt(1)))
    assert talk.num_matched(prompt(1)) == 3
    talk.tell(window_stored(prompt(2)))

    assert talk.stream.status().groups == (
        KvGroup(0, "full_attention", BLOCK_SIZE),
        KvGroup(1, "sliding_window", BLOCK_SIZE, WINDOW),
    )
    assert talk.num_matched(prompt(1)) == 0


def test_a_plain_model_has_no_groups() -> None:
    """One group of full attention is as if there were none; its index has no layout."""
    talk = Talk().join()
    talk.tell(stored(prompt(1)))

    assert talk.stream.status().groups == ()
    assert not talk.index.has_groups(R1)


@pytest.mark.parametrize(
    "strange",
    [
        {"kind": "chunked_local_attention"},
        {"kind": "mamba", "kv_cache_spec_sliding_window": None, "block_size": 1 << 17},
        {"kind": "sliding_window", "kv_cache_spec_sliding_window": -1},
        {"group": -1},
        {"group": 1 << 20},
        {"kind": "k" * 2_000, "kv_cache_spec_sliding_window": 1 << 60},
    ],
)
def test_a_group_that_is_not_understood_degrades(strange: dict[str, Any]) -> None:
    """Unknown kinds and senseless figures: no more than the whole prefix in all groups counts."""
    talk = Talk().join()
    event = window_stored(prompt(1), **{k: v for k, v in strange.items() if k in ("kind", "group")})
    event.kv_cache_spec_sliding_window = strange.get("kv_cache_spec_sliding_window")
    event.block_size = strange.get("block_size", event.block_size)
    talk.tell(stored(prompt(1)), event)

    assert talk.stream.state_and_reason() == ("degraded", StreamReason.GROUPS)
    assert talk.num_matched(prompt(1)) == 0
    assert decode_status(encode(talk.stream.status())) == talk.stream.status()


def test_groups_without_end_are_bounded() -> None:
    """An engine that names ever new groups costs no memory, and is not believed."""
    talk = Talk().join()
    for group in range(MAX_GROUPS + 10):
        talk.tell(window_stored(prompt(1), group=group))

    assert len(talk.stream.status().groups) == MAX_GROUPS
    assert talk.stream.reason == StreamReason.GROUPS


def test_coarse_blocks_are_named_by_their_last_hash() -> None:
    """Mamba blocks of one unit, attention blocks of two: the contract is found at the unit."""
    coarse = Talk(block_size=2 * BLOCK_SIZE).join()
    tokens = prompt(1, 6)
    full = stored(tokens, group=1)
    full.block_hashes, full.block_size = full.block_hashes[1::2], 2 * BLOCK_SIZE
    states = stored(tokens, group=0, kind="mamba")
    states.block_hashes = states.block_hashes[3:4]
    coarse.tell(states, full)

    assert coarse.stream.contract == CONTRACT
    assert coarse.stream.state == "exact"
    assert coarse.num_matched(prompt(1, 6)) == 4
    assert coarse.num_matched(prompt(1, 3)) == 0


def test_a_model_of_windows_alone_is_found_out() -> None:
    """Without full attention the contract shows in an event with gaps, a salted one or not."""
    talk = Talk(block_size=2 * BLOCK_SIZE).join()
    for number in range(1, 5):
        talk.tell(window_stored(prompt(number, 5), group=0, extra=ExtraKeys(cache_salt="t1")))
    assert talk.stream.reason == StreamReason.UNVERIFIED
    talk.tell(window_stored(prompt(9, 5), group=0))

    assert talk.stream.state == "exact"
    assert talk.num_matched(prompt(9, 5)) == 5


def test_gaps_do_not_shake_a_contract() -> None:
    """A window's event that starts a prompt lacks its first block, and is never held against it."""
    talk = Talk().join()
    for number in range(VERIFY_EVERY + 2):
        talk.tell(*hybrid(prompt(number + 1)))

    assert talk.stream.state == "exact"
    assert talk.stream.counters.blocks.num_contract_misses == 0


def test_what_cannot_be_named_counts_for_nothing() -> None:
    """Translated hashes of a model with gaps have no places: no hit is predicted."""
    talk = Talk().join()
    random = HashContract(algorithm="xxhash", block_size=BLOCK_SIZE, seed="drawn at random")
    for number in range(1, 6):
        talk.tell(*hybrid(prompt(number), contract=random))
        talk.replay()

    assert talk.stream.reason == StreamReason.TRANSLATED
    assert talk.num_matched(prompt(5)) == 0


def test_connectors_blocks_count_in_full_attention_alone() -> None:
    """What a connector stores of other groups is left out; no cpu tier prolongs a hit."""
    talk = Talk().join()
    talk.tell(
        *hybrid(prompt(1, 4)),
        stored(prompt(1, 6), group=1, kind=None, medium="cpu"),
        stored(prompt(1, 6), group=0, kind=None, medium="cpu"),
    )
    chain, _ = CONTRACT.extend(None, prompt(1, 6))

    assert talk.index.num_blocks(R1, "cpu") == 6
    assert talk.index.match(chain, [R1])[R1].num_cpu_blocks == 4


def test_a_router_that_starts_from_redis_knows_the_groups() -> None:
    """Groups travel in the status."""
    first = Talk().join()
    first.tell(*hybrid(prompt(1, 6)))
    status = decode_status(encode(first.stream.status()))

    index, staged = BlockIndex(), StagedBlocks()
    for change in first.index.contents(R1):
        staged.apply(change)
    heir = RankStream(R1, index, block_size=16, capacity_blocks=0)
    assert heir.resume(Position(0, b"mark"), status, 0.0, newest=None)
    index.replace(R1, staged)
    chain, _ = CONTRACT.extend(None, prompt(1, 8))
    assert index.match(chain, [R1]) == first.index.match(chain, [R1])
    assert index.match(chain[:5], [R1])[R1] == NO_BLOCKS
    assert heir.status().groups == status.groups


def test_a_restart_forgets_the_groups() -> None:
    """Another engine may be another model."""
    talk = Talk().join()
    talk.tell(*hybrid(prompt(1)))
    talk.history = [batch(stored(prompt(2)))]
    talk.stream.connected()
    talk.replay()

    assert not talk.index.has_groups(R1)
    assert talk.num_matched(prompt(2)) == 3


def coarse_and_fine(number: int, sizes: tuple[int, ...]) -> list[KvEvent]:
    """A prompt's events: full attention in coarse blocks first, windows in finer ones behind."""
    tokens = prompt(number, 6 * sizes[0] // BLOCK_SIZE)
    events = []
    for group, size in enumerate(sizes):
        step = size // BLOCK_SIZE
        event = stored(tokens, group=group, kind="sliding_window" if group else "full_attention")
        event.block_hashes = event.block_hashes[step - 1 :: step]
        event.extra_keys = [None] * len(event.block_hashes)
        event.block_size = size
        if group:
            event.kv_cache_spec_sliding_window = 2 * size + 1
            event.block_hashes = event.block_hashes[-sizes[0] // size :]
            event.parent_block_hash = hashes(tokens)[-sizes[0] // BLOCK_SIZE - 1]
            event.token_ids = tokens[-sizes[0] :]
        events.append(event)
    return events


@pytest.mark.parametrize("sizes", [(256, 4), (256, 64, 4), (1024, 256, 64, 16, 4), (8, 4)])
@pytest.mark.parametrize("in_one_batch", [True, False])
def test_the_first_conversation_is_known_whatever_its_groups_blocks(
    sizes: tuple[int, ...], in_one_batch: bool
) -> None:
    """What a hash covers shows by the finest group, which comes last."""
    talk = Talk(block_size=sizes[0]).join()
    events = coarse_and_fine(1, sizes)
    for said in [events] if in_one_batch else [[event] for event in events]:
        talk.tell(*said)
    tokens = prompt(1, 6 * sizes[0] // BLOCK_SIZE)

    assert talk.stream.state_and_reason() == ("exact", "")
    assert talk.num_matched(tokens) * BLOCK_SIZE == 6 * sizes[0]


def whole_windows(sizes: Sequence[int], dense: int) -> list[KvEvent]:
    """A prompt's events where each window reaches back to its start; one group is no window."""
    tokens = prompt(1, 2 * lcm(*sizes) // BLOCK_SIZE)
    events: list[KvEvent] = []
    for group, size in enumerate(sizes):
        step = size // BLOCK_SIZE
        kind = "full_attention" if group == dense else "sliding_window"
        event = stored(tokens, group=group, kind=kind)
        event.block_hashes = event.block_hashes[step - 1 :: step]
        event.extra_keys = [None] * len(event.block_hashes)
        event.block_size = size
        if group != dense:
            event.kv_cache_spec_sliding_window = 2 * size + 1
        events.append(event)
    return events


@pytest.mark.parametrize("dense", [0, 2, 4])
@pytest.mark.parametrize(
    "sizes", [(64, 32, 16, 8, 4), (4, 8, 16, 32, 64), (16, 64, 4, 32, 8), (24, 16, 12, 48, 8)]
)
@pytest.mark.parametrize("in_one_batch", [True, False])
def test_a_conversation_that_fits_its_windows_is_known(
    sizes: tuple[int, ...], dense: int, in_one_batch: bool
) -> None:
    """Events of windows start the prompt, too, and show nothing of the contract by themselves."""
    talk = Talk(block_size=sizes[dense]).join()
    events = whole_windows(sizes, dense)
    for said in [events] if in_one_batch else [[event] for event in events]:
        talk.tell(*said)
    tokens = prompt(1, 2 * lcm(*sizes) // BLOCK_SIZE)

    assert talk.stream.state_and_reason() == ("exact", "")
    assert talk.num_matched(tokens) * BLOCK_SIZE == 2 * lcm(*sizes)
