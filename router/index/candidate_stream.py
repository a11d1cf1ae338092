"""How much is known of one candidate's blocks, what happened to its events, and whom to trust.

`Trust` is how far predictions for the candidate can be trusted:

    based on                 if its predictions are wrong
    events of the GPU        history is read again; each time after twice as many answers
    the cpu tier             the tier does not count, until it would have been right again

Pauses are counted in answers, not in seconds as in `router.base.backoff`: if a candidate answers
nothing, nothing shows that it has become better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Final, Literal

import msgspec
from msgspec import Struct

from policies.view import CandidateId
from router.base.contracts import HashContract
from router.base.messages import Position

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
        """Return all counts, by name."""
        counts = msgspec.structs.asdict(self)
        history, blocks = counts.pop("history"), counts.pop("blocks")
        return counts | msgspec.structs.asdict(history) | msgspec.structs.asdict(blocks)


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
