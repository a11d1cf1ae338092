"""The caches as the data path sees them: contract, matches, trust, by candidate.

One object in front of the block index and the event streams, so that routing does not depend on
whether a candidate's blocks are known from its events, translated, or guessed. The audit lives
here: predictions compared with what engines report, and what follows when they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

from policies.view import CandidateId
from router.contracts import BlockKey, HashContract
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch, Speculation
from router.index.candidate_stream import CandidateStream, StreamState
from router.index.eviction import EvictionOrder, FirstLost, Use
from router.index.last_block import LastBlock

NOTHING_FOUND: Final[Mapping[CandidateId, BlockMatch]] = MappingProxyType({})

TRUST_DECAY = 0.98  # half of the weight lies on the last 35 audits
MIN_AUDITS = 20  # nothing is concluded from fewer
SUSPECT_BELOW = 0.6
"""Share of right predictions under which a stream is re-synced. Evictions between decision and
schedule do not count (`was_overtaken`); a lost event costs nearly all of a session's turns."""

LINGER_S = 1.0
"""How long a finished request's claim waits for its events: vLLM's publisher looks every 0.1 s,
and a replay delays live events for as long. The next turn must not find a gap."""


class Claim(Struct, kw_only=True):
    """Blocks that one request will compute at a candidate, until they are there or it failed."""

    candidate: CandidateId
    keys: Sequence[BlockKey]  # the whole chain
    others: Sequence[BlockKey] = ()  # of other KV groups
    speculation: Speculation | None  # over blocks not there yet; None: none, or they came
    use: Use | None = None  # None: of a candidate that is not known
    until_s: float | None = None  # None: its request is under way; else it waits for events


class _Trust(Struct):
    ratio: float = 1.0
    num_audits: int = 0


class _Room(NamedTuple):
    """By what a candidate's room is counted."""

    order: EvictionOrder
    capacity: int  # blocks
    block_size: int


