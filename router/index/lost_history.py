"""Blocks of lost history that a request proves: a replica whose history is lost heals by its turns.

A block's hash covers all tokens before it, and an engine computes a prompt's blocks in order. While
it does, it keeps the blocks before them. So the event of a prompt's last block proves that the
engine has the whole chain. Blocks of the chain that no event showed were stored before the router
joined, and were reused.

vLLM can also announce reused blocks (`kv_cache_report_mode: full`). It is not asked to, see
docs/research/lost-history.md.
"""

from __future__ import annotations

from router.index.block_index import BlockIndex
from router.index.claims import Claim


def recover(index: BlockIndex, claim: Claim) -> int:
    """Add the blocks of a claim that its candidate must have had; return how many.

    For a claim whose last block has just been stored. Each block counts as one copy. If the engine
    has more, a later match may be too short.
    """
    candidate, held = claim.candidate, index.on_gpu(claim.candidate)
    if not claim.is_new or claim.keys[-1] not in held or index.has_groups(candidate):
        return 0
    keys = [
        key
        for key in claim.keys
        if key not in held and not index.was_evicted(candidate, key, claim.num_removals)
    ]
    if keys:
        index.store(candidate, keys)
    return len(keys)
