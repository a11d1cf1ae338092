"""How much is known of one candidate's blocks, what happened to its events, and whom to trust.

A `Claim` marks the blocks that one request will compute, until they are stored or it has failed.
The `Audit` compares each predicted number of cached tokens with the number that the engine reports.
A wrong prediction counts against its source. `Trust` is how far predictions for the candidate can
be trusted:

    based on                 if its predictions are wrong
    events of the GPU        history is read again; each time after twice as many answers
    the cpu tier             the tier does not count, until it would have been right again

Pauses are counted in answers, not in seconds as in `router.base.backoff`: if a candidate answers
nothing, nothing shows that it has become better.

A replica whose history is lost heals by its turns: requests prove blocks of lost history.
A block's hash covers all tokens before it, and an engine computes a prompt's blocks in order. While
it does, it keeps the blocks before them. So the event of a prompt's last block proves that the
engine has the whole chain. Blocks of the chain that no event showed were stored before the router
joined, and were reused.

vLLM can also announce reused blocks (`kv_cache_report_mode: full`). It is not asked to, see
docs/research/lost-history.md. Matching prompts with blocks is in `cache_view`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, Literal

import msgspec
from msgspec import Struct

from policies.view import CandidateId
from router.base.contracts import BlockKey, HashContract
from router.base.messages import Position
from router.index.block_index import BlockIndex, Speculation
from router.index.running import Use

TRUST_DECAY: Final = 0.98  # half of the weight lies on the last 35 audits
MIN_AUDITS: Final = 20  # nothing is concluded from fewer
SUSPECT_BELOW: Final = 0.6
"""Below this share of right predictions a stream is read again, or a tier does not count. Evictions
between decision and schedule do not count (`Audit.was_overtaken`). A lost event makes nearly
all turns of a session wrong."""

GOOD_FROM: Final = 0.9
"""From this share of right predictions on, earlier wrong ones have no more effect."""

_CPU_DECAY: Final = 0.95  # a tier is mostly right, or mostly wrong
_CPU_AUDITS: Final = 10
_MAX_NEEDED: Final = 64 * MIN_AUDITS


class Account(Struct):
    """The share of right predictions of one kind; recent ones count more."""

    ratio: float = 1.0
    num_audits: int = 0
    decay: float = TRUST_DECAY
    num_needed: int = MIN_AUDITS  # nothing is concluded from fewer

    def observe(self, right: bool) -> None:
        """Record a prediction's outcome."""
        self.ratio = self.decay * self.ratio + (1 - self.decay) * right
        self.num_audits += 1

    @property
    def is_bad(self) -> bool:
        """Whether enough predictions were seen, and too many of them were wrong."""
        return self.num_audits >= self.num_needed and self.ratio < SUSPECT_BELOW


class Trust:
    """What answers show of one candidate."""

    __slots__ = ("_num_needed", "counts_cpu", "cpu", "gpu")

    def __init__(self) -> None:
        self.gpu = Account()
        self.cpu = Account(decay=_CPU_DECAY, num_needed=_CPU_AUDITS)
        self.counts_cpu = True
        self._num_needed = MIN_AUDITS  # answers before history is read again

    def observe_gpu(self, right: bool) -> bool:
        """Record a prediction by the GPU's events; return whether to read history again."""
        self.gpu.observe(right)
        if self.gpu.num_audits >= MIN_AUDITS and self.gpu.ratio >= GOOD_FROM:
            self._num_needed = MIN_AUDITS
        return self.gpu.is_bad and self.gpu.num_audits >= self._num_needed

    def observe_cpu(self, right: bool) -> bool:
        """Record what the cpu tier would have added; return whether `counts_cpu` changed."""
        self.cpu.observe(right)
        changes = self.cpu.is_bad if self.counts_cpu else self.cpu.ratio >= GOOD_FROM
        if changes:
            self.counts_cpu = not self.counts_cpu
        return changes

    def forgive(self, *, was_read: bool = False) -> None:
        """Begin the GPU's account again; `was_read`: history is being read again for it."""
        self.gpu = Account()
        if was_read:
            self._num_needed = min(2 * self._num_needed, _MAX_NEEDED)