class CacheView:
    """The caches of all candidates, as far as they are known."""

    __slots__ = ("_claims", "_streams", "_trust", "index")

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self._claims: dict[CandidateId, list[Claim]] = {}  # those whose blocks have not all come
        self._streams: dict[CandidateId, CandidateStream] = {}
        self._trust: dict[CandidateId, _Trust] = {}

    def add(
        self, candidate: CandidateId, stream: CandidateStream, last_block: LastBlock | None = None
    ) -> None:
        """Add a candidate, by its stream.

        `last_block`: what is expected of the last block of its hits; None: it is reused.
        """
        self.hand_over(candidate, stream)
        self._trust[candidate] = _Trust()
        self.index.last_blocks.pop(candidate, None)
        if last_block is not None:
            self.index.last_blocks[candidate] = last_block
            self._observe_lookahead(candidate)

    def hand_over(self, candidate: CandidateId, stream: CandidateStream) -> None:
        """Use another stream from now on; blocks, claims and trust stay."""
        old = self._streams.get(candidate)
        if old is not None:
            old.on_applied = None
        self._streams[candidate] = stream
        stream.on_applied = self._applied
        self._observe_lookahead(candidate)
        self._trust.setdefault(candidate, _Trust())
        self.index.orders.setdefault(candidate, EvictionOrder())

    def drop(self, candidate: CandidateId) -> None:
        """Forget a candidate and its blocks."""
        self._streams.pop(candidate, None)
        self._trust.pop(candidate, None)
        self._claims.pop(candidate, None)
        self.index.orders.pop(candidate, None)
        self.index.last_blocks.pop(candidate, None)
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
        """Group candidates by how their blocks are named; those not known at all are left out."""
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

    def state(self, candidate: CandidateId) -> StreamState:
        """Return `exact`, `degraded` or `blind`."""
        stream = self._streams.get(candidate)
        return "blind" if stream is None else stream.state

    def trust(self, candidate: CandidateId) -> float:
        """Return the share of recent predictions that were right, recent ones counting more."""
        trust = self._trust.get(candidate)
        return 1.0 if trust is None else trust.ratio

    def match(
        self,
        chain: Sequence[BlockKey],
        candidates: Iterable[CandidateId],
        found: Mapping[CandidateId, BlockMatch] = NOTHING_FOUND,
        limit: int | None = None,
    ) -> dict[CandidateId, BlockMatch]:
        """Count the leading blocks of `chain` that each candidate reuses; none for suspect ones.

        Args:
            chain: The prompt's full blocks.
            candidates: The ones to look up.
            found: Matches found elsewhere, of candidates whose blocks are not kept here.
            limit: Blocks that can be reused at most; None: all.
        """
        matches = self.index.match(chain, candidates, limit)
        if found:
            short = chain[:limit]
            for candidate in found.keys() & matches.keys():
                held = _at_most(found[candidate], len(short))
                matches[candidate] = self.index.prolonged(short, candidate, held)
        if self.index.last_blocks:
            self._drop_last(matches)
        streams = self._streams
        for candidate in [each for each in matches if each in streams and streams[each].is_suspect]:
            matches[candidate] = NO_BLOCKS
        return matches

    def _drop_last(self, matches: dict[CandidateId, BlockMatch]) -> None:
        """Take the last block off matches where the engine does; several groups have a rule."""
        index = self.index
        for candidate in index.last_blocks.keys() & matches.keys():
            found = matches[candidate]
            if found is NO_BLOCKS or index.has_groups(candidate) or not index.drops_last(candidate):
                continue
            matches[candidate] = BlockMatch(
                max(0, found.num_gpu_blocks - 1),
                max(0, found.num_gpu_stored_blocks - 1),
                max(0, found.num_cpu_blocks - 1),
            )

    def surviving(self, chain: Sequence[BlockKey], candidate: CandidateId, num_blocks: int) -> int:
        """Count the leading blocks that are still there when a request sent now is scheduled.

        `num_blocks`: those that are there now. Those in front of it evict the others.
        """
        num_left = num_blocks
        for num_before, key in self._lost(candidate):
            if num_before < num_left and chain[num_before] == key:
                num_left = num_before
        if num_left < num_blocks and self.index.drops_last(candidate):
            return max(0, num_left - 1)
        return num_left

    def has_room(self, chain: Sequence[BlockKey], candidate: CandidateId, num_tokens: int) -> bool:
        """Return whether a candidate has blocks for a prompt beside the requests that it has.

        If not, its engine has it wait until some of those are over, and with it all that come
        after it. True where that is not known, as in `surviving`.
        """
        known = self._room_of(candidate)
        if known is None or not known.order.num_running:
            return True
        order, capacity, size = known
        num_needed = -(-num_tokens // size)
        num_free = capacity - order.num_in_use() - order.num_open(size)
        return num_needed <= num_free or num_needed - order.num_shared(chain) <= num_free

    def _lost(self, candidate: CandidateId) -> Sequence[FirstLost]:
        """Find what a candidate evicts for the requests that it has.

        It needs room for what it holds, for what is being computed, and for each request's block
        that is not full, or two where its answer comes to the next.
        """
        known = self._room_of(candidate)
        if known is None:
            return ()
        index, (order, capacity, size) = self.index, known
        num_lost = index.num_blocks(candidate) + order.num_running - capacity
        if num_lost + order.num_running + index.num_computing(candidate) <= 0:
            return ()
        held = index.on_gpu(candidate)
        claims = self._claims.get(candidate, ())
        num_lost += order.num_open(size) - order.num_running
        num_lost += sum([c.speculation.num_missing(held) for c in claims if c.speculation])
        return order.lost(num_lost, held) if num_lost > 0 else ()

    def _room_of(self, candidate: CandidateId) -> _Room | None:
        """Find by what a candidate's room is counted; None: it is not known what it gives up.

        Its blocks are guessed, several KV groups share them, or it has more of them than it is said
        to have room for.
        """
        index, stream = self.index, self._streams.get(candidate)
        order = index.orders.get(candidate)
        if stream is None or order is None or stream.is_blind or index.has_groups(candidate):
            return None
        capacity = stream.capacity_blocks - 1  # null block
        if index.num_blocks(candidate) > capacity:
            return None
        return _Room(order, capacity, stream.contract.block_size)

    def claim(
        self,
        candidate: CandidateId,
        keys: Sequence[BlockKey],
        num_held_blocks: int,
        num_tokens: int | None = None,
        *,
        num_cut_blocks: int = 0,
    ) -> Claim:
        """Claim the chain for a request that is about to be sent: it counts as held from now on.

        `num_tokens`: of the prompt; None: not known, what it leaves in other KV groups is not
        claimed. `num_cut_blocks` stand before `keys` in the chain, which are not known.
        """
        new = keys[num_held_blocks:]
        others = () if num_tokens is None else self.index.left_by(candidate, keys, num_tokens)
        computing = (*new, *others) if others else new
        speculation = self.index.speculate(candidate, computing) if new else None
        order = self.index.orders.get(candidate)
        use = None
        if order is not None:
            use = order.begin(keys, self.index.on_gpu(candidate), num_tokens, num_cut_blocks)
        claim = Claim(
            candidate=candidate, keys=keys, others=others, speculation=speculation, use=use
        )
        if speculation is not None:
            self._claims.setdefault(candidate, []).append(claim)
        return claim

    def release(self, claim: Claim, *, computed: bool, now_s: float) -> None:
        """End a request's claim; computed blocks stay claimed until their events are here.

        What a candidate without events has computed is remembered as a guess.
        """
        stream, order = self._streams.get(claim.candidate), self.index.orders.get(claim.candidate)
        if order is not None and claim.use is not None:
            order.end(claim.use, now_s)
        if computed and stream is not None and stream.is_blind:
            keys = (*claim.others, *claim.keys) if claim.others else claim.keys
            self.index.remember(claim.candidate, keys, stream.capacity_blocks)
            computed = False
        if not computed or stream is None:
            _end(claim)
        claim.until_s = now_s + LINGER_S

    def expire_claims(self, now_s: float) -> None:
        """End claims whose events have come, and those whose events are overdue."""
        for candidate in list(self._claims):
            self._expire_claims(candidate, now_s)

    def _applied(self, candidate: CandidateId) -> None:
        """End claims as soon as events bring what they claim: from then on the index holds it."""
        self._observe_lookahead(candidate)
        for claim in self._claims.get(candidate, ()):
            if claim.speculation is not None and self.index.holds(candidate, claim.keys[-1]):
                _end(claim)

    def _observe_lookahead(self, candidate: CandidateId) -> None:
        """Note whether the engine hashes ahead: then it drops no block, whatever is configured."""
        last_block = self.index.last_blocks.get(candidate)
        if last_block is not None:
            last_block.has_lookahead = self._streams[candidate].contract.lookahead > 0

    def _expire_claims(self, candidate: CandidateId, now_s: float) -> None:
        waiting = []
        for claim in self._claims.pop(candidate):
            if claim.until_s is not None and now_s >= claim.until_s:
                _end(claim)
            if claim.speculation is not None:
                waiting.append(claim)
        if waiting:
            self._claims[candidate] = waiting

    def was_overtaken(
        self, claim: Claim, num_reported_tokens: int, num_predicted_tokens: int = 0
    ) -> bool:
        """Return whether a prediction was right when it was made, and an eviction came later.

        The first block that the engine did not have was removed recently, by its events; or, with
        several KV groups, one that the predicted hit needed.
        """
        contract = self.contract(claim.candidate)
        if contract is None:
            return False
        missing = num_reported_tokens // contract.block_size
        if missing >= len(claim.keys):
            return False
        num_blocks = min(num_predicted_tokens // contract.block_size, len(claim.keys))
        needed = self.index.needed_by(claim.candidate, claim.keys, num_blocks)
        num_more = 2 if self.index.drops_last(claim.candidate) else 1  # it dropped one that it had
        return any(
            self.index.was_evicted(claim.candidate, key)
            for key in (*claim.keys[missing : missing + num_more], *needed)
        )

    def audit(
        self, candidate: CandidateId, num_predicted_tokens: int, num_reported_tokens: int
    ) -> LastBlock | None:
        """Note a prediction's outcome; a stream whose predictions fail becomes suspect.

        Returns:
            What is expected of the last block from now on, if that is another thing; else None.
        """
        stream, trust = self._streams.get(candidate), self._trust.get(candidate)
        if stream is None or trust is None:
            return None
        last_block = self.index.last_blocks.get(candidate)
        if last_block is not None:
            layout, size = self.index.groups_of(candidate), stream.contract.block_size
            step = size if layout is None else layout.alignment * layout.unit
            is_mixed = layout is not None and layout.is_mixed
            if last_block.observe(
                num_predicted_tokens, num_reported_tokens, step, is_mixed=is_mixed
            ):
                self._trust[candidate] = _Trust()  # it was not the stream's fault
                return last_block
        right = num_predicted_tokens == num_reported_tokens
        trust.ratio = TRUST_DECAY * trust.ratio + (1 - TRUST_DECAY) * right
        trust.num_audits += 1
        if trust.num_audits >= MIN_AUDITS and trust.ratio < SUSPECT_BELOW:
            if stream.state == "exact":
                stream.mark_suspect(f"only {trust.ratio:.0%} of recent predictions were right")
            self._trust[candidate] = _Trust()
        return None


def _at_most(found: BlockMatch, limit: int) -> BlockMatch:
    """Return a match without what lies behind `limit` blocks."""
    if found.num_cpu_blocks <= limit:
        return found
    return BlockMatch(
        min(found.num_gpu_blocks, limit),
        min(found.num_gpu_stored_blocks, limit),
        limit,
    )


def _end(claim: Claim) -> None:
    if claim.speculation is not None:
        claim.speculation.end()
        claim.speculation = None
