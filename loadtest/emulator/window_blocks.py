"""The paged KV cache of a model with sliding windows: several KV groups share one pool of blocks.

What must live here: what windows change about `BlockManager`. Groups 0 to n-1 are windows, group n
is full attention, as vLLM numbers Gemma 3's.

Rules (source: vllm/v1/core/{single_type_kv_cache_manager,kv_cache_coordinator}.py, 0.32.0, blocks
of one size, `prefix_cache_retention_interval` 0; tests/fixtures/kv_groups holds recordings):

1. A hit ends where full attention has every block before, and each window its last blocks.
2. A window's blocks are freed as soon as no token to come sees them; they stay findable.
3. Of a prompt a window keeps only the blocks before the last boundary, and before the place up to
   which full attention alone had it (a junction: there a second prompt branched off).
4. An event covers all blocks of a step, and names those that are kept, be it none.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.emulator.block_manager import Block, BlockManager, CachedSequence, HashForm
from router.kv_events.wire import BlockRemoved, BlockStored


class _Windows:
    """What one sequence has in the windows' groups; None stands for a block that is not needed."""

    __slots__ = ("blocks", "junction", "num_tokens")

    def __init__(self, blocks: list[list[Block | None]], junction: int) -> None:
        self.blocks = blocks
        self.junction = junction  # blocks before it
        self.num_tokens = 0  # slots it has