class HistoryCounters(Struct):
    """Written by History."""

    num_duplicates: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_failed_replays: int = 0
    num_truncated: int = 0
    num_restarts: int = 0


class BlockCounters(Struct):
    """Written by RankBlocks."""

    num_stored: int = 0
    num_removed: int = 0
    num_clears: int = 0
    num_missing: int = 0  # removed, but not known as held
    num_recovered: int = 0  # of lost history, proven by a request that reused them
    num_unknown_events: int = 0
    num_unknown_medium: int = 0  # blocks on an unknown tier
    num_other_groups: int = 0  # blocks of KV groups not seen, and of connectors in other groups
    num_other_sizes: int = 0  # blocks of another size than the contract's
    num_untranslated: int = 0
    num_contract_misses: int = 0


class StreamCounters(Struct):
    """Written by RankStream and its parts; read at scrape time."""

    num_batches: int = 0
    num_undecodable: int = 0
    num_failures: int = 0  # of the follower, by an unexpected error
    history: HistoryCounters = msgspec.field(default_factory=HistoryCounters)
    blocks: BlockCounters = msgspec.field(default_factory=BlockCounters)

    def by_name(self) -> dict[str, int]:
        """Return all counts, by name without `num_`."""
        counts = msgspec.structs.asdict(self)
        history, blocks = counts.pop("history"), counts.pop("blocks")
        counts |= msgspec.structs.asdict(history) | msgspec.structs.asdict(blocks)
        return {name.removeprefix("num_"): count for name, count in counts.items()}


StreamState = Literal["exact", "degraded", "blind"]
"""How much is known of a candidate: everything; not all, or an old state; nothing."""


class StreamReason(StrEnum):
    """Why a stream is not exact. People and other routers receive the text.

    Other texts are possible: why a follower failed, or a reason of another release.
    """

    NO_EVENTS = "no events yet"
    CONNECTS = (
        "nothing publishes at its event endpoint: vLLM connects to an endpoint with a host (also "
        '0.0.0.0) instead of binding it; set "endpoint": "tcp://*:PORT" in --kv-events-config '
        "(or is the port closed?)"
    )
    NOT_LISTENING = (
        "nothing publishes at its event endpoint: nothing answers there; is it the "
        '"endpoint": "tcp://*:PORT" of --kv-events-config, and is the port open?'
    )
    HOST_UNKNOWN = "the host name of its event endpoint does not resolve"
    NO_PUBLISHER = (
        "nothing publishes at its event endpoint: it is not an event publisher; is it "
        'the "endpoint" of --kv-events-config?'
    )
    EVENTS_NOT_UNDERSTOOD = "its events are not understood"
    BATCH_NOT_UNDERSTOOD = "a batch was not understood"
    UNREACHABLE = "publisher unreachable"
    LOST = "event stream lost"
    PARTIAL = "history before the router joined is lost"
    RESUMING = "resuming: used as it was, until a replay confirms it"
    READING = "event history is being read"
    TRANSLATED = "hashes cannot be computed and are translated"
    UNVERIFIED = "hash contract is not verified yet"
    EXTRA_KEYS = "an extra key of their blocks is not understood, so these are not predicted"
    GROUPS = "a KV group has an unknown kind, window or block size"


