"""router.index.footprint: how many tokens of conversations fit a cache of several KV groups."""

from __future__ import annotations

import pytest

from loadtest.engine_model.blocks import KvSequence
from loadtest.engine_model.window_blocks import WindowBlocks
from router.base.messages import KvGroup
from router.index.footprint import capacity_tokens
from router.index.hit_length import KvLayout

FULL = KvGroup(0, "full_attention", 16)
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
