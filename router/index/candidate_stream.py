"""How much is known of one candidate's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Literal

from policies.view import CandidateId
from router.base.contracts import HashContract
from router.base.messages import Position
from router.index.counters import StreamCounters

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
        """Kinds of prompts whose blocks are not found here (router.kv_events.unknown_keys)."""
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
