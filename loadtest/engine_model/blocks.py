"""The paged KV cache of one data-parallel rank, block for block as vLLM keeps it.

What must live here: which block has which content, who uses it, and which is evicted next. What
must not: scheduling, time, hashing (sequences bring the keys of their blocks), the wire.

Rules (source: vllm/v1/core/{block_pool,kv_cache_utils,kv_cache_manager}.py, 0.32.0, one
full-attention group; tests/loadtest/engine_model/golden has a recording of vLLM):

1. Block 0 is the null block: it is never handed out and never cached.
2. Free blocks without a key are handed out first, then the least recently used cached block. A
   sequence frees its last block first.
3. A cached block can be hit while it is free; a hit takes it back into use.
4. Identical blocks are not merged: each copy is stored, reported and evicted on its own.
5. At least the last token is computed: a hit covers at most (num_tokens - 1) // block_size blocks.
6. With EAGLE or MTP the last block of a hit is dropped, and computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct


class KvSequence:
    """The tokens of one request, and the blocks that it uses.

    `keys` names the full blocks of all its tokens, the reply included. `num_tokens` counts the
    prompt and the reply so far, so keys beyond it are not in use yet.
    """

    __slots__ = ("blocks", "keys", "num_cached_blocks", "num_prompt_tokens", "num_tokens")

    def __init__(self, keys: Sequence[Any], num_prompt_tokens: int) -> None:
        self.keys = keys
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.blocks: list[int] = []
        self.num_cached_blocks = 0


class Stored(Struct, frozen=True):
    """Blocks [start, stop) of a sequence were filled, and all but some of a window can be hit.

    `window` is the number of a sliding window's group; None: full attention.
    """

    sequence: KvSequence
    start: int
    stop: int
    positions: Sequence[int]  # those that can be hit
    window: int | None = None

    @property
    def keys(self) -> list[Any]:
        return [self.sequence.keys[position] for position in self.positions]


class Removed(Struct, frozen=True):
    """Blocks were evicted, in this order."""

    keys: list[Any]
    window: int | None = None


class Cleared(Struct, frozen=True):
    """The whole cache was reset."""


Change = Stored | Removed | Cleared


class Blocks:
    """Blocks of one rank: look up, allocate, cache, free.

    Args:
        num_blocks: Physical blocks, the null block among them; at least 2.
        block_size: Tokens in a block.
        eagle: Whether the last block of a hit is dropped.
        lookahead: Tokens after a block that its key covers.
        notes_changes: Whether `take_changes` returns anything.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        eagle: bool = False,
        lookahead: int = 0,
        notes_changes: bool = True,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"need at least 2 blocks (one is the null block), got {num_blocks}")
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - 1
        self.num_evicted = 0
        self.lookahead = lookahead
        self._eagle = eagle
        self._notes_changes = notes_changes
        self._num_uses = [0] * num_blocks
        self._key_of: list[Any] = [None] * num_blocks  # None: cannot be hit
        self._blank = list(range(num_blocks - 1, 0, -1))  # free, without a key; the last goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, with a key; the first goes first
        self._by_key: dict[Any, list[int]] = {}  # all copies
        self._changes: list[Change] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use by requests, in [0, 1]; cached free ones are free."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def match(self, sequence: KvSequence) -> list[int]:
        """Find the longest cached prefix, without taking it."""
        limit = (sequence.num_tokens - max(1, self.lookahead)) // self.block_size
        hit: list[int] = []
        find = self._by_key.get
        for key in sequence.keys[: max(limit, 0)]:
            found = find(key)
            if found is None:
                break
            hit.append(found[0])
        return hit[:-1] if self._eagle else hit

    def allocate(
        self,
        sequence: KvSequence,
        num_tokens: int,
        hit: Sequence[int] = (),
        *,
        whole: bool = False,
        caches: bool = True,
    ) -> bool:
        """Allocate slots for the sequence's first `num_tokens` tokens and cache full blocks.

        Args:
            sequence: New (then `hit` is what `match` returned), or one that has blocks.
            num_tokens: Computed tokens plus those of the next step.
            hit: Cached blocks to start with; only for a sequence without blocks.
            whole: Refuse unless all of the sequence's tokens fit (vLLM's admission rule).
            caches: False: the blocks are loaded first, `cache` follows (vLLM's delay_cache_blocks).

        Returns:
            False if there are too few free blocks; nothing has changed then.
        """
        size = self.block_size
        num_held = len(sequence.blocks) + len(hit)
        num_new = max(-(-num_tokens // size) - num_held, 0)
        num_needed = num_new
        if whole:
            num_needed = max(num_needed, -(-sequence.num_tokens // size) - num_held)
        num_needed += sum([not self._num_uses[block] for block in hit])
        if num_needed > self.num_free_blocks:
            return False
        if hit:
            self._reuse(sequence, hit)
        if num_new:
            sequence.blocks += self._take(num_new)
        if caches:
            self.cache(sequence, num_tokens)
        return True

    def cache(self, sequence: KvSequence, num_tokens: int) -> None:
        """Cache the blocks that the sequence's first `num_tokens` tokens fill, for others."""
        start, stop = sequence.num_cached_blocks, self._num_full_blocks(sequence, num_tokens)
        if start >= stop:
            return
        keys, by_key, key_of = sequence.keys, self._by_key, self._key_of
        for position in range(start, stop):
            block, key = sequence.blocks[position], keys[position]
            key_of[block] = key
            found = by_key.get(key)
            if found is None:
                by_key[key] = [block]
            else:
                found.append(block)
        sequence.num_cached_blocks = stop
        if self._notes_changes:
            self._changes.append(Stored(sequence, start, stop, range(start, stop)))

    def free(self, sequence: KvSequence) -> None:
        """Free the sequence's blocks; cached ones can be hit until they are evicted."""
        self._release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_cached_blocks = 0

    def reset(self) -> bool:
        """Clear the cache; refused (False) while any block is in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self._blank = self.free_block_ids()[::-1]
        self._idle.clear()
        self._by_key.clear()
        self._key_of = [None] * len(self._key_of)
        if self._notes_changes:
            self._changes.append(Cleared())
        return True

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def cached_keys(self) -> dict[Any, int]:
        """Count the copies of every cached block, by key (for tests and inspection)."""
        return {key: len(found) for key, found in self._by_key.items()}

    def free_block_ids(self) -> list[int]:
        """List the free blocks in eviction order (for tests and inspection)."""
        return [*reversed(self._blank), *self._idle]

    def _num_full_blocks(self, sequence: KvSequence, num_tokens: int) -> int:
        """Count the blocks that are full and have a key; there are no keys if caching is off."""
        num_keyed = min(num_tokens, sequence.num_tokens - self.lookahead) // self.block_size
        return min(num_keyed, len(sequence.keys))

    def _release(self, blocks: Iterable[int]) -> None:
        """Free blocks, in the order in which they may be handed out."""
        num_uses, key_of, blank = self._num_uses, self._key_of, []
        for block in blocks:
            num_uses[block] -= 1
            if not num_uses[block]:
                if key_of[block] is None:
                    blank.append(block)
                else:
                    self._idle[block] = None
        self._blank += reversed(blank)

    def _reuse(self, sequence: KvSequence, hit: Sequence[int]) -> None:
        assert not sequence.blocks
        self._touch(hit)
        sequence.blocks += hit
        sequence.num_cached_blocks = len(hit)

    def _touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._num_uses[block]:
                del self._idle[block]
            self._num_uses[block] += 1

    def _take(self, num_blocks: int) -> list[int]:
        """Allocate free blocks; the caller has checked that there are as many."""
        taken = []
        for _ in range(num_blocks):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._evict(block)
            self._num_uses[block] = 1
            taken.append(block)
        return taken

    def _evict(self, block: int) -> None:
        self._forget(block, self._by_key, None)

    def _forget(self, block: int, by_key: dict[Any, list[int]], window: int | None) -> None:
        """Remove a block's key, and record it; removals in a row are one change."""
        key, self._key_of[block] = self._key_of[block], None
        found = by_key[key]
        found.remove(block)
        if not found:
            del by_key[key]
        self.num_evicted += 1
        if not self._notes_changes:
            return
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Removed) and last.window == window:
            last.keys.append(key)
        else:
            self._changes.append(Removed([key], window))
