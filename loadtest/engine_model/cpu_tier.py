"""A replica's CPU tier, block for block as vLLM keeps it: what it stores, evicts and gives back.

What must not live here: how long a read takes, the wire.

Rules (source: vllm/v1/kv_offload/cpu/{manager,policies/lru}.py and vllm/distributed/kv_transfer/
kv_connector/v1/offloading/scheduler.py, 0.32.0, one full-attention group, one block a chunk;
tests/loadtest/engine_model/golden has a recording of vLLM):

1. The full blocks of a prompt are offered in the step that computes them, those of the answer with
   the next prompt (`offload_prompt_only`). What the tier lacks is written, and can be read one step
   later.
2. The least recently used blocks are evicted for them, except blocks that are read or written now,
   and those of the same offer. If too few are left, nothing is written, and the offer is repeated.
3. Writing is a use. The end of a request uses all blocks that it wrote, read or offered, its first
   block last. A look-up is no use.
4. A read begins behind the blocks of the GPU, and has all blocks that follow without a gap. It may
   cover the whole prompt: then the last token is computed again.
5. A request waits while one of its blocks is being written or read for another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from loadtest.engine_model.blocks import KvSequence

_WRITING: Final = -1


class Offloaded(Struct, frozen=True):
    """Blocks were written to the CPU tier, in this order."""

    keys: list[Any]


class Dropped(Struct, frozen=True):
    """Blocks were evicted from the CPU tier, in this order."""

    keys: list[Any]


class TierUse:
    """What one request has had to do with the tier."""

    __slots__ = ("num_offered_blocks", "num_writes", "positions", "read")

    def __init__(self) -> None:
        self.num_offered_blocks = 0
        self.num_writes = 0  # under way
        self.positions: set[int] = set()  # of its blocks that it wrote, read, or found there
        self.read: range | None = None  # under way


class CpuTier:
    """Blocks behind one rank's cache.

    Args:
        num_blocks: At least 1.
        block_size: Tokens in a block.
        notes_changes: Whether `take_changes` returns anything.
    """

    def __init__(self, num_blocks: int, block_size: int, *, notes_changes: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"a CPU tier needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._block_size = block_size
        self._notes_changes = notes_changes
        self._blocks: OrderedDict[Any, int] = OrderedDict()  # reads of each; least used first
        self._num_evictable = 0  # neither read nor written now
        self._uses: dict[KvSequence, TierUse] = {}
        self._offered: list[tuple[TierUse, list[Any]]] = []  # in this step
        self._writing: list[tuple[TierUse, list[Any]]] = []  # since the step before
        self._changes: list[Offloaded | Dropped] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def is_writing(self) -> bool:
        """Whether blocks were offered that cannot be read yet."""
        return bool(self._offered or self._writing)

    def num_leading(self, sequence: KvSequence, num_held_blocks: int) -> int | None:
        """Count the leading blocks that cache and tier have together; None: ask in another step.

        Args:
            sequence: A request that is not running.
            num_held_blocks: Its leading ones that the cache has.
        """
        use = self._use_of(sequence)
        if use.num_writes:
            return None
        num_blocks, waits = num_held_blocks, False
        last = sequence.num_tokens // self._block_size
        for key in sequence.keys[num_held_blocks:last]:
            num_reads = self._blocks.get(key)
            if num_reads is None:
                break
            waits = waits or num_reads != 0
            num_blocks += 1
        return None if waits else num_blocks

    def begin_read(self, sequence: KvSequence, start: int, stop: int) -> None:
        """Begin to read blocks [start, stop) of a request."""
        use = self._use_of(sequence)
        use.read = range(start, stop)
        use.positions.update(use.read)
        use.num_offered_blocks = stop
        for key in sequence.keys[start:stop]:
            self._blocks[key] += 1
        self._num_evictable -= stop - start

    def end_read(self, sequence: KvSequence) -> None:
        """End the read of a request; nothing happens if none is under way."""
        use = self._uses.get(sequence)
        if use is None or use.read is None:
            return
        for key in sequence.keys[use.read.start : use.read.stop]:
            self._blocks[key] -= 1
            self._num_evictable += 1
        use.read = None

    def offer(self, sequence: KvSequence, num_tokens: int) -> None:
        """Offer the blocks of a prompt that a request's first `num_tokens` tokens fill."""
        use = self._use_of(sequence)
        num_tokens = min(num_tokens, sequence.num_prompt_tokens)
        stop = min(num_tokens // self._block_size, len(sequence.keys))
        start = use.num_offered_blocks
        if start >= stop:
            return
        keys, new = sequence.keys, []
        for position in range(start, stop):
            num_reads = self._blocks.get(keys[position])
            if num_reads is None:
                new.append(keys[position])
            if num_reads != _WRITING:
                use.positions.add(position)
        if new:
            if not self._make_room(len(new), keys[start:stop]):
                return
            self._blocks.update(dict.fromkeys(new, _WRITING))
            use.num_writes += 1
            self._offered.append((use, new))
        use.num_offered_blocks = stop

    def finish(self, sequence: KvSequence) -> None:
        """End a request's use of the tier: all its blocks are used now, the first one last."""
        use = self._uses.pop(sequence, None)
        if use is None:
            return
        for position in sorted(use.positions, reverse=True):
            key = sequence.keys[position]
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def end_step(self) -> None:
        """End a step: what was offered in the one before is written."""
        for use, keys in self._writing:
            use.num_writes -= 1
            self._blocks.update(dict.fromkeys(keys, 0))  # their place in the order stays
            self._num_evictable += len(keys)
            if self._notes_changes:
                self._changes.append(Offloaded(keys))
        self._writing, self._offered = self._offered, []

    def reset(self) -> None:
        """Remove all blocks; requests under way offer theirs again."""
        self._blocks.clear()
        self._num_evictable = 0
        self._offered, self._writing = [], []
        for use in self._uses.values():
            use.num_offered_blocks = use.num_writes = 0
            use.read = None

    def take_changes(self) -> list[Offloaded | Dropped]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def keys(self) -> list[Any]:
        """List all blocks, the least recently used first (for tests and inspection)."""
        return list(self._blocks)

    def _use_of(self, sequence: KvSequence) -> TierUse:
        use = self._uses.get(sequence)
        if use is None:
            use = self._uses[sequence] = TierUse()
        return use

    def _make_room(self, num_blocks: int, offered: Iterable[Any]) -> bool:
        """Evict what is needed for so many blocks; False: it is not possible, none was evicted."""
        num_evicted = num_blocks - (self.num_blocks - len(self._blocks))
        if num_evicted <= 0:
            return True
        if num_evicted > self._num_evictable:
            return False
        kept = set(offered)
        free = (key for key, reads in self._blocks.items() if not reads and key not in kept)
        evicted = list(islice(free, num_evicted))
        if len(evicted) < num_evicted:
            return False
        for key in evicted:
            del self._blocks[key]
        self._num_evictable -= num_evicted
        self.num_evicted += num_evicted
        if self._notes_changes:
            self._changes.append(Dropped(evicted))
        return True
