"""The caches as the data path sees them: contract, matches, trust, by candidate.

One object in front of the block index and the event streams, so that routing does not depend on
whether a candidate's blocks are known from its events, translated, or guessed. The audit lives
here: predictions compared with what engines report, and what follows when they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct, structs

from policies.view import CandidateId
from router.contracts import BlockKey, ExtraKeys, HashContract
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch, Speculation
from router.index.candidate_stream import CandidateStream, StreamReason, StreamState
from router.index.eviction import EvictionOrder, FirstLost, Use
from router.index.last_block import LastBlock
from router.index.trust import Trust

logger = logging.getLogger(__name__)

NOTHING_FOUND: Final[Mapping[CandidateId, BlockMatch]] = MappingProxyType({})

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
    num_held_blocks: int = 0  # on the GPU when it was made, those being computed among them
    num_tier_blocks: int = 0  # with what the cpu tier adds, whether that is counted on or not
    num_removals: int = 0  # of the candidate, before it was made


class _Room(NamedTuple):
    """By what a candidate's room is counted."""

    order: EvictionOrder
    capacity: int  # blocks
    block_size: int


class CacheView:
    """The caches of all candidates, as far as they are known."""

    __slots__ = ("_claims", "_streams", "_trust", "_without_cpu", "index")

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self._claims: dict[CandidateId, list[Claim]] = {}  # those whose blocks have not all come
        self._streams: dict[CandidateId, CandidateStream] = {}
        self._trust: dict[CandidateId, Trust] = {}
        self._without_cpu: set[CandidateId] = set()  # those whose cpu tier does not count

    def add(
        self, candidate: CandidateId, stream: CandidateStream, last_block: LastBlock | None = None
    ) -> None:
        """Add a candidate, by its stream.

        `last_block`: what is expected of the last block of its hits; None: it is reused.
        """
        self.hand_over(candidate, stream)
        self._trust[candidate] = Trust()
        self._without_cpu.discard(candidate)
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
        self._trust.setdefault(candidate, Trust())
        self.index.orders.setdefault(candidate, EvictionOrder())

    def drop(self, candidate: CandidateId) -> None:
        """Forget a candidate and its blocks."""
        self._streams.pop(candidate, None)
        self._trust.pop(candidate, None)
        self._without_cpu.discard(candidate)
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
        return self.state_and_reason(candidate)[0]

    def state_and_reason(self, candidate: CandidateId) -> tuple[StreamState, str]:
        """Return the stream's state, and why it is none better.

        Where reading history again has not helped, it is not exact, whatever the stream says.
        """
        stream, trust = self._streams.get(candidate), self._trust.get(candidate)
        if stream is None:
            return "blind", ""
        state, reason = stream.state_and_reason()
        if state == "exact" and trust is not None and trust.gpu.is_bad:
            return "degraded", _only(trust.gpu.ratio)
        return state, reason

    def trust(self, candidate: CandidateId) -> float:
        """Return the share of recent predictions that were right, recent ones counting more."""
        trust = self._trust.get(candidate)
        return 1.0 if trust is None else trust.gpu.ratio

    def is_unknown(self, candidate: CandidateId, extra: ExtraKeys) -> bool:
        """Return whether the candidate's blocks of prompts with these extra keys are not found."""
        stream = self._streams.get(candidate)
        return stream is not None and any(kind in stream.unknown for kind in extra.kinds)

    def cpu_trust(self, candidate: CandidateId) -> float | None:
        """Return the same of what the cpu tier adds; None: nothing was seen of it."""
        trust = self._trust.get(candidate)
        return trust.cpu.ratio if trust is not None and trust.cpu.num_audits else None

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
        if self.index.last_blocks:
            self._drop_last(matches)
        streams = self._streams
        for candidate in [each for each in matches if each in streams and streams[each].is_suspect]:
            matches[candidate] = NO_BLOCKS
        for candidate in self._without_cpu & matches.keys():
            held = matches[candidate]
            matches[candidate] = _at_most(held, held.num_gpu_blocks)
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

    def unbroken(self, chain: Sequence[BlockKey], candidate: CandidateId, num_blocks: int) -> int:
        """Count the leading blocks of a match that are there without a gap."""
        num_left = self.index.unbroken(candidate, chain, num_blocks)
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
        num_in_tiers = self._num_in_tiers(candidate, keys, num_held_blocks, num_tokens)
        new = keys[num_held_blocks:]
        others = () if num_tokens is None else self.index.left_by(candidate, keys, num_tokens)
        computing = (*new, *others) if others else new
        speculation = self.index.speculate(candidate, computing) if new else None
        order = self.index.orders.get(candidate)
        use = None
        if order is not None:
            use = order.begin(keys, self.index.on_gpu(candidate), num_tokens, num_cut_blocks)
        claim = Claim(
            candidate=candidate,
            keys=keys,
            others=others,
            speculation=speculation,
            use=use,
            num_held_blocks=num_held_blocks,
            num_tier_blocks=num_in_tiers,
            num_removals=self.index.num_removals(candidate),
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

    def _num_in_tiers(
        self,
        candidate: CandidateId,
        keys: Sequence[BlockKey],
        num_held_blocks: int,
        num_tokens: int | None,
    ) -> int:
        """Count the leading blocks that an engine can reuse of its GPU and of its cpu tier."""
        stream = self._streams.get(candidate)
        if stream is None or num_tokens is None or not self.index.num_blocks(candidate, "cpu"):
            return num_held_blocks
        limit = (num_tokens - 1) // stream.contract.block_size
        found = self.index.match(keys, [candidate], limit)[candidate]
        num_dropped = int(found.num_cpu_blocks > 0 and self.index.drops_last(candidate))
        return max(num_held_blocks, found.num_cpu_blocks - num_dropped)

    def was_overtaken(
        self, claim: Claim, num_reported_tokens: int, num_predicted_tokens: int = 0
    ) -> bool:
        """Return whether a prediction was right when it was made, and an eviction came later.

        The first block that the engine did not have was removed since, by its events; or, with
        several KV groups, one that the predicted hit needed.
        """
        index, candidate = self.index, claim.candidate
        return any(
            index.was_evicted(candidate, key, claim.num_removals)
            for key in self._missing(claim, num_reported_tokens, num_predicted_tokens)
        )

    def _missing(self, claim: Claim, num_reported: int, num_predicted: int) -> Iterable[BlockKey]:
        """Name blocks of which the engine lacked one, if it reused less than predicted."""
        contract = self.contract(claim.candidate)
        if contract is None:
            return ()
        missing = num_reported // contract.block_size
        if missing >= len(claim.keys):
            return ()
        num_blocks = min(num_predicted // contract.block_size, len(claim.keys))
        needed = self.index.needed_by(claim.candidate, claim.keys, num_blocks)
        num_more = 2 if self.index.drops_last(claim.candidate) else 1  # it dropped one that it had
        return (*claim.keys[missing : missing + num_more], *needed)

    def audit(
        self,
        candidate: CandidateId,
        num_predicted_tokens: int,
        num_reported_tokens: int,
        claim: Claim | None = None,
        *,
        num_cpu_tokens: int = 0,
    ) -> LastBlock | None:
        """Note a prediction's outcome; what it rests on is charged if it was wrong.

        Args:
            candidate: The one that answered.
            num_predicted_tokens: Of all tiers.
            num_reported_tokens: By its engine.
            claim: Of the request; None: not known, it is all the GPU's.
            num_cpu_tokens: What the prediction counted of the cpu tier.

        Returns:
            What is expected of the last block from now on, if that is another thing; else None.
        """
        stream, trust = self._streams.get(candidate), self._trust.get(candidate)
        if stream is None or trust is None:
            return None
        if claim is not None:
            size = stream.contract.block_size
            num_gpu_tokens = claim.num_held_blocks * size
            num_tier_tokens = max(claim.num_tier_blocks * size, num_gpu_tokens + num_cpu_tokens)
            if num_tier_tokens > num_gpu_tokens:
                self._audit_cpu(candidate, trust, num_tier_tokens == num_reported_tokens)
                if num_reported_tokens >= num_gpu_tokens:
                    return None  # what the GPU has is as predicted
        last_block = self.index.last_blocks.get(candidate)
        if last_block is not None:
            layout, size = self.index.groups_of(candidate), stream.contract.block_size
            step = size if layout is None else layout.alignment * layout.unit
            is_mixed = layout is not None and layout.is_mixed
            if last_block.observe(
                num_predicted_tokens, num_reported_tokens, step, is_mixed=is_mixed
            ):
                trust.forgive()  # it was not the stream's fault
                return last_block
        if claim is not None and self._is_by_copies(
            claim, stream, num_predicted_tokens, num_reported_tokens
        ):
            if trust.observe_copies():
                is_all = stream.removes_all_copies
                reason = StreamReason.EACH_COPY if is_all else StreamReason.ALL_COPIES
                stream.mark_suspect(reason)
                trust.forgive()
                return None
        elif num_predicted_tokens > num_reported_tokens:
            self.index.walk(candidate)
        if trust.observe_gpu(num_predicted_tokens == num_reported_tokens):
            was_read = stream.state == "exact"
            if was_read:
                stream.mark_suspect(_only(trust.gpu.ratio))
            trust.forgive(was_read=was_read)
        return None

    def _audit_cpu(self, candidate: CandidateId, trust: Trust, right: bool) -> None:
        """Note whether the cpu tier added what it was said to hold."""
        if not trust.observe_cpu(right):
            return
        fields = {"candidate": candidate, "right": round(trust.cpu.ratio, 2)}
        if trust.counts_cpu:
            self._without_cpu.discard(candidate)
            logger.info("its cpu tier counts again: it holds what it announced", extra=fields)
        else:
            self._without_cpu.add(candidate)
            text = "its cpu tier does not count any more: less was read from it than it announced"
            logger.warning(text, extra=fields)

    def _is_by_copies(
        self, claim: Claim, stream: CandidateStream, num_predicted: int, num_reported: int
    ) -> bool:
        """Return whether counting copies the other way explains an answer.

        The engine lacked a block of which copies were left by our count, though it had removed it;
        or it had one of which one removal stood for all copies.
        """
        index, candidate = self.index, claim.candidate
        if not stream.removes_all_copies:
            if num_predicted <= num_reported:
                return False
            missing = self._missing(claim, num_reported, num_predicted)
            return any(index.has_left_copies(candidate, key) for key in missing)
        first = num_predicted // stream.contract.block_size
        if num_predicted >= num_reported or first >= len(claim.keys):
            return False
        return index.was_evicted(candidate, claim.keys[first])


def _only(ratio: float) -> str:
    return f"only {ratio:.0%} of recent predictions were right"


def _longer(one: BlockMatch, other: BlockMatch) -> BlockMatch:
    """Return the longer match on each tier."""
    return BlockMatch(*map(max, structs.astuple(one), structs.astuple(other)))


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