class WindowBlockManager(BlockManager):
    """Blocks of one rank of a model with sliding windows.

    Args:
        window: Tokens, the next one included.
        num_windows: Groups of windows, besides the one of full attention.
    """

    __slots__ = (
        "_by_window",
        "_group_of",
        "_held",
        "_junctions",
        "_need",
        "_num_windows",
        "_window",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        window: int,
        num_windows: int = 1,
        events: bool = True,
        hash_form: HashForm = "int",
    ) -> None:
        super().__init__(num_blocks, block_size, events=events, hash_form=hash_form)
        self._full_group = num_windows
        self._num_windows = num_windows
        self._window = window
        self._need = max(1, -(-(window - 1) // block_size))  # blocks that a hit needs
        self._by_window: list[dict[bytes, dict[int, Block]]] = [{} for _ in range(num_windows)]
        self._group_of: dict[int, int] = {}  # of cached blocks of windows, by id
        self._held: dict[CachedSequence, _Windows] = {}
        self._junctions: dict[CachedSequence, int] = {}  # of those that were matched

    def match(self, sequence: CachedSequence) -> list[Block]:
        hit = super().match(sequence)
        num_blocks = self._reach(sequence.digests, len(hit))
        self._junctions[sequence] = len(hit) if num_blocks < len(hit) else 0
        return hit[:num_blocks]

    def allocate(
        self,
        sequence: CachedSequence,
        num_tokens: int,
        hit: Sequence[Block] = (),
        *,
        whole: bool = False,
    ) -> bool:
        windows = self._held.get(sequence)
        if windows is None:
            windows = _Windows(self._hits(sequence, len(hit)), self._junctions.get(sequence, 0))
            found = [block for blocks in windows.blocks for block in blocks if block is not None]
        else:
            self._leave(sequence, windows, num_tokens)
            found = []
        num_slots = -(-num_tokens // self.block_size)
        num_new = max(0, num_slots - len(windows.blocks[0]))
        num_full = num_slots
        if whole:
            num_full = max(num_full, -(-len(sequence.token_ids) // self.block_size))
        num_needed = max(0, num_full - len(sequence.blocks) - len(hit))
        num_revived = sum(block.ref_cnt == 0 for block in (*hit, *found))
        if num_needed + num_new * self._num_windows + num_revived > self._free.num_blocks:
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

    def free(self, sequence: CachedSequence) -> None:
        self._junctions.pop(sequence, None)
        windows = self._held.pop(sequence, None)
        for blocks in windows.blocks if windows is not None else ():
            self._release(block for block in reversed(blocks) if block is not None)
        super().free(sequence)

    def reset(self) -> bool:
        if not super().reset():
            return False
        self._group_of.clear()
        for by_digest in self._by_window:
            by_digest.clear()
        return True

    # -- what a sequence finds, and what it leaves -------------------------------------------

    def _reach(self, digests: Sequence[bytes], limit: int) -> int:
        """Return the longest hit of at most `limit` blocks from which the windows can go on."""
        in_row = 0
        for position in range(limit - 1, -1, -1):
            if all(digests[position] in by_digest for by_digest in self._by_window):
                in_row += 1
                if in_row == self._need:
                    return position + in_row
            else:
                in_row = 0
        return in_row

    def _hits(self, sequence: CachedSequence, num_blocks: int) -> list[list[Block | None]]:
        """Return the windows' blocks of a hit; nothing stands for those that no token sees."""
        num_skipped = min(self._num_left(num_blocks * self.block_size), num_blocks)
        seen = sequence.digests[num_skipped:num_blocks]
        return [
            [None] * num_skipped + [next(iter(by_digest[digest].values())) for digest in seen]
            for by_digest in self._by_window
        ]

    def _num_left(self, num_computed_tokens: int) -> int:
        """Count the leading blocks that no token after so many sees."""
        return max(0, num_computed_tokens - self._window + 1) // self.block_size

    def _leave(self, sequence: CachedSequence, windows: _Windows, num_tokens: int) -> None:
        """Free what the coming step does not see."""
        is_prefill = windows.num_tokens < sequence.num_prompt_tokens
        computed = windows.num_tokens if is_prefill else num_tokens - 1
        num_left = self._num_left(computed)
        for blocks in windows.blocks:
            left = [block for block in reversed(blocks[:num_left]) if block is not None]
            blocks[:num_left] = [None] * min(num_left, len(blocks))
            self._release(left)

    # -- caching -----------------------------------------------------------------------------

    def _cache(self, sequence: CachedSequence, num_full_blocks: int) -> None:
        start, stop = sequence.num_cached_blocks, min(num_full_blocks, len(sequence.digests))
        windows = self._held[sequence]
        if start < stop:
            kept = self._kept(sequence, windows, start, stop)
            for group, blocks in enumerate(windows.blocks):
                positions = [position for position in kept if blocks[position] is not None]
                for position in positions:
                    self._insert(group, blocks[position], sequence.digests[position])
                if self._notes_events:
                    self._events.append(
                        self._window_stored(sequence, group, start, stop, positions)
                    )
        super()._cache(sequence, num_full_blocks)

    def _kept(
        self, sequence: CachedSequence, windows: _Windows, start: int, stop: int
    ) -> list[int]:
        """List the blocks of [start, stop) that later prompts can need."""
        ends = {(sequence.num_prompt_tokens - 1) // self.block_size, windows.junction}
        kept = {position for end in ends for position in range(end - self._need, end)}
        return sorted(position for position in kept if start <= position < stop)

    def _insert(self, group: int, block: Block | None, digest: bytes) -> None:
        assert block is not None
        block.digest = digest
        self._group_of[block.id] = group
        self._by_window[group].setdefault(digest, {})[block.id] = block

    def _evict(self, block: Block) -> None:
        group = self._group_of.pop(block.id, None)
        if group is None:
            super()._evict(block)
            return
        digest = block.digest
        assert digest is not None
        copies = self._by_window[group][digest]
        del copies[block.id]
        if not copies:
            del self._by_window[group][digest]
        block.digest = None
        if self._notes_events:
            names = [self._external(digest)]
            self._events.append(BlockRemoved(block_hashes=names, medium="GPU", group_idx=group))

    def _window_stored(
        self,
        sequence: CachedSequence,
        group: int,
        start: int,
        stop: int,
        positions: Sequence[int],
    ) -> BlockStored:
        event = self._stored(sequence, start, stop)
        extra = event.extra_keys or []
        event.block_hashes = [self._external(sequence.digests[position]) for position in positions]
        event.extra_keys = [extra[position - start] for position in positions] or None
        event.group_idx = group
        event.kv_cache_spec_kind = "sliding_window"
        event.kv_cache_spec_sliding_window = self._window
        return event
