"""How many tokens of conversations a cache holds if the model has several KV groups.

What must live here: the sum. What must not: which conversations there are, and what they share.

All groups take blocks of equal size from one pool (source: vllm/v1/core/block_pool.py;
unify_kv_cache_spec_page_size in kv_cache_utils.py, 0.32.0). A conversation that is to continue
where it ended needs

    kind                   blocks
    full attention         one for each `block_size` tokens
    sliding window         those of the window, however long it is
    Mamba                  one: the last state
    any other              as full attention

Its other blocks of windows and states are overwritten first, and nothing is lost with them. vLLM
reports another figure (`kv_cache_size_tokens`): for running requests of the greatest length, whose
windows cover a whole step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from router.base.messages import KvGroup
from router.index.hit_length import MAMBA, SLIDING_WINDOW, KvLayout


class _Footprint(NamedTuple):
    blocks_per_token: float
    num_blocks: int  # of a conversation of any length


def capacity_tokens(layout: KvLayout, num_blocks: int, num_sessions: int) -> int | None:
    """Return how many tokens `num_sessions` conversations may have in all.

    None: no group grows with tokens.
    """
    footprint = _footprint(layout.groups, layout.drops_last)
    if not footprint.blocks_per_token:
        return None
    num_free = num_blocks - num_sessions * footprint.num_blocks
    return max(0, int(num_free / footprint.blocks_per_token))


@lru_cache(maxsize=64)
def _footprint(groups: tuple[KvGroup, ...], in_windows: bool) -> _Footprint:
    per_token, num_blocks = 0.0, 0
    for group in groups:
        if group.kind == MAMBA:
            num_blocks += 1
        elif group.kind in SLIDING_WINDOW and group.window is not None:
            num_blocks += -(-(group.window - 1) // group.block_size) + in_windows
        else:
            per_token += 1 / group.block_size
    return _Footprint(per_token, num_blocks)
