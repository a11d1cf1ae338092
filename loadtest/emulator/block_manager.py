"""The paged KV cache of one data-parallel rank, block for block as vLLM keeps it.

What must live here: which block holds what, who uses it, which is evicted next, and the events
that say so. What must not: scheduling, time, hashing (sequences bring their digests), the wire.

Rules (source: vllm/v1/core/{block_pool,kv_cache_utils,kv_cache_manager}.py, 0.32.0, one
full-attention group; tests/emulator/golden holds a recording of the original; sliding windows
beside it: loadtest.emulator.window_blocks):

1. Block 0 is the null block: never handed out, never cached.
2. The free queue is the eviction order. Freed blocks with a digest go to its end, the tail of a
   sequence first; freed blocks without go to its front.
3. A cached block stays findable while it waits in the free queue; a hit takes it out again.
4. Identical blocks are not merged: each copy is stored, reported and evicted on its own.
5. At least the last token is computed: a hit covers at most (num_tokens - 1) // block_size blocks.
6. With EAGLE or MTP the last block of a hit is dropped, and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from router.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, ExternalHash, KvEvent

HashForm = Literal["int", "bytes"]


class Block:
    """One physical block; `digest` is set while it can be hit."""

    __slots__ = ("digest", "id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, id: int) -> None:
        self.id = id
        self.ref_cnt = 0
        self.digest: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None


class FreeQueue:
    """Free blocks in eviction order: a linked list, so that a hit leaves the middle in O(1)."""

    __slots__ = ("_head", "_tail", "num_blocks")

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        _link(self._head, self._tail)
        self.num_blocks = 0
        self.append(blocks)

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def pop(self, num_blocks: int) -> list[Block]:
        """Take the first `num_blocks`; the caller has checked that there are as many."""
        assert num_blocks <= self.num_blocks
        taken: list[Block] = []
        block = self._head.next_free
        for _ in range(num_blocks):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        _link(self._head, block)
        self.num_blocks -= num_blocks
        return taken

    def remove(self, block: Block) -> None:
        """Take one block out of the middle."""
        assert block.prev_free is not None
        assert block.next_free is not None
        _link(block.prev_free, block.next_free)
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def append(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the end: evicted last."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, self._tail, blocks)

    def prepend(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the front, the first of them first: handed out next."""
        assert self._head.next_free is not None
        self._insert(self._head, self._head.next_free, blocks)

    def _insert(self, before: Block, after: Block, blocks: Sequence[Block]) -> None:
        for block in blocks:
            _link(before, block)
            before = block
        _link(before, after)
        self.num_blocks += len(blocks)


def _link(left: Block, right: Block) -> None:
    left.next_free = right
    right.prev_free = left


