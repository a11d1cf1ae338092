"""Hit lengths of models with several KV groups, against vLLM's own answers.

The fixture holds random caches, and what vLLM 0.32.0's coordinator finds in them
(tests/engines/record_hit_lengths.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.base.contracts import BlockKey
from router.base.messages import KvGroup
from router.index.group_rules import Chain
from router.index.hit_length import KvLayout, is_understood, make_layout

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
