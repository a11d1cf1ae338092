"""Which candidate holds which block on which tier, and how long a prefix each of them has.

What must live here: blocks as keys, copies counted, the bisecting match. What must not: engine
hashes and their contract (rank_stream), tokens, any clock or I/O.

Per (candidate, tier) one plain dict, key -> copies. A set would be wrong: vLLM does not
de-duplicate equal blocks, it stores, and later removes, each copy with an event of its own. A dict
of ints is also invisible to the cyclic collector, and retiring a candidate's epoch is dropping it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

from msgspec import Struct

from policies.view import CandidateId
from router.contracts import BlockKey
from router.index.prefix import Boundary, leading, prolonged

Tier = Literal["gpu", "cpu"]

Copies = dict[BlockKey, int]


class Match(Struct, frozen=True, gc=False):
    """How many leading blocks of a chain one candidate has; 0 <= settled <= gpu <= cpu.

    `num_gpu_blocks` includes what requests in flight there are computing (owned speculation),
    `num_gpu_settled_blocks` does not; `num_cpu_blocks` counts blocks in either tier.
    """

    num_gpu_blocks: int
    num_gpu_settled_blocks: int
    num_cpu_blocks: int


NO_MATCH = Match(0, 0, 0)


class Speculation:
    """The claim that a request is computing these blocks at a candidate right now.

    Given back with `BlockIndex.end`, once; a candidate cleared in between has forgotten it.
    """

    __slots__ = ("_computing", "_keys")

    def __init__(self, computing: Copies, keys: Sequence[BlockKey]) -> None:
        self._computing = computing
        self._keys = keys

    def end(self) -> None:
        """Give the claim back; a second time does nothing."""
        keys, self._keys = self._keys, ()
        _remove(self._computing, keys)


class _Holdings:
    """What one candidate has, in one epoch."""

    __slots__ = ("computing", "cpu", "gpu")

    def __init__(self) -> None:
        self.gpu: Copies = {}
        self.cpu: Copies = {}
        self.computing: Copies = {}


class BlockIndex:
    """Blocks of every candidate of one namespace (model, contract).

    Args:
        max_cpu_blocks: Bound of one candidate's cpu tier, oldest out first: some connectors
            (Mooncake's) announce stores there and never a removal.
    """

    __slots__ = ("_holdings", "_max_cpu_blocks", "_retired")

    def __init__(self, *, max_cpu_blocks: int = 2_000_000) -> None:
        self._holdings: dict[CandidateId, _Holdings] = {}
        self._retired: list[Copies] = []
        self._max_cpu_blocks = max_cpu_blocks

    # -- changes -----------------------------------------------------------------------------

    def store(self, candidate: CandidateId, keys: Iterable[BlockKey], tier: Tier = "gpu") -> None:
        """Add one copy of each block."""
        holdings = self._of(candidate)
        copies = holdings.gpu if tier == "gpu" else holdings.cpu
        get = copies.get
        for key in keys:
            copies[key] = get(key, 0) + 1
        if tier == "cpu" and len(copies) > self._max_cpu_blocks:
            _drop_oldest(copies, len(copies) - self._max_cpu_blocks + self._max_cpu_blocks // 64)

    def remove(self, candidate: CandidateId, keys: Iterable[BlockKey], tier: Tier = "gpu") -> int:
        """Take one copy of each block away; return how many were not there."""
        holdings = self._of(candidate)
        return _remove(holdings.gpu if tier == "gpu" else holdings.cpu, keys)

    def remember(
        self, candidate: CandidateId, keys: Sequence[BlockKey], capacity_blocks: int
    ) -> None:
        """Note a chain that was computed at a candidate that reports nothing (approximation).

        The candidate's gpu tier becomes a guess: least recently used blocks go first, later
        blocks of a chain before earlier ones, as in the engine. O(len(keys)).
        """
        holdings = self._of(candidate)
        guess = holdings.gpu
        if not isinstance(guess, OrderedDict):
            self._retire(guess)
            holdings.gpu = guess = OrderedDict()
        for key in reversed(keys):
            guess[key] = 1
            guess.move_to_end(key)
        while len(guess) > capacity_blocks:
            guess.popitem(last=False)

    def clear(self, candidate: CandidateId) -> None:
        """Begin a new epoch: the candidate has nothing, on no tier, nor is it computing. O(1)."""
        holdings = self._holdings.pop(candidate, None)
        if holdings is not None:
            self._retire(holdings.gpu)
            self._retire(holdings.cpu)

    def begin(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Speculation:
        """Claim that a request begins to compute these blocks; several may claim the same."""
        computing = self._of(candidate).computing
        for key in keys:
            computing[key] = computing.get(key, 0) + 1
        return Speculation(computing, keys)

    def sweep(self, max_blocks: int = 20_000) -> bool:
        """Free some of what was retired; return whether there is more.

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

    def holds(self, candidate: CandidateId, key: BlockKey) -> bool:
        """Tell whether the candidate has the block, on any tier."""
        holdings = self._holdings.get(candidate)
        return holdings is not None and (key in holdings.gpu or key in holdings.cpu)

    def num_blocks(self, candidate: CandidateId, tier: Tier = "gpu") -> int:
        """Count distinct blocks."""
        holdings = self._holdings.get(candidate)
        if holdings is None:
            return 0
        return len(holdings.gpu if tier == "gpu" else holdings.cpu)

    def match(
        self, chain: Sequence[BlockKey], candidates: Iterable[CandidateId]
    ) -> dict[CandidateId, Match]:
        """Count the leading blocks of `chain` that each candidate has.

        Args:
            chain: Block keys, shape (num_blocks,), first block first.
            candidates: Whom to ask.

        Returns:
            Every candidate asked, in the order asked.

        Bisects on prefix closure (who has block n has those before it), tries boundaries that
        other candidates had first, and looks at the last blocks before the boundary it found,
        because closure can break. Read-only; O(k d + d log n) for k candidates with d boundaries.
        """
        matches: dict[CandidateId, Match] = {}
        known: dict[int, Match] = {0: NO_MATCH}
        boundaries: list[Boundary] = []
        for candidate in candidates:
            holdings = self._holdings.get(candidate)
            if holdings is None or not chain:
                matches[candidate] = NO_MATCH
                continue
            settled = leading(chain, holdings.gpu, boundaries)
            if holdings.computing or holdings.cpu:
                matches[candidate] = _with_other_tiers(chain, holdings, settled)
                continue
            match = known.get(settled)
            if match is None:
                match = known[settled] = Match(settled, settled, settled)
            matches[candidate] = match
        return matches

    # -- inside ------------------------------------------------------------------------------

    def _of(self, candidate: CandidateId) -> _Holdings:
        holdings = self._holdings.get(candidate)
        if holdings is None:
            holdings = self._holdings[candidate] = _Holdings()
        return holdings

    def _retire(self, copies: Copies) -> None:
        if copies:
            self._retired.append(copies)


def _with_other_tiers(chain: Sequence[BlockKey], holdings: _Holdings, settled: int) -> Match:
    """Prolong a settled match through what is being computed and through the cpu tier."""
    gpu = prolonged(chain, settled, holdings.computing, holdings.gpu)
    cpu = prolonged(chain, gpu, holdings.cpu, holdings.gpu, holdings.computing)
    return Match(gpu, settled, cpu)


def _remove(copies: Copies, keys: Iterable[BlockKey]) -> int:
    num_missing = 0
    for key in keys:
        count = copies.get(key, 0)
        if count > 1:
            copies[key] = count - 1
        elif count:
            del copies[key]
        else:
            num_missing += 1
    return num_missing


def _drop_oldest(copies: Copies, num_blocks: int) -> None:
    for key in list(islice(copies, num_blocks)):
        del copies[key]