class CandidateStream(ABC):
    """Keeps one candidate's part of the index equal to its engine's blocks.

    Args:
        counters: Of the candidate's last stream, to continue; None: it is the first.
    """

    __slots__ = ("candidate", "counters", "epoch", "on_applied")

    def __init__(self, candidate: CandidateId, counters: StreamCounters | None = None) -> None:
        self.candidate = candidate
        self.counters = StreamCounters() if counters is None else counters
        self.epoch = 0  # counts each clear, and each replacement by a snapshot
        self.on_applied: Callable[[CandidateId], None] | None = None
        """Called after blocks of the candidate have changed."""

    @property
    @abstractmethod
    def contract(self) -> HashContract:
        """How this candidate's blocks are named; a guess at first."""

    @property
    @abstractmethod
    def capacity_blocks(self) -> int:
        """How many blocks the candidate has; bounds what is guessed while BLIND."""

    @property
    @abstractmethod
    def position(self) -> Position | None:
        """The engine's last batch that is in the index; None: none, or a mix of several moments."""

    @property
    @abstractmethod
    def has_history(self) -> bool:
        """Whether history was read as far as it goes back."""

    @property
    @abstractmethod
    def is_suspect(self) -> bool:
        """Whether its matches do not count until history is read again."""

    @property
    def lacks_history(self) -> bool:
        """Whether history is lost, and requests can prove blocks of it."""
        return False

    @property
    def unknown(self) -> Collection[str]:
        """Kinds of prompts whose blocks are not found here (router.kv_events.translation)."""
        return ()

    @property
    def state(self) -> StreamState:
        """How much is known of the candidate."""
        return self.state_and_reason()[0]

    @property
    def is_blind(self) -> bool:
        """Whether nothing is known of the candidate's blocks."""
        return self.state == "blind"

    @property
    def reason(self) -> str:
        """Why it is in this state, for operators; empty if EXACT."""
        return self.state_and_reason()[1]

    @abstractmethod
    def state_and_reason(self) -> tuple[StreamState, str]:
        """Return the state, and the gravest reason for it."""

    @abstractmethod
    def mark_suspect(self, reason: str) -> None:
        """Ignore matches, which the audit found wrong, and have history read again."""

    def _applied(self) -> None:
        """Call `on_applied`."""
        if self.on_applied is not None:
            self.on_applied(self.candidate)


def recover(index: BlockIndex, claim: Claim) -> int:
    """Add the blocks of a claim that its candidate must have had; return how many.

    For a claim whose last block has just been stored. Each block counts as one copy. If the engine
    has more, a later match may be too short.
    """
    candidate, held = claim.candidate, index.on_gpu(claim.candidate)
    if not claim.is_new or claim.keys[-1] not in held or index.has_groups(candidate):
        return 0
    keys = [
        key
        for key in claim.keys
        if key not in held and not index.was_evicted(candidate, key, claim.num_removals)
    ]
    if keys:
        index.store(candidate, keys)
    return len(keys)


class Claim(Struct, kw_only=True):
    """Blocks that one request will compute at a candidate, until they are there or it failed."""

    candidate: CandidateId
    keys: Sequence[BlockKey]  # the whole chain
    others: Sequence[BlockKey] = ()  # of other KV groups
    speculation: Speculation | None  # of blocks not there yet; None: none, or they came
    use: Use | None = None  # None: the candidate is not known
    until_s: float | None = None  # None: its request is under way; else it waits for events
    num_held_blocks: int = 0  # on the GPU when it was made, with those being computed
    num_tier_blocks: int = 0  # with those of the cpu tier, even if it does not count
    num_removals: int = 0  # of the candidate, before it was made
    is_new: bool = False  # the GPU did not have the last block when it was made

    def end(self) -> None:
        """Release the blocks; a second time does nothing."""
        if self.speculation is not None:
            self.speculation.end()
            self.speculation = None


logger = logging.getLogger(__name__)


