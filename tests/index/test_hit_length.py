"""Hit lengths of models with several KV groups, against vLLM's own answers.

The fixture holds random caches, and what vLLM 0.32.0's coordinator finds in them
(tests/engines/record_hit_lengths.py).

router.index.hit_length: how many tokens of conversations fit a cache of several KV groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine_model.blocks import KvSequence
from loadtest.engine_model.window_blocks import WindowBlocks
from router.base.contracts import BlockKey
from router.base.messages import KvGroup
from router.index.hit_length import Chain, KvLayout, capacity_tokens, is_understood, make_layout

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures/kv_groups/coordinator-0.32.0.json").read_text()
)

FULL = KvGroup(0, "full_attention", 16)
WINDOW = KvGroup(1, "sliding_window", 16, 40)  # three blocks
CHAIN = [BlockKey(key) for key in range(1000, 1010)]


def keys(layout: KvLayout, group: int, ends: Sequence[int]) -> set[BlockKey]:
    """Name a group's blocks by the unit they end at, first is 1."""
    salt = layout.salt(group)
    assert salt is not None
    return {BlockKey(CHAIN[end - 1] ^ salt) for end in ends}


@pytest.mark.parametrize(
    "recorded", RECORDED, ids=lambda r: f"{r['layout']['name']} {r['layout']['eagle']}"
)
def test_hits_are_the_engines(recorded: dict[str, Any]) -> None:
    named = recorded["layout"]
    unit = named["unit"]
    layout = KvLayout(
        [KvGroup(*group) for group in named["groups"]],
        unit,
        drops_last=named["eagle"],
    )

    for num_tokens, held_bits, reported in recorded["cases"]:
        chain = [BlockKey(key) for key in range(1 << 20, (1 << 20) + num_tokens // unit)]
        held = {
            key ^ (layout.salt(group[0]) or 0)
            for group, bits in zip(named["groups"], held_bits, strict=True)
            for position, key in enumerate(chain)
            if bits >> position & 1
        }
        hit = layout.hit(Chain(chain), held, (num_tokens - 1) // unit)
        assert hit * unit == reported, (num_tokens, held_bits)


def test_a_window_that_is_not_known_needs_every_block() -> None:
    for group in (KvGroup(1, "sliding_window", 16), KvGroup(1, "chunked_local_attention", 16)):
        layout = KvLayout([FULL, group], 16)
        held = keys(layout, 0, range(1, 9))
        assert not layout.is_understood
        assert layout.hit(Chain(CHAIN), held | keys(layout, 1, (1, 2, 6, 7, 8)), 9) == 2


def test_the_first_full_attention_has_the_plain_keys() -> None:
    before, after = (
        KvLayout([WINDOW, FULL], 16),
        KvLayout([WINDOW, FULL, KvGroup(2, "mla_attention", 16)], 16),
    )

    assert before.salt(0) == after.salt(0) == 0
    assert len({after.salt(0), after.salt(1), after.salt(2)}) == 3
    assert before.salt(1) == after.salt(1)
    assert before.salt(2) is None


def test_what_a_prompt_leaves_serves_its_follow_up() -> None:
    layout = KvLayout([FULL, WINDOW], 16)
    kept = set(layout.kept(CHAIN, 8 * 16))  # ends at a boundary: its last token is computed again

    assert kept == keys(layout, 1, (5, 6, 7))
    assert layout.hit(Chain(CHAIN), kept | keys(layout, 0, range(1, 9)), 9) == 7


def test_short_prompts_and_mamba_states_promise_nothing() -> None:
    mamba = KvLayout([FULL, KvGroup(1, "mamba", 16)], 16)

    assert KvLayout([FULL, WINDOW], 16).kept(CHAIN, 16) == []
    assert mamba.kept(CHAIN, 100) == []
    assert set(mamba.needed(CHAIN, 6)) == keys(mamba, 1, (6,))
    assert mamba.needed(CHAIN, 0) == []


def test_a_unit_that_does_not_fit_makes_no_layout() -> None:
    assert make_layout((KvGroup(0, "full_attention", 96),), 64) is None
    assert make_layout((), 64) is None
    assert make_layout((FULL,), 16) is not None
    assert is_understood(WINDOW)


WINDOW = KvGroup(1, "sliding_window", 16, 40)  # three blocks


@pytest.mark.parametrize(
    ("groups", "num_sessions", "tokens"),
    [
        ((FULL,), 5, 1600),
        ((FULL, WINDOW), 0, 1600),
        ((FULL, WINDOW), 5, (100 - 15) * 16),
        ((FULL, WINDOW, KvGroup(2, "mamba", 16)), 5, (100 - 20) * 16),
        ((FULL, KvGroup(1, "full_attention", 16)), 5, 800),
        ((FULL, KvGroup(1, "full_attention", 32)), 0, 1066),
        ((FULL, KvGroup(1, "chunked_local_attention", 16)), 5, 800),
        ((FULL, WINDOW), 50, 0),
        ((WINDOW,), 5, None),
    ],
)
def test_what_grows_and_what_each_conversation_takes_once(
    groups: tuple[KvGroup, ...], num_sessions: int, tokens: int | None
) -> None:
    assert capacity_tokens(KvLayout(groups, 16), 100, num_sessions) == tokens


def test_eagle_keeps_a_block_more_of_each_window() -> None:
    layout = KvLayout((FULL, WINDOW), 16, drops_last=True)

    assert capacity_tokens(layout, 100, 5) == (100 - 20) * 16


def test_so_many_conversations_stay_in_a_cache_and_one_more_does_not() -> None:
    layout = KvLayout((KvGroup(0, "sliding_window", 4, 9), KvGroup(1, "full_attention", 4)), 4)
    num_blocks, length = 120, 10 * 4 + 1  # ten blocks of full attention and two of the window

    def num_hit(num_sessions: int) -> int:
        """Count those that are hit whole in a second round."""
        blocks = WindowBlocks(num_blocks + 1, 4, window=9)
        hits = 0
        for turn in range(2):
            for session in range(num_sessions):
                digests = [bytes([session, position]) * 8 for position in range(10)]
                sequence = KvSequence(digests, length)
                hit = blocks.match(sequence)
                hits += turn and len(hit) == 10
                for end in range(len(hit) * 4 + 1, length + 1):
                    assert blocks.allocate(sequence, end, hit if not sequence.blocks else ())
                blocks.free(sequence)
        return hits

    fits = next(
        n for n in range(1, 99) if n * (length - 1) > (capacity_tokens(layout, 120, n) or 0)
    )

    assert num_hit(fits - 2) == fits - 2  # one runs beside them
    assert num_hit(fits + 1) == 0
