"""The paged KV cache of a model with sliding windows: several KV groups share one pool of blocks.

What must live here: what windows change about `Blocks`. Groups 0 to n-1 are windows, group n is
full attention, as vLLM numbers Gemma 3's.

Rules (source: vllm/v1/core/{single_type_kv_cache_manager,kv_cache_coordinator}.py, 0.32.0, blocks
of one size, `prefix_cache_retention_interval` 0; tests/fixtures/kv_groups has recordings):

1. A hit ends where full attention has every block before, and each window its last blocks.
2. A window's blocks are freed as soon as no future token sees them; they can still be hit.
3. A window keeps only a prompt's blocks before its last boundary, and before a junction. A junction
   is a place up to which only full attention had the prompt: a second prompt branched off there.
4. An event covers all blocks of a step, and names those that are kept, even if there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.engine_model.blocks import Blocks, KvSequence, Stored


class _Windows:
    """The blocks of one sequence in each window's group; None: the block is not needed."""

    def __init__(self, blocks: list[list[int | None]], junction: int) -> None:
        self.blocks = blocks
        self.junction = junction  # blocks before it
        self.num_tokens = 0  # that have slots


class WindowBlocks(Blocks):
    """Blocks of one rank of a model with sliding windows.

    Args:
        window: Tokens, the next one included.
        num_windows: Groups of windows, besides the group of full attention.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        window: int,
        num_windows: int = 1,
        notes_changes: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, notes_changes=notes_changes)
        self.window = window
        self.num_windows = num_windows
        self._need = max(1, -(-(window - 1) // block_size))  # blocks that a hit needs
        self._by_window: list[dict[Any, list[int]]] = [{} for _ in range(num_windows)]
        self._window_of: dict[int, int] = {}  # of cached blocks of windows
        self._held: dict[KvSequence, _Windows] = {}
        self._junctions: dict[KvSequence, int] = {}  # of sequences that were matched

    def match(self, sequence: KvSequence) -> list[int]:
        hit = super().match(sequence)
        num_blocks = self._reach(sequence.keys, len(hit))
        self._junctions[sequence] = len(hit) if num_blocks < len(hit) else 0
        return hit[:num_blocks]

    def allocate(
        self,
        sequence: KvSequence,
        num_tokens: int,
        hit: Sequence[int] = (),
        *,
        whole: bool = False,
        caches: bool = True,
    ) -> bool:
        assert caches, "windows are not loaded from elsewhere"
        windows = self._held.get(sequence)
        found: list[int] = []
        if windows is None:
            windows = _Windows(self._hits(sequence, len(hit)), self._junctions.get(sequence, 0))
            found = [block for blocks in windows.blocks for block in blocks if block is not None]
        else:
            self._leave(sequence, windows, num_tokens)
        num_slots = -(-num_tokens // self.block_size)
        num_new = max(0, num_slots - len(windows.blocks[0]))
        num_full = num_slots
        if whole:
            num_full = max(num_full, -(-sequence.num_tokens // self.block_size))
        num_needed = max(0, num_full - len(sequence.blocks) - len(hit))
        num_revived = sum(not self._num_uses[block] for block in (*hit, *found))
        if num_needed + num_new * self.num_windows + num_revived > self.num_free_blocks:
            return False
        self._touch(found)
        if hit:  # of all groups before any takes a block: it could be one of another's
            self._reuse(sequence, hit)
        self._held[sequence] = windows
        self._junctions.pop(sequence, None)
        for blocks in windows.blocks:
            blocks.extend(self._take(num_new))
        windows.num_tokens = num_tokens
        allocated = super().allocate(sequence, num_tokens)
        assert allocated
        return True

    def cache(self, sequence: KvSequence, num_tokens: int) -> None:
        start, stop = sequence.num_cached_blocks, self._num_full_blocks(sequence, num_tokens)
        windows = self._held[sequence]
        if start < stop:
            kept = self._kept(sequence, windows, start, stop)
            for number, blocks in enumerate(windows.blocks):
                positions = [position for position in kept if blocks[position] is not None]
                for position in positions:
                    self._insert(number, blocks[position], sequence.keys[position])
                if self._notes_changes:
                    self._changes.append(Stored(sequence, start, stop, positions, number))
        super().cache(sequence, num_tokens)

    def free(self, sequence: KvSequence) -> None:
        self._junctions.pop(sequence, None)
        windows = self._held.pop(sequence, None)
        for blocks in windows.blocks if windows is not None else ():
            self._release(block for block in reversed(blocks) if block is not None)
        super().free(sequence)

    def reset(self) -> bool:
        if not super().reset():
            return False
        self._window_of.clear()
        for by_key in self._by_window:
            by_key.clear()
        return True

    def _reach(self, keys: Sequence[Any], limit: int) -> int:
        """Return the longest hit of at most `limit` blocks from which the windows can go on."""
        in_row = 0
        for position in range(limit - 1, -1, -1):
            if all(keys[position] in by_key for by_key in self._by_window):
                in_row += 1
                if in_row == self._need:
                    return position + in_row
            else:
                in_row = 0
        return in_row

    def _hits(self, sequence: KvSequence, num_blocks: int) -> list[list[int | None]]:
        """Return the windows' blocks of a hit, None for blocks that no token sees."""
        num_skipped = min(self._num_left(num_blocks * self.block_size), num_blocks)
        seen = sequence.keys[num_skipped:num_blocks]
        return [
            [None] * num_skipped + [by_key[key][0] for key in seen] for by_key in self._by_window
        ]

    def _num_left(self, num_computed_tokens: int) -> int:
        """Count the leading blocks that no token after the computed ones sees."""
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def _leave(self, sequence: KvSequence, windows: _Windows, num_tokens: int) -> None:
        """Free the blocks that the next step does not see."""
        is_prefill = windows.num_tokens < sequence.num_prompt_tokens
        computed = windows.num_tokens if is_prefill else num_tokens - 1
        num_left = self._num_left(computed)
        for blocks in windows.blocks:
            left = [block for block in reversed(blocks[:num_left]) if block is not None]
            blocks[:num_left] = [None] * min(num_left, len(blocks))
            self._release(left)

    def _kept(self, sequence: KvSequence, windows: _Windows, start: int, stop: int) -> list[int]:
        """List the blocks of [start, stop) that later prompts can need."""
        ends = {(sequence.num_prompt_tokens - 1) // self.block_size, windows.junction}
        kept = {position for end in ends for position in range(end - self._need, end)}
        return sorted(position for position in kept if start <= position < stop)

    def _insert(self, window: int, block: int | None, key: Any) -> None:
        assert block is not None
        self._key_of[block] = key
        self._window_of[block] = window
        self._by_window[window].setdefault(key, []).append(block)

    def _evict(self, block: int) -> None:
        window = self._window_of.pop(block, None)
        by_key = self._by_key if window is None else self._by_window[window]
        self._forget(block, by_key, window)
