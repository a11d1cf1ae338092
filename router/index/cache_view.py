"""The caches as the data path sees them: contract, matches, trust, by candidate.

One object in front of the block index and the event streams, so that routing does not depend on
whether a candidate's blocks are known from its events, translated, or guessed. The audit lives
here: predictions compared with what engines report, and what follows when they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.contracts import BlockKey, HashContract
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch, Speculation
from router.index.candidate_stream import CandidateStream, StreamState

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
    speculation: Speculation | None  # over blocks not there yet; None: none, or they came
    until_s: float | None = None  # None: its request is under way; else it waits for events


class _Trust(Struct):
    ratio: float = 1.0
    num_audits: int = 0


class CacheView:
    """The caches of all candidates, as far as they are known."""

    __slots__ = ("_claims", "_streams", "_trust", "index")

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self._claims: dict[CandidateId, list[Claim]] = {}  # those whose blocks have not all come
        self._streams: dict[CandidateId, CandidateStream] = {}
        self._trust: dict[CandidateId, _Trust] = {}

    def add(self, candidate: CandidateId, stream: CandidateStream) -> None:
        """Add a candidate, by its stream."""
        self.hand_over(candidate, stream)
        self._trust[candidate] = _Trust()

    def hand_over(self, candidate: CandidateId, stream: CandidateStream) -> None:
        """Use another stream from now on; blocks, claims and trust stay."""
        old = self._streams.get(candidate)
        if old is not None:
            old.on_applied = None
        self._streams[candidate] = stream
        stream.on_applied = self._applied
        self._trust.setdefault(candidate, _Trust())

    def drop(self, candidate: CandidateId) -> None:
        """Forget a candidate and its blocks."""
        self._streams.pop(candidate, None)
        self._trust.pop(candidate, None)
        self._claims.pop(candidate, None)
        self.index.clear(candidate)

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
    ) -> dict[CandidateId, BlockMatch]:
        """Count the leading blocks of `chain` that each candidate holds; none for suspect ones.

        `found`: matches found elsewhere, of candidates whose blocks are not kept here.
        """
        matches = self.index.match(chain, candidates)
        for candidate in found.keys() & matches.keys():
            matches[candidate] = self.index.prolonged(chain, candidate, found[candidate])
        for candidate in matches:
            stream = self._streams.get(candidate)
            if stream is not None and stream.is_suspect:
                matches[candidate] = NO_BLOCKS
        return matches

    def claim(
        self, candidate: CandidateId, keys: Sequence[BlockKey], num_held_blocks: int
    ) -> Claim:
        """Claim the chain for a request that is about to be sent: it counts as held from now on."""
        new = keys[num_held_blocks:]
        speculation = self.index.speculate(candidate, new) if new else None
        claim = Claim(candidate=candidate, keys=keys, speculation=speculation)
        if speculation is not None:
            self._claims.setdefault(candidate, []).append(claim)
        return claim

    def release(self, claim: Claim, *, computed: bool, now_s: float) -> None:
        """End a request's claim; computed blocks stay claimed until their events are here.

        What a candidate without events has computed is remembered as a guess.
        """
        stream = self._streams.get(claim.candidate)
        if computed and stream is not None and stream.state == "blind":
            self.index.remember(claim.candidate, claim.keys, stream.capacity_blocks)
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
        for claim in self._claims.get(candidate, ()):
            if claim.speculation is not None and self.index.holds(candidate, claim.keys[-1]):
                _end(claim)

    def _expire_claims(self, candidate: CandidateId, now_s: float) -> None:
        waiting = []
        for claim in self._claims.pop(candidate):
            if claim.until_s is not None and now_s >= claim.until_s:
                _end(claim)
            if claim.speculation is not None:
                waiting.append(claim)
        if waiting:
            self._claims[candidate] = waiting

    def was_overtaken(self, claim: Claim, num_reported_tokens: int) -> bool:
        """Return whether a prediction was right when it was made, and an eviction came later.

        The first block that the engine did not have was removed recently, by its events.
        """
        contract = self.contract(claim.candidate)
        if contract is None:
            return False
        missing = num_reported_tokens // contract.block_size
        return missing < len(claim.keys) and self.index.was_evicted(
            claim.candidate, claim.keys[missing]
        )

    def audit(
        self, candidate: CandidateId, num_predicted_tokens: int, num_reported_tokens: int
    ) -> None:
        """Note a prediction's outcome; a stream whose predictions fail becomes suspect."""
        stream, trust = self._streams.get(candidate), self._trust.get(candidate)
        if stream is None or trust is None:
            return
        right = num_predicted_tokens == num_reported_tokens
        trust.ratio = TRUST_DECAY * trust.ratio + (1 - TRUST_DECAY) * right
        trust.num_audits += 1
        if trust.num_audits >= MIN_AUDITS and trust.ratio < SUSPECT_BELOW:
            if stream.state == "exact":
                stream.mark_suspect(f"only {trust.ratio:.0%} of recent predictions were right")
            self._trust[candidate] = _Trust()


def _end(claim: Claim) -> None:
    if claim.speculation is not None:
        claim.speculation.end()
        claim.speculation = None
