"""The paged KV cache of one simulated replica: the emulator's, without tokens and digests.

What must live here: which block is held, by whom, which goes next, and what events say. What must
not: scheduling, time, the pool. The rules are those of `loadtest.emulator.block_manager`, and
tests/loadtest/simulator/test_blocks.py holds one against the other, call by call.

A block with a key is a number, its reference count and its key sit in lists, and those that are
free wait in one ordered dict, the next to be evicted first. Free blocks without a key are all
alike and are handed out before any other, so they are only counted: the numbers in `_spare` and
those not used yet. That is a hundred bytes a block, and nothing is walked over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.contracts import BlockKey

NO_KEY = BlockKey(-1)


class Change(NamedTuple):
    """Blocks that became reusable, or are gone, in order; as an engine's event says it."""

    is_stored: bool
    keys: list[BlockKey]


class Held:
    """What one request holds: keys of its full blocks as far as they are named, and the blocks.

    `keys` has the prompt's full blocks first; the reply's are named when they are full.
    """

    __slots__ = ("blocks", "keys", "num_cached_blocks", "num_tokens")

    def __init__(self, keys: list[BlockKey], num_tokens: int) -> None:
        self.keys = keys
        self.num_tokens = num_tokens  # prompt, and the reply as far as it is out
        self.blocks: list[int] = []
        self.num_cached_blocks = 0


class Blocks:
    """Look up, allocate, cache, free.

    Args:
        num_blocks: Physical blocks, the null block among them (as vLLM counts); at least 2.
        block_size: Tokens in a block.
        new_key: Names a block of a reply, that no prompt has.
    """

    __slots__ = (
        "_by_key",
        "_changes",
        "_free",
        "_key_of",
        "_new_key",
        "_num_references",
        "_num_unused",
        "_spare",
        "block_size",
        "num_evicted",
        "num_usable_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int, new_key: Callable[[], BlockKey]) -> None:
        if num_blocks < 2:
            raise ValueError(f"need at least 2 blocks (one is the null block), got {num_blocks}")
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - 1
        self.num_evicted = 0
        self._new_key = new_key
        self._num_unused = num_blocks - 1
        self._spare: list[int] = []  # free, without a key
        self._free: OrderedDict[int, None] = OrderedDict()  # free, with one
        self._key_of: list[BlockKey] = []
        self._num_references: list[int] = []
        self._by_key: dict[BlockKey, int | dict[int, None]] = {}  # one copy, or several
        self._changes: list[Change] = []

    @property
    def num_free_blocks(self) -> int:
        return self._num_unused + len(self._spare) + len(self._free)

    def match(self, sequence: Held) -> list[int]:
        """Find the longest cached prefix, without taking it; the last token is never in it."""
        hit: list[int] = []
        find = self._by_key.get
        for key in sequence.keys[: (sequence.num_tokens - 1) // self.block_size]:
            found = find(key)
            if found is None:
                break
            hit.append(found if type(found) is int else next(iter(found)))  # type: ignore[arg-type]
        return hit

    def allocate(
        self,
        sequence: Held,
        num_tokens: int,
        hit: Sequence[int] = (),
        *,
        whole: bool = False,
        caches: bool = True,
    ) -> bool:
        """Allocate slots for the sequence's first `num_tokens` tokens and cache what fills up.

        Args:
            sequence: New (then `hit` is what `match` returned) or already holding blocks.
            num_tokens: Computed tokens plus those of the coming step.
            hit: Cached blocks to start with; only for a sequence without blocks.
            whole: Refuse unless all of the sequence's tokens would fit (vLLM's admission rule).
            caches: False: blocks are to be loaded first, `cache` follows (delay_cache_blocks).

        Returns:
            False if there are too few free blocks; nothing has changed then.
        """
        size = self.block_size
        blocks, references = sequence.blocks, self._num_references
        num_held = len(blocks) + len(hit)
        num_new = max(-(-num_tokens // size) - num_held, 0)
        num_needed = num_new
        if whole:
            num_needed = max(num_needed, -(-sequence.num_tokens // size) - num_held)
        for block in hit:
            if not references[block]:
                num_needed += 1
        if num_needed > self.num_free_blocks:
            return False
        if hit:
            assert not blocks
            free = self._free
            for block in hit:
                if not references[block]:
                    del free[block]
                references[block] += 1
            blocks.extend(hit)
            sequence.num_cached_blocks = len(hit)
        if num_new:
            self._take(blocks, num_new)
        if caches:
            self.cache(sequence, num_tokens)
        return True

    def cache(self, sequence: Held, num_tokens: int) -> None:
        """Make the sequence's blocks findable that its first `num_tokens` tokens fill."""
        num_full = min(num_tokens, sequence.num_tokens) // self.block_size
        start = sequence.num_cached_blocks
        if start >= num_full:
            return
        keys = sequence.keys
        while len(keys) < num_full:
            keys.append(self._new_key())
        stored = keys[start:num_full]
        by_key, key_of = self._by_key, self._key_of
        for block, key in zip(sequence.blocks[start:num_full], stored, strict=True):
            key_of[block] = key
            found = by_key.setdefault(key, block)
            if found != block:
                if isinstance(found, dict):
                    found[block] = None
                else:
                    by_key[key] = {found: None, block: None}
        sequence.num_cached_blocks = num_full
        self._changes.append(Change(True, stored))

    def free(self, sequence: Held) -> None:
        """Free the sequence's blocks, its tail first; cached ones stay until evicted."""
        references, key_of, free = self._num_references, self._key_of, self._free
        for block in reversed(sequence.blocks):
            references[block] -= 1
            if not references[block]:
                if key_of[block] == NO_KEY:
                    self._spare.append(block)
                else:
                    free[block] = None
        sequence.blocks = []
        sequence.num_cached_blocks = 0

    def take_changes(self) -> list[Change]:
        """Hand over the changes noted since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def cached_keys(self) -> dict[BlockKey, int]:
        """Count the copies of every cached block, by key (for tests and inspection)."""
        return {
            key: 1 if isinstance(found, int) else len(found) for key, found in self._by_key.items()
        }

    def _take(self, blocks: list[int], num_blocks: int) -> None:
        """Hand out blocks: those without a key first, then the least recently used."""
        references, key_of, spare = self._num_references, self._key_of, self._spare
        for _ in range(num_blocks):
            if spare:
                block = spare.pop()
                references[block] = 1
            elif self._num_unused:
                self._num_unused -= 1
                block = len(references)
                references.append(1)
                key_of.append(NO_KEY)
            else:
                block, _ = self._free.popitem(last=False)
                self._evict(block)
                references[block] = 1
            blocks.append(block)

    def _evict(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = NO_KEY
        found = self._by_key.pop(key)
        if isinstance(found, dict):
            del found[block]
            self._by_key[key] = found if len(found) > 1 else next(iter(found))
        self.num_evicted += 1
        if self._changes and not self._changes[-1].is_stored:
            self._changes[-1].keys.append(key)
        else:
            self._changes.append(Change(False, [key]))