class Audit:
    """The trust in each candidate's predictions.

    Args:
        streams: Of the candidates, as they are now.

    `without_cpu`: the candidates whose cpu tier does not count.
    """

    __slots__ = ("_index", "_streams", "_trust", "without_cpu")

    def __init__(self, index: BlockIndex, streams: Mapping[CandidateId, CandidateStream]) -> None:
        self._index = index
        self._streams = streams
        self._trust: dict[CandidateId, Trust] = {}
        self.without_cpu: set[CandidateId] = set()

    def begin(self, candidate: CandidateId) -> None:
        """Trust a candidate that is new, or another process."""
        self._trust[candidate] = Trust()
        self.without_cpu.discard(candidate)

    def remove(self, candidate: CandidateId) -> None:
        """Drop a candidate that is gone."""
        self._trust.pop(candidate, None)
        self.without_cpu.discard(candidate)

    def trust(self, candidate: CandidateId) -> float:
        """Return the share of recent predictions that were right, recent ones counting more."""
        trust = self._trust.get(candidate)
        return 1.0 if trust is None else trust.gpu.ratio

    def cpu_trust(self, candidate: CandidateId) -> float | None:
        """Return the same for the cpu tier's part; None: it was never audited."""
        trust = self._trust.get(candidate)
        return trust.cpu.ratio if trust is not None and trust.cpu.num_audits else None

    def why_bad(self, candidate: CandidateId) -> str | None:
        """Return why predictions of an exact stream cannot be trusted; None: they can."""
        trust = self._trust.get(candidate)
        return share_right(trust.gpu.ratio) if trust is not None and trust.gpu.is_bad else None

    def was_overtaken(
        self, claim: Claim, num_reported_tokens: int, num_predicted_tokens: int = 0
    ) -> bool:
        """Return whether a prediction was right when it was made, and an eviction came later.

        By its events, the engine has since removed the first block that it lacked; or, with several
        KV groups, one that the predicted hit needed.
        """
        index, candidate = self._index, claim.candidate
        return any(
            index.was_evicted(candidate, key, claim.num_removals)
            for key in self._missing(claim, num_reported_tokens, num_predicted_tokens)
        )

    def _missing(self, claim: Claim, num_reported: int, num_predicted: int) -> Iterable[BlockKey]:
        """List blocks of which the engine lacked one, if it reused less than predicted."""
        stream = self._streams.get(claim.candidate)
        if stream is None:
            return ()
        contract = stream.contract
        missing = num_reported // contract.block_size
        if missing >= len(claim.keys):
            return ()
        num_blocks = min(num_predicted // contract.block_size, len(claim.keys))
        needed = self._index.needed_by(claim.candidate, claim.keys, num_blocks)
        num_more = 2 if claim.candidate in self._index.dropping else 1  # it dropped one that it had
        return (*claim.keys[missing : missing + num_more], *needed)

    def record(
        self,
        candidate: CandidateId,
        num_predicted_tokens: int,
        num_reported_tokens: int,
        claim: Claim | None = None,
        *,
        num_cpu_tokens: int = 0,
    ) -> None:
        """Record a prediction's outcome; a wrong one lowers the trust in what it is based on.

        Args:
            candidate: The one that answered.
            num_predicted_tokens: From all tiers.
            num_reported_tokens: By its engine.
            claim: Of the request; None: not known, all counts for the GPU.
            num_cpu_tokens: The part of the prediction that came from the cpu tier.
        """
        stream, trust = self._streams.get(candidate), self._trust.get(candidate)
        if stream is None or trust is None:
            return
        if claim is not None:
            size = stream.contract.block_size
            num_gpu_tokens = claim.num_held_blocks * size
            num_tier_tokens = max(claim.num_tier_blocks * size, num_gpu_tokens + num_cpu_tokens)
            if num_tier_tokens > num_gpu_tokens:
                self._audit_cpu(candidate, trust, num_tier_tokens == num_reported_tokens)
                if num_reported_tokens >= num_gpu_tokens:
                    return  # the GPU has the predicted blocks
        is_right = num_predicted_tokens == num_reported_tokens
        if trust.observe_gpu(is_right):
            was_read = stream.state == "exact"
            if was_read:
                stream.mark_suspect(share_right(trust.gpu.ratio))
            trust.forgive(was_read=was_read)

    def _audit_cpu(self, candidate: CandidateId, trust: Trust, right: bool) -> None:
        """Record whether the cpu tier added the blocks that it announced."""
        if not trust.observe_cpu(right):
            return
        fields = {"candidate": candidate, "right": round(trust.cpu.ratio, 2)}
        if trust.counts_cpu:
            self.without_cpu.discard(candidate)
            logger.info("its cpu tier counts again: it holds what it announced", extra=fields)
        else:
            self.without_cpu.add(candidate)
            text = "its cpu tier does not count any more: less was read from it than it announced"
            logger.warning(text, extra=fields)


def share_right(ratio: float) -> str:
    """Return how many predictions were right, in words."""
    return f"only {ratio:.0%} of recent predictions were right"
