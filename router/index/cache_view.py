"""The caches as requests see them: contract, matches, trust, by candidate.

One object in front of the block index and the event streams. So routing does not depend on whether
a candidate's blocks are known from events, translated, or guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import structs

from policies.view import CandidateId
from router.base.contracts import BlockKey, ExtraKeys, HashContract
from router.index.behind import NOTHING_BEHIND, Behind
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch
from router.index.candidate_stream import (
    Audit,
    CandidateStream,
    Claim,
    StreamReason,
    StreamState,
    recover,
)
from router.index.running import Running

logger = logging.getLogger(__name__)

NOTHING_FOUND: Final[Mapping[CandidateId, BlockMatch]] = MappingProxyType({})

LINGER_S = 1.0
"""How long a finished request's claim waits for its events. vLLM publishes every 0.1 s, and a
replay delays live events as long. The next turn must not find a gap."""


class CacheView:
    """The caches of all candidates, as far as they are known."""

    __slots__ = ("_claims", "_eagles", "_running", "_streams", "audit", "index")

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self._claims: dict[CandidateId, list[Claim]] = {}  # those whose blocks have not all come
        self._eagles: set[CandidateId] = set()  # configured so
        self._running: dict[CandidateId, Running] = {}
        self._streams: dict[CandidateId, CandidateStream] = {}
        self.audit = Audit(index, self._streams)

    def add(self, candidate: CandidateId, stream: CandidateStream, *, eagle: bool = False) -> None:
        """Add a candidate with its stream.

        `eagle`: its engine drops the last block of each hit, unless it hashes ahead.
        """
        (self._eagles.add if eagle else self._eagles.discard)(candidate)
        self.hand_over(candidate, stream)
        self.audit.begin(candidate)

    def hand_over(self, candidate: CandidateId, stream: CandidateStream) -> None:
        """Use another stream from now on; blocks, claims and trust stay."""
        old = self._streams.get(candidate)
        if old is not None:
            old.on_applied = None
        else:
            self.audit.begin(candidate)
        self._streams[candidate] = stream
        stream.on_applied = self._applied
        self._observe_lookahead(candidate)
        self._running.setdefault(candidate, Running())

    def drop(self, candidate: CandidateId) -> None:
        """Remove a candidate and its blocks."""
        self._streams.pop(candidate, None)
        self.audit.remove(candidate)
        self._claims.pop(candidate, None)
        self._running.pop(candidate, None)
        self._eagles.discard(candidate)
        self.index.dropping.discard(candidate)
        self.index.clear(candidate)
        self.index.forget_layout(candidate)

    def stream(self, candidate: CandidateId) -> CandidateStream | None:
        """Return the candidate's event stream."""
        return self._streams.get(candidate)

    def contract(self, candidate: CandidateId) -> HashContract | None:
        """Return how the candidate's blocks are named; None: the candidate is not known."""
        stream = self._streams.get(candidate)
        return None if stream is None else stream.contract

    def by_contract(
        self, candidates: Iterable[CandidateId]
    ) -> dict[HashContract, list[CandidateId]]:
        """Group candidates by how their blocks are named; unknown candidates are left out."""
        groups: dict[HashContract, list[CandidateId]] = {}
        last: HashContract | None = None
        group: list[CandidateId] = []
        for candidate in candidates:
            stream = self._streams.get(candidate)
            if stream is None:
                continue
            contract = stream.contract
            if contract is not last and contract != last:  # mostly all have the same
                last, group = contract, groups.setdefault(contract, [])
            group.append(candidate)
        return groups

    def state(self, candidate: CandidateId, extra: ExtraKeys | None = None) -> StreamState:
        """Return `exact`, `degraded` or `blind`: for prompts with these extra keys, or for all."""
        return self.state_and_reason(candidate, extra)[0]

    def state_and_reason(
        self, candidate: CandidateId, extra: ExtraKeys | None = None
    ) -> tuple[StreamState, str]:
        """Return the stream's state, and why it is not better.

        If reading history again has not helped, it is not exact, whatever the stream says. Nor is
        it if prompts of one kind are not predicted.

        Args:
            extra: Of prompts of some kinds; None: of any.
        """
        stream = self._streams.get(candidate)
        if stream is None:
            return "blind", ""
        state, reason = stream.state_and_reason()
        if state == "exact" and (why := self.audit.why_bad(candidate)) is not None:
            return "degraded", why
        wanted = None if extra is None else extra.kinds
        if state == "exact" and wanted != ():
            unknown = [kind for kind in sorted(stream.unknown) if wanted is None or kind in wanted]
            if unknown:
                return "degraded", f"{StreamReason.EXTRA_KEYS}: {', '.join(unknown)}"
        return state, reason

    def trust(self, candidate: CandidateId) -> float:
        """Return the share of recent predictions that were right, recent ones counting more."""
        return self.audit.trust(candidate)

    def cpu_trust(self, candidate: CandidateId) -> float | None:
        """Return the same for the cpu tier's part; None: it was never audited."""
        return self.audit.cpu_trust(candidate)

    def is_unknown(self, candidate: CandidateId, extra: ExtraKeys) -> bool:
        """Return whether the candidate's blocks of prompts with these extra keys are not found."""
        stream = self._streams.get(candidate)
        return stream is not None and any(kind in stream.unknown for kind in extra.kinds)

    def match(
        self,
        chain: Sequence[BlockKey],
        candidates: Iterable[CandidateId],
        found: Mapping[CandidateId, BlockMatch] = NOTHING_FOUND,
        limit: int | None = None,
    ) -> dict[CandidateId, BlockMatch]:
        """Count the leading blocks of `chain` that each candidate reuses; 0 for suspect ones.

        Args:
            chain: The prompt's full blocks.
            candidates: The ones to look up.
            found: Matches found in Redis, of candidates that are not known completely here.
            limit: Blocks that can be reused at most; None: all.
        """
        matches = self.index.match(chain, candidates, limit)
        if found:
            short = chain[:limit]
            for candidate in found.keys() & matches.keys():
                best = found[candidate]
                stream = self._streams.get(candidate)
                if not best.num_cpu_blocks or (stream is not None and not stream.is_blind):
                    best = _longer(best, matches[candidate])  # a guess does not know evictions
                held = _at_most(best, len(short))
                matches[candidate] = self.index.prolonged(short, candidate, held)
        if self.index.dropping:
            self._drop_last(matches)
        streams = self._streams
        for candidate in [each for each in matches if each in streams and streams[each].is_suspect]:
            matches[candidate] = NO_BLOCKS
        for candidate in self.audit.without_cpu & matches.keys():
            held = matches[candidate]
            matches[candidate] = _at_most(held, held.num_gpu_blocks)
        return matches

    def behind(self, candidate: CandidateId) -> Behind:
        """Return the blocks in a candidate's own cpu tier; none if the tier does not count."""
        num_blocks = self.index.num_blocks(candidate, "cpu")
        if not num_blocks or candidate in self.audit.without_cpu:
            return NOTHING_BEHIND
        return Behind(num_blocks, is_full=self.index.evicts_cpu(candidate))

    def _drop_last(self, matches: dict[CandidateId, BlockMatch]) -> None:
        """Drop the last block of matches if the engine does; several groups have their own rule."""
        index = self.index
        for candidate in index.dropping & matches.keys():
            found = matches[candidate]
            if found is NO_BLOCKS or index.has_groups(candidate):
                continue
            matches[candidate] = BlockMatch(
                max(0, found.num_gpu_blocks - 1),
                max(0, found.num_gpu_stored_blocks - 1),
                max(0, found.num_cpu_blocks - 1),
            )

    def has_room(self, chain: Sequence[BlockKey], candidate: CandidateId, num_tokens: int) -> bool:
        """Return whether a candidate has free blocks for a prompt, besides its running requests.

        If not, the prompt waits in the engine until requests end, and later prompts wait behind it.
        True if that is not known: if the candidate's blocks are guessed, if several KV groups share
        them, or if it has more blocks than its reported capacity.
        """
        index, stream = self.index, self._streams.get(candidate)
        running = self._running.get(candidate)
        if stream is None or not running or stream.is_blind or index.has_groups(candidate):
            return True
        capacity = stream.capacity_blocks - 1  # null block
        if index.num_blocks(candidate) > capacity:
            return True
        num_needed = -(-num_tokens // stream.contract.block_size)
        num_free = capacity - running.num_in_use()
        return num_needed <= num_free or num_needed - running.num_shared(chain) <= num_free

    def claim(
        self,
        candidate: CandidateId,
        keys: Sequence[BlockKey],
        num_held_blocks: int,
        num_tokens: int | None = None,
    ) -> Claim:
        """Claim the chain for a request that is about to be sent: it counts as held from now on.

        `num_tokens`: of the prompt; None: not known, so blocks of other KV groups are not claimed.
        """
        num_in_tiers = self._num_in_tiers(candidate, keys, num_held_blocks, num_tokens)
        new = keys[num_held_blocks:]
        others = () if num_tokens is None else self.index.left_by(candidate, keys, num_tokens)
        computing = (*new, *others) if others else new
        speculation = self.index.speculate(candidate, computing) if new else None
        running = self._running.get(candidate)
        claim = Claim(
            candidate=candidate,
            keys=keys,
            others=others,
            speculation=speculation,
            use=running.begin(keys) if running is not None else None,
            num_held_blocks=num_held_blocks,
            num_tier_blocks=num_in_tiers,
            num_removals=self.index.num_removals(candidate),
            is_new=bool(new) and keys[-1] not in self.index.on_gpu(candidate),
        )
        if speculation is not None:
            self._claims.setdefault(candidate, []).append(claim)
        return claim

    def release(self, claim: Claim, *, computed: bool, now_s: float) -> None:
        """End a request's claim; computed blocks stay claimed until their events are here.

        Blocks that a candidate without events has computed are remembered as a guess.
        """
        stream, running = self._streams.get(claim.candidate), self._running.get(claim.candidate)
        if running is not None and claim.use is not None:
            running.end(claim.use)
        if computed and stream is not None and stream.is_blind:
            keys = (*claim.others, *claim.keys) if claim.others else claim.keys
            self.index.remember(claim.candidate, keys, stream.capacity_blocks)
            computed = False
        if not computed or stream is None:
            claim.end()
        claim.until_s = now_s + LINGER_S

    def expire_claims(self, now_s: float) -> None:
        """End claims whose events have come, and those whose events are overdue."""
        for candidate in list(self._claims):
            self._expire_claims(candidate, now_s)

    def _applied(self, candidate: CandidateId) -> None:
        """End claims as soon as events bring their blocks: from then on the index has them.

        If history is lost, blocks that were reused without an event are added.
        """
        self._observe_lookahead(candidate)
        for claim in self._claims.get(candidate, ()):
            if claim.speculation is not None and self.index.holds(candidate, claim.keys[-1]):
                stream = self._streams[candidate]
                if stream.lacks_history:
                    stream.counters.blocks.num_recovered += recover(self.index, claim)
                claim.end()

    def _observe_lookahead(self, candidate: CandidateId) -> None:
        """Check whether the engine hashes ahead: then it drops no block, whatever is configured."""
        dropping, contract = self.index.dropping, self._streams[candidate].contract
        is_dropping = candidate in self._eagles and not contract.lookahead
        (dropping.add if is_dropping else dropping.discard)(candidate)

    def _expire_claims(self, candidate: CandidateId, now_s: float) -> None:
        waiting = []
        for claim in self._claims.pop(candidate):
            if claim.until_s is not None and now_s >= claim.until_s:
                claim.end()
            if claim.speculation is not None:
                waiting.append(claim)
        if waiting:
            self._claims[candidate] = waiting

    def _num_in_tiers(
        self,
        candidate: CandidateId,
        keys: Sequence[BlockKey],
        num_held_blocks: int,
        num_tokens: int | None,
    ) -> int:
        """Count the leading blocks that an engine can reuse from its GPU and its cpu tier."""
        stream = self._streams.get(candidate)
        if stream is None or num_tokens is None or not self.index.num_blocks(candidate, "cpu"):
            return num_held_blocks
        limit = (num_tokens - 1) // stream.contract.block_size
        found = self.index.match(keys, [candidate], limit)[candidate]
        num_dropped = int(found.num_cpu_blocks > 0 and candidate in self.index.dropping)
        return max(num_held_blocks, found.num_cpu_blocks - num_dropped)


def _longer(one: BlockMatch, other: BlockMatch) -> BlockMatch:
    """Return the longer match on each tier."""
    return BlockMatch(*map(max, structs.astuple(one), structs.astuple(other)))


def _at_most(found: BlockMatch, limit: int) -> BlockMatch:
    """Return a match of at most `limit` blocks."""
    if found.num_cpu_blocks <= limit:
        return found
    return BlockMatch(
        min(found.num_gpu_blocks, limit),
        min(found.num_gpu_stored_blocks, limit),
        limit,
    )