class CachedSequence:
    """Tokens of one request, and the blocks that hold them.

    `token_ids` grows while the request decodes; `digests` has one entry per full block of it.
    `event_extra` and `first_event_extra` are the untagged extra keys that events show for every
    and for the first block (adapter name, salt), `session_id` whose request it is.
    """

    __slots__ = (
        "blocks",
        "digests",
        "event_extra",
        "first_event_extra",
        "lora_id",
        "lora_name",
        "num_cached_blocks",
        "num_prompt_blocks",
        "num_prompt_tokens",
        "session_id",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: list[int],
        digests: list[bytes],
        *,
        lora: tuple[int, str] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.digests = digests
        self.blocks: list[Block] = []
        self.num_cached_blocks = 0
        self.num_prompt_blocks = len(digests)  # those that were named when it began
        self.num_prompt_tokens = len(token_ids)
        self.session_id: str | None = None
        self.lora_id: int | None = None if lora is None else lora[0]
        self.lora_name: str | None = None if lora is None else lora[1]
        names: list[Any] = [] if lora is None else [lora[1]]
        self.event_extra: list[Any] | None = names or None
        self.first_event_extra: list[Any] | None = (
            names + ([cache_salt] if cache_salt else [])
        ) or None


class BlockManager:
    """Blocks of one rank: look up, allocate, cache, free.

    Args:
        num_blocks: Physical blocks, the null block among them; at least 2.
        block_size: Tokens in a block.
        events: Whether to note events for `take_events`.
        hash_form: How events name blocks: the digest's low 64 bits, or all its bytes.
        eagle: Whether the last block of a hit is dropped.
        lookahead: Tokens behind a block that its digest covers.
    """

    __slots__ = (
        "_blocks",
        "_by_digest",
        "_eagle",
        "_events",
        "_free",
        "_full_group",
        "_lookahead",
        "_notes_events",
        "_raw_hashes",
        "block_size",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        events: bool = True,
        hash_form: HashForm = "int",
        eagle: bool = False,
        lookahead: int = 0,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"need at least 2 blocks (one is the null block), got {num_blocks}")
        self.block_size = block_size
        self._eagle = eagle
        self._lookahead = lookahead
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeQueue(self._blocks[1:])
        self._by_digest: dict[bytes, Block | dict[int, Block]] = {}
        self._events: list[KvEvent] = []
        self._full_group = 0  # what events call the group of full attention
        self._notes_events = events
        self._raw_hashes = hash_form == "bytes"

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can have: all but the null block."""
        return len(self._blocks) - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use by requests, in [0, 1]; cached free ones are free."""
        return 1.0 - self._free.num_blocks / self.num_usable_blocks

    def match(self, sequence: CachedSequence) -> list[Block]:
        """Find the longest cached prefix, without taking it."""
        limit = (len(sequence.token_ids) - 1) // self.block_size
        hit: list[Block] = []
        lookup = self._by_digest.get
        for digest in sequence.digests[:limit]:
            found = lookup(digest)
            if found is None:
                break
            hit.append(found if isinstance(found, Block) else next(iter(found.values())))
        return hit[:-1] if self._eagle else hit

    def allocate(
        self,
        sequence: CachedSequence,
        num_tokens: int,
        hit: Sequence[Block] = (),
        *,
        whole: bool = False,
    ) -> bool:
        """Allocate slots for the sequence's first `num_tokens` tokens and cache what fills up.

        Args:
            sequence: New (then `hit` is what `match` returned) or already holding blocks.
            num_tokens: Computed tokens plus those of the coming step.
            hit: Cached blocks to start with; only for a sequence without blocks.
            whole: Refuse unless all of the sequence's tokens would fit (vLLM's admission rule).

        Returns:
            False if there are too few free blocks; nothing has changed then.
        """
        size = self.block_size
        num_held = len(sequence.blocks) + len(hit)
        num_new = max(-(-num_tokens // size) - num_held, 0)
        num_revived = sum(block.ref_cnt == 0 for block in hit)
        num_needed = num_new
        if whole:
            num_needed = max(num_needed, -(-len(sequence.token_ids) // size) - num_held)
        if num_needed + num_revived > self._free.num_blocks:
            return False
        if hit:
            self._reuse(sequence, hit)
        if num_new:
            sequence.blocks.extend(self._take(num_new))
        self._cache(sequence, min(num_tokens, len(sequence.token_ids)) // size)
        return True

    def free(self, sequence: CachedSequence) -> None:
        """Free the sequence's blocks; cached ones stay findable until evicted."""
        self._release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_cached_blocks = 0

    def note_pooled(self, sequence: CachedSequence, position: int) -> None:
        """Report a block of the sequence as newly written to the shared pool."""
        if not self._notes_events:
            return
        start = position * self.block_size
        self._events.append(
            BlockStored(
                block_hashes=[self._external(sequence.digests[position])],
                parent_block_hash=(
                    self._external(sequence.digests[position - 1]) if position else None
                ),
                token_ids=sequence.token_ids[start : start + self.block_size],
                block_size=self.block_size,
                medium="cpu",
                group_idx=self._full_group,
            )
        )

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Count the sequence's tokens that others can hit now."""
        return sequence.num_cached_blocks * self.block_size

    def reset(self) -> bool:
        """Forget all cached blocks; refused (False) while any block is in use."""
        if self._free.num_blocks != self.num_usable_blocks:
            return False
        self._by_digest.clear()
        for block in self._blocks:
            block.digest = None
        if self._notes_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KvEvent]:
        """Hand over the events noted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_digests(self) -> dict[bytes, int]:
        """Count the copies of every cached block, by digest (for tests and inspection)."""
        return {
            digest: 1 if isinstance(found, Block) else len(found)
            for digest, found in self._by_digest.items()
        }

    def free_block_ids(self) -> list[int]:
        """List the free blocks in eviction order (for tests and inspection)."""
        return [block.id for block in self._free]

    def _release(self, blocks: Iterable[Block]) -> None:
        """Give up blocks, those first that are to be handed out first."""
        cached: list[Block] = []
        blank: list[Block] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (blank if block.digest is None else cached).append(block)
        self._free.prepend(blank)
        self._free.append(cached)

    def _reuse(self, sequence: CachedSequence, hit: Sequence[Block]) -> None:
        assert not sequence.blocks
        self._touch(hit)
        sequence.blocks.extend(hit)
        sequence.num_cached_blocks = len(hit)

    def _touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def _take(self, num_blocks: int) -> list[Block]:
        taken = self._free.pop(num_blocks)
        for block in taken:
            if block.digest is not None:
                self._evict(block)
            block.ref_cnt = 1
        return taken

    def _evict(self, block: Block) -> None:
        digest = block.digest
        assert digest is not None
        found = self._by_digest.pop(digest)
        if isinstance(found, dict):
            del found[block.id]
            if found:
                self._by_digest[digest] = found
        block.digest = None
        if self._notes_events:
            self._events.append(
                BlockRemoved(
                    block_hashes=[self._external(digest)],
                    medium="GPU",
                    group_idx=self._full_group,
                )
            )

    def _cache(self, sequence: CachedSequence, num_full_blocks: int) -> None:
        """Make blocks [num_cached_blocks, num_full_blocks) findable, reported as one event."""
        start = sequence.num_cached_blocks
        num_full_blocks = min(num_full_blocks, len(sequence.digests))  # none where caching is off
        if start >= num_full_blocks:
            return
        digests = sequence.digests[start:num_full_blocks]
        by_digest = self._by_digest
        for block, digest in zip(sequence.blocks[start:num_full_blocks], digests, strict=True):
            block.digest = digest
            found = by_digest.get(digest)
            if found is None:
                by_digest[digest] = block
            elif isinstance(found, Block):
                by_digest[digest] = {found.id: found, block.id: block}
            else:
                found[block.id] = block
        sequence.num_cached_blocks = num_full_blocks
        if self._notes_events:
            self._events.append(self._stored(sequence, start, num_full_blocks))

    def _stored(self, sequence: CachedSequence, start: int, stop: int) -> BlockStored:
        extra: list[list[Any] | None] = [sequence.event_extra] * (stop - start)
        if start == 0:
            extra[0] = sequence.first_event_extra
        size, ahead = self.block_size, self._lookahead
        ends = range((start + 1) * size, stop * size + 1, size)
        tokens = sequence.token_ids
        return BlockStored(
            block_hashes=[self._external(digest) for digest in sequence.digests[start:stop]],
            parent_block_hash=self._external(sequence.digests[start - 1]) if start else None,
            token_ids=tokens[start * size : stop * size],
            block_size=size,
            lora_id=sequence.lora_id,
            medium="GPU",
            lora_name=sequence.lora_name,
            extra_keys=extra,
            group_idx=self._full_group,
            kv_cache_spec_kind="full_attention",
            session_id=sequence.session_id,
            lookahead_token_ids=[tokens[end : end + ahead] for end in ends] if ahead else None,
        )

    def _external(self, digest: bytes) -> ExternalHash:
        return digest if self._raw_hashes else int.from_bytes(digest[-8:], "big")
