"""Which candidate holds which block on which tier, and how long a prefix each of them has.

What must live here: blocks as keys, counted copies, the bisecting match. What must not: engine
hashes and their contract (router.kv_events), tokens, any clock or I/O.

Each (candidate, tier) has one plain dict, key -> copies (router.index.copies). A new epoch drops
it. Three things change it: an engine's events (`store`, `remove`), deltas and snapshots of another
router that follows the engine (`apply`, `replace`), and guesses (`remember`). Changes can be
recorded for the routers that follow this one (`journal`, router.index.journal).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import count

from msgspec import Struct

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.messages import TierChange
from router.index.copies import (
    MAX_SHORT,
    NO_END,
    TIERS,
    Copies,
    Either,
    PrefixEnd,
    RecentKeys,
    StagedBlocks,
    Tier,
    add,
    drop_oldest,
    leading,
    prolonged,
    remove,
    remove_to,
)
from router.index.hit_length import Chain, KvLayout
from router.index.journal import MAX_PENDING, Changes, Journal, held_change


class BlockMatch(Struct, frozen=True, gc=False):
    """How many leading blocks of a chain one candidate has; 0 <= stored <= gpu <= cpu.

    `num_gpu_blocks` includes blocks that requests in flight there are computing (claims),
    `num_gpu_stored_blocks` does not. `num_cpu_blocks` also counts the cpu tier's blocks after them.
    """

    num_gpu_blocks: int
    num_gpu_stored_blocks: int
    num_cpu_blocks: int


NO_BLOCKS = BlockMatch(0, 0, 0)


class Speculation:
    """The claim that a request is computing these blocks at a candidate now.

    Only its first block is entered at once: a match that reaches it enters the others. Most
    claims end before, which saves 60 us of 280 blocks.

    `end` gives it back. If the candidate was cleared in between, that does nothing.
    """

    __slots__ = ("_holdings", "_keys", "_num_entered")

    def __init__(self, holdings: _Holdings, keys: Sequence[BlockKey], *, min_deferred: int) -> None:
        self._holdings = holdings
        self._keys = keys
        first = keys[0] if keys else None
        other = holdings.deferred.get(first) if first is not None else None
        if other is not None:
            other.enter()
        if (
            first is None
            or other is not None
            or first in holdings.gpu
            or len(keys) < max(2, min_deferred)
        ):
            self._num_entered = len(keys)
        else:
            self._num_entered = 1
            holdings.deferred[first] = self
        add(holdings.computing, keys[: self._num_entered])

    @property
    def num_deferred(self) -> int:
        """Count the blocks that are not entered."""
        return len(self._keys) - self._num_entered

    @property
    def is_partly_stored(self) -> bool:
        """Whether the engine has the first block of a claim that is not entered, not the last."""
        gpu = self._holdings.gpu
        return self._keys[0] in gpu and self._keys[-1] not in gpu

    def enter(self) -> None:
        """Enter all blocks, so that matches find them."""
        if self.num_deferred:
            del self._holdings.deferred[self._keys[0]]
            add(self._holdings.computing, self._keys[self._num_entered :])
            self._num_entered = len(self._keys)

    def end(self) -> None:
        """Release the claim; a second time does nothing."""
        keys, num_entered = self._keys, self._num_entered
        if self.num_deferred:
            del self._holdings.deferred[keys[0]]
        self._keys, self._num_entered = (), 0
        remove(self._holdings.computing, keys[:num_entered])


_epochs = count(1)


class _Holdings:
    """The blocks of one candidate, in one epoch."""

    __slots__ = (
        "computing",
        "cpu",
        "deferred",
        "epoch",
        "evicted",
        "evicts_cpu",
        "gpu",
        "journal",
    )

    def __init__(self, journal: Journal | None) -> None:
        self.epoch = next(_epochs)
        self.gpu: Copies = {}
        self.cpu: Copies = {}
        self.computing: Copies = {}
        self.deferred: dict[BlockKey, Speculation] = {}  # by the one block that is in `computing`
        self.evicts_cpu = False  # its cpu tier was full, and lost blocks
        self.evicted = RecentKeys()
        self.journal = journal  # outlives the epoch

    @property
    def num_computing(self) -> int:
        return len(self.computing) + sum([each.num_deferred for each in self.deferred.values()])

    def enter_all(self) -> None:
        """Enter all claims."""
        for claim in list(self.deferred.values()):
            claim.enter()


class BlockIndex:
    """Blocks of every candidate of one namespace (model, contract).

    Args:
        max_cpu_blocks: Bound of one candidate's cpu tier; the oldest are dropped first. Some
            connectors (Mooncake's) announce stores there and never a removal.
        max_pending: Bound of one candidate's journal, in keys.
        min_deferred: Blocks of a claim from which on it is deferred; see `Speculation`.

    `dropping`: candidates whose engine computes the last block of each hit again (EAGLE, MTP).
    """

    __slots__ = (
        "_holdings",
        "_journals",
        "_layouts",
        "_max_cpu_blocks",
        "_max_pending",
        "_min_deferred",
        "_num_emptied",
        "_retired",
        "dropping",
    )

    def __init__(
        self,
        *,
        max_cpu_blocks: int = 2_000_000,
        max_pending: int = MAX_PENDING,
        min_deferred: int = 8,
    ) -> None:
        self._holdings: dict[CandidateId, _Holdings] = {}
        self._journals: dict[CandidateId, Journal] = {}
        self._layouts: dict[CandidateId, KvLayout | None] = {}
        self.dropping: set[CandidateId] = set()
        self._retired: list[Copies] = []
        self._num_emptied: Counter[CandidateId] = Counter()
        self._max_cpu_blocks = max_cpu_blocks
        self._max_pending = max_pending
        self._min_deferred = min_deferred

    # -- an engine's events ------------------------------------------------------------------

    def store(
        self,
        candidate: CandidateId,
        keys: Sequence[BlockKey],
        tier: Tier = "gpu",
    ) -> None:
        """Add one copy of each block. `keys` must not change later: a journal keeps it."""
        holdings = self._of(candidate)
        copies = holdings.gpu if tier == "gpu" else holdings.cpu
        add(copies, keys)
        if holdings.deferred and tier == "gpu":
            for first in list(filter(holdings.deferred.__contains__, keys)):
                if first in holdings.deferred and holdings.deferred[first].is_partly_stored:
                    holdings.deferred[first].enter()
        if holdings.journal is not None:
            holdings.journal.note(tier, keys)
        if tier == "cpu" and len(copies) > self._max_cpu_blocks:
            num_surplus = len(copies) - self._max_cpu_blocks + self._max_cpu_blocks // 64
            dropped = drop_oldest(copies, num_surplus)
            if holdings.journal is not None:
                holdings.journal.note(tier, dropped)

    def remove(
        self,
        candidate: CandidateId,
        keys: Sequence[BlockKey],
        tier: Tier = "gpu",
        *,
        num_left: Sequence[int | None] | None = None,
    ) -> int:
        """Remove one copy of each block; return how many were not there. See `store` for `keys`.

        Args:
            candidate: That lost them.
            keys: The blocks.
            tier: That lost them.
            num_left: How many copies of each the engine has left; None: it does not say.
        """
        holdings = self._of(candidate)
        copies = holdings.gpu if tier == "gpu" else holdings.cpu
        holdings.evicted.add(keys)
        holdings.evicts_cpu |= tier == "cpu"
        lowered: set[BlockKey] = set()
        if num_left is not None:
            num_missing = remove_to(copies, keys, num_left, lowered)
        else:
            num_missing = remove(copies, keys, lowered)
        if holdings.journal is not None:
            holdings.journal.note(tier, keys)
            holdings.journal.lower(tier, lowered)
        return num_missing

    def clear(self, candidate: CandidateId) -> None:
        """Begin a new epoch: the candidate has no blocks and computes none. O(1)."""
        holdings = self._holdings.pop(candidate, None)
        if holdings is not None:
            self._retire(holdings.gpu)
            self._retire(holdings.cpu)
        journal = self._journals.get(candidate)
        if journal is not None:
            journal.clear()

    def lay_out(self, candidate: CandidateId, layout: KvLayout | None) -> None:
        """Set the KV groups of a candidate that has several; their keys are the layout's.

        None: the engine's rule for them is not known, so none of its blocks count.
        """
        self._layouts[candidate] = layout

    def forget_layout(self, candidate: CandidateId) -> None:
        """Treat the candidate as one with a single group of full attention again."""
        self._layouts.pop(candidate, None)

    # -- blocks loaded from Redis ------------------------------------------------------------

    def replace(self, candidate: CandidateId, staged: StagedBlocks) -> None:
        """Swap in the loaded blocks, and leave `staged` empty. O(1).

        Claims stay: the epoch is the same, only better known.
        """
        holdings = self._of(candidate)
        self._retire(holdings.gpu)
        self._retire(holdings.cpu)
        holdings.enter_all()
        copies = staged.take()
        holdings.gpu, holdings.cpu = copies["gpu"], copies["cpu"]
        self.discard(staged)
        if holdings.journal is not None:
            holdings.journal.lose()

    def discard(self, staged: StagedBlocks) -> None:
        """Drop the loaded blocks; `sweep` frees them in slices."""
        for copies in staged.take().values():
            self._retire(copies)

    # -- changes, to be written to Redis -----------------------------------------------------

    def journal(self, candidate: CandidateId, on: bool) -> None:
        """Begin or end to record changes; blocks that are held already are not recorded."""
        journal = Journal(max_pending=self._max_pending) if on else None
        if journal is not None:
            self._journals[candidate] = journal
        else:
            self._journals.pop(candidate, None)
        holdings = self._holdings.get(candidate)
        if holdings is not None:
            holdings.journal = journal

    def num_pending(self, candidate: CandidateId) -> int:
        """Count the keys recorded and not taken yet, with repetitions."""
        journal = self._journals.get(candidate)
        return 0 if journal is None else journal.num_pending

    def take_changes(self, candidate: CandidateId, max_blocks: int = 65_536) -> Changes | None:
        """Remove and return the changes since the last call; None: there are none, or no journal.

        Takes 0.2 us a block. See router.index.journal for what the owner must know.
        """
        journal = self._journals.get(candidate)
        if journal is None:
            return None
        return journal.take(self.held(candidate), max_blocks)

    def note_again(self, candidate: CandidateId, changes: Iterable[TierChange]) -> None:
        """Record changes again that could not be published: the stored blocks are pending again."""
        journal = self._journals.get(candidate)
        if journal is None:
            return
        for change in changes:
            if change.tier != "pool" and change.stored:
                journal.note_again(change)

    def contents(self, candidate: CandidateId, max_blocks: int = 65_536) -> Iterator[TierChange]:
        """Yield all blocks of a candidate in slices, while it goes on changing.

        Each slice is true when it is yielded. If a journal was on before the first slice, slices
        and changes in the order of their taking add up to the contents. A guess is left out. Lists
        the keys first, which takes 10 ms for a million.
        """
        for tier in TIERS:
            held = self.held(candidate)[tier]
            keys = [] if isinstance(held, OrderedDict) else list(held)
            for start in range(0, len(keys), max_blocks):
                held = self.held(candidate)[tier]
                yield held_change(tier, keys[start : start + max_blocks], held)

    # -- guesses and claims ------------------------------------------------------------------

    def remember(
        self, candidate: CandidateId, keys: Sequence[BlockKey], capacity_blocks: int
    ) -> None:
        """Record a chain computed at a candidate that reports nothing (approximation).

        The candidate's gpu tier becomes a guess. The least recently used blocks are dropped first,
        later blocks of a chain before earlier ones, as in the engine. O(len(keys)).
        """
        holdings = self._of(candidate)
        holdings.enter_all()
        guess = holdings.gpu
        if not isinstance(guess, OrderedDict):
            self._retire(guess)
            holdings.gpu = guess = OrderedDict()
        for key in reversed(keys):
            guess[key] = 1
            guess.move_to_end(key)
        while len(guess) > capacity_blocks:
            guess.popitem(last=False)

    def speculate(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Speculation:
        """Claim blocks that a request will compute there; several requests may claim the same."""
        return Speculation(self._of(candidate), keys, min_deferred=self._min_deferred)

    def sweep(self, max_blocks: int = 20_000) -> bool:
        """Free some retired blocks; return whether there are more.

        Freeing a dict of a million blocks at once takes 40 ms, a slice of 20,000 takes 1 ms.
        """
        while self._retired and max_blocks > 0:
            copies = self._retired[-1]
            num_freed = min(max_blocks, len(copies))
            for _ in range(num_freed):
                copies.popitem()
            max_blocks -= num_freed
            if not copies:
                self._retired.pop()
        return bool(self._retired)

    # -- questions ---------------------------------------------------------------------------

    def missing(
        self, candidate: CandidateId, keys: Sequence[BlockKey], tier: Tier
    ) -> list[BlockKey]:
        """Return the blocks that the candidate does not hold on a tier."""
        held = self.held(candidate)[tier]
        return [key for key in keys if key not in held]

    def held(self, candidate: CandidateId) -> dict[Tier, Copies]:
        """Return the blocks that the candidate has on each tier; live views."""
        holdings = self._holdings.get(candidate)
        if holdings is None:
            return {tier: {} for tier in TIERS}
        return {"gpu": holdings.gpu, "cpu": holdings.cpu}

    def holds(self, candidate: CandidateId, key: BlockKey) -> bool:
        """Return whether the candidate has the block, on any tier."""
        holdings = self._holdings.get(candidate)
        return holdings is not None and (key in holdings.gpu or key in holdings.cpu)

    def epoch(self, candidate: CandidateId) -> int:
        """Return the number of the candidate's epoch, another after a clear; 0 without blocks."""
        holdings = self._holdings.get(candidate)
        return holdings.epoch if holdings is not None else 0

    def emptied(self, candidate: CandidateId) -> None:
        """Count that the candidate lost all of its blocks, by a restart or a reset."""
        self._num_emptied[candidate] += 1

    def num_emptied(self, candidate: CandidateId) -> int:
        """Count how often that was; an epoch may also begin because events were missed."""
        return self._num_emptied[candidate]

    def claimed(self) -> dict[CandidateId, int]:
        """Count the claimed blocks of each candidate that has any."""
        every = ((each, holdings.num_computing) for each, holdings in self._holdings.items())
        return {candidate: num_blocks for candidate, num_blocks in every if num_blocks}

    def on_gpu(self, candidate: CandidateId) -> Container[BlockKey]:
        """Return the blocks that the candidate has on its GPU; a live view."""
        holdings = self._holdings.get(candidate)
        return holdings.gpu if holdings is not None else ()

    def num_removals(self, candidate: CandidateId) -> int:
        """Count the removals at the candidate in this epoch; for `was_evicted`."""
        holdings = self._holdings.get(candidate)
        return holdings.evicted.num_added if holdings is not None else 0

    def was_evicted(self, candidate: CandidateId, key: BlockKey, num_removals: int = 0) -> bool:
        """Return whether the candidate lost the block recently, even if it has it again.

        `num_removals`: earlier removals do not count.
        """
        holdings = self._holdings.get(candidate)
        return holdings is not None and holdings.evicted.since(key, num_removals)

    def evicted_s(self, candidate: CandidateId, key: BlockKey) -> float | None:
        """Return when the candidate last lost the block, monotonic; None: not recently."""
        holdings = self._holdings.get(candidate)
        return holdings.evicted.added_s(key) if holdings is not None else None

    def has_groups(self, candidate: CandidateId) -> bool:
        """Return whether the candidate has several KV groups."""
        return candidate in self._layouts

    def groups_of(self, candidate: CandidateId) -> KvLayout | None:
        """Return the candidate's KV groups; None: it has one, or they are not understood."""
        layout = self._layouts.get(candidate)
        drops_last = candidate in self.dropping
        if layout is not None and layout.drops_last is not drops_last:
            layout = KvLayout(layout.groups, layout.unit, drops_last=drops_last)
            self._layouts[candidate] = layout
        return layout

    def left_by(
        self, candidate: CandidateId, chain: Sequence[BlockKey], num_tokens: int
    ) -> Sequence[BlockKey]:
        """List the blocks of other KV groups that a prompt leaves, besides its chain."""
        layout = self.groups_of(candidate) if self._layouts else None
        return layout.kept(chain, num_tokens) if layout is not None else ()

    def needed_by(
        self, candidate: CandidateId, chain: Sequence[BlockKey], num_blocks: int
    ) -> Sequence[BlockKey]:
        """List the blocks of other KV groups that a hit of this length needs."""
        layout = self.groups_of(candidate) if self._layouts else None
        return layout.needed(chain, num_blocks) if layout is not None else ()

    def num_blocks(self, candidate: CandidateId, tier: Tier = "gpu") -> int:
        """Count distinct blocks, in each KV group that has them."""
        holdings = self._holdings.get(candidate)
        if holdings is None:
            return 0
        return len(holdings.gpu if tier == "gpu" else holdings.cpu)

    def evicts_cpu(self, candidate: CandidateId) -> bool:
        """Return whether the candidate's cpu tier has lost blocks in this epoch: it is full."""
        holdings = self._holdings.get(candidate)
        return holdings is not None and holdings.evicts_cpu

    def match(
        self,
        chain: Sequence[BlockKey],
        candidates: Iterable[CandidateId],
        limit: int | None = None,
    ) -> dict[CandidateId, BlockMatch]:
        """Count the leading blocks of `chain` that each candidate's engine would reuse.

        Args:
            chain: Block keys, shape (num_blocks,), first block first.
            candidates: The ones to look up.
            limit: Blocks that can be reused; a later one can prove a hit. None: all.

        Returns:
            Every candidate asked, in the order asked.

        Bisects on prefix closure: a candidate with block n has the blocks before it. It tries the
        ends of other candidates first. It checks the last blocks before the end that it found,
        because closure can break. Read-only; O(k d + d log n) for k candidates with d different
        ends. Candidates with several KV groups are matched one by one, by the engine's rule.
        """
        limit = len(chain) if limit is None else min(limit, len(chain))
        short = chain if limit == len(chain) else chain[:limit]
        if not self._layouts:
            return self._match(short, candidates)
        asked = list(candidates)
        found = self._match(short, [cid for cid in asked if cid not in self._layouts])
        units = Chain(chain)
        return {
            cid: found[cid] if cid in found else self._match_groups(units, cid, limit)
            for cid in asked
        }

    def _match_groups(self, chain: Chain, candidate: CandidateId, limit: int) -> BlockMatch:
        layout, holdings = self.groups_of(candidate), self._holdings.get(candidate)
        if layout is None or holdings is None or not limit:
            return NO_BLOCKS
        gpu = stored = layout.hit(chain, holdings.gpu, limit)
        if holdings.computing:
            holdings.enter_all()
            gpu = max(gpu, layout.hit(chain, Either(holdings.gpu, holdings.computing), limit))
        return BlockMatch(gpu, stored, gpu)  # which groups the cpu tier has is not known

    def _match(
        self, chain: Sequence[BlockKey], candidates: Iterable[CandidateId]
    ) -> dict[CandidateId, BlockMatch]:
        if not chain:
            return dict.fromkeys(candidates, NO_BLOCKS)
        matches: dict[CandidateId, BlockMatch] = {}
        known: dict[int, BlockMatch] = {0: NO_BLOCKS}
        ends: list[PrefixEnd] = []
        end, first, holdings_of = NO_END, chain[0], self._holdings.get
        num_blocks, last, following, before_last, before_that = end
        short: Sequence[BlockKey] = ()
        for candidate in candidates:
            holdings = holdings_of(candidate)
            if holdings is None:
                matches[candidate] = NO_BLOCKS
                continue
            gpu = holdings.gpu
            if (  # the usual case: the result of `leading` in half the time
                last in gpu
                and following not in gpu
                and before_last in gpu
                and before_that in gpu
                and first in gpu
                and (not short or all(map(gpu.__contains__, short)))
            ):
                stored = num_blocks
            else:
                stored = leading(chain, gpu, ends)
                if ends and ends[0] is not end:
                    end = ends[0]
                    num_blocks, last, following, before_last, before_that = end
                    short = chain[:num_blocks] if num_blocks <= MAX_SHORT else ()
            if holdings.computing or holdings.cpu:
                next_key = chain[stored] if stored < len(chain) else None
                if next_key in holdings.computing or next_key in holdings.cpu:
                    matches[candidate] = _with_other_tiers(chain, holdings, stored)
                    continue
            match = known.get(stored)
            if match is None:
                match = known[stored] = BlockMatch(stored, stored, stored)
            matches[candidate] = match
        return matches

    def prolonged(
        self, chain: Sequence[BlockKey], candidate: CandidateId, found: BlockMatch
    ) -> BlockMatch:
        """Extend a match found elsewhere by the blocks that requests in flight are computing."""
        holdings = self._holdings.get(candidate)
        if candidate in self._layouts:
            return NO_BLOCKS  # found in one of several groups
        if holdings is None or not holdings.computing:
            return found
        gpu = _with_claims(chain, holdings, found.num_gpu_blocks)
        return BlockMatch(gpu, found.num_gpu_stored_blocks, max(gpu, found.num_cpu_blocks))

    # -- inside ------------------------------------------------------------------------------

    def _of(self, candidate: CandidateId) -> _Holdings:
        holdings = self._holdings.get(candidate)
        if holdings is None:
            holdings = _Holdings(self._journals.get(candidate))
            self._holdings[candidate] = holdings
        return holdings

    def _retire(self, copies: Copies) -> None:
        if copies:
            self._retired.append(copies)


def _with_claims(chain: Sequence[BlockKey], holdings: _Holdings, start: int) -> int:
    """Count leading blocks with those that are being computed; the first `start` are held."""
    deferred = holdings.deferred
    seen, end = start, start
    while deferred:
        found = list(filter(deferred.__contains__, chain[seen : end + 1]))
        for key in found:
            deferred[key].enter()
        seen, end = end, prolonged(chain, start, holdings.computing, holdings.gpu)
        if not found and end == seen:
            return end
    return prolonged(chain, start, holdings.computing, holdings.gpu)


def _with_other_tiers(chain: Sequence[BlockKey], holdings: _Holdings, stored: int) -> BlockMatch:
    """Extend a stored match by blocks that are being computed, then by the cpu tier.

    After the blocks of its GPU, an engine reads all from the cpu tier, or none.
    """
    gpu = _with_claims(chain, holdings, stored)
    cpu = prolonged(chain, gpu, holdings.cpu)
    return BlockMatch(gpu, stored, cpu)
