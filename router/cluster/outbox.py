"""Our requests as notes for other routers, until a loop publishes them.

Part of this module: what is open here, which notes wait, what happens if they are lost. Elsewhere:
how notes travel (redis_store, loops), other routers' notes (peers).

Waiting notes are bounded by `max_notes`, their claimed keys by `max_bytes`. Beyond that all notes
are dropped, and the next ones list every open lease, with a heartbeat that ends the rest. `resend`
does the same if notes may not have arrived. Others then miss first-token times and sessions of
requests that are over.

Notes that may wait are apart: `take_later`. Beyond `max_later_bytes` the oldest are dropped.

A request takes three notes of about 60 bytes, and 8 bytes for each block that it will compute. A
turn with 2,000 new tokens takes 1 kB, a cold prompt of 100,000 tokens 50 kB. For BLIND candidates
the whole chain is sent, because all routers guess their contents in the same way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from router.base.bounded import Bounded
from router.base.messages import (
    Alive,
    Answered,
    Began,
    Ended,
    Note,
    OpenLease,
    OpenLeases,
    SessionState,
    encode,
    pack_keys,
)
from router.cluster.candidate_source import CandidateNames
from router.index.cache_view import CacheView
from router.index.candidate_stream import Claim
from router.metrics import Metrics
from router.replicas.ledger import Lease
from router.scheduling.conversations import Conversations

logger = logging.getLogger(__name__)


class _Own(Struct):
    """One of our open leases, as it is sent again."""

    began: Began
    begun_s: float
    is_answered: bool = False


SOON_S: Final = 0.02
"""How long first tokens and ends may wait for a request that begins, to go with it."""

LATER_S: Final = 0.25
"""How long notes wait that are only shown. They go with the next message."""


def _ignore(wait_s: float) -> None:
    """Ignore a note: nothing is published."""


class Outbox:
    """What this router has in flight, and the notes of it that wait."""

    def __init__(
        self,
        *,
        caches: CacheView,
        conversations: Conversations,
        names: CandidateNames,
        metrics: Metrics,
        max_notes: int = 20_000,
        max_bytes: int = 16 * 1024 * 1024,
        max_later_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        self.on_note: Callable[[float], None] = _ignore
        """Called when there is a note to take, with how long it may wait; 0: it is urgent."""
        self._caches = caches
        self._conversations = conversations
        self._names = names
        self._metrics = metrics
        self._max_notes = max_notes
        self._max_bytes = max_bytes
        self._open: dict[int, _Own] = {}
        self._last = 0
        self._notes: list[Note] = []
        self._told: deque[Note] = deque(maxlen=max_notes)
        self._num_bytes = 0
        self._later: deque[tuple[Note, int]] = deque()  # with their sizes
        self._num_later_bytes = 0
        self._max_later_bytes = max_later_bytes
        self._is_lost = False
        self._turned: Bounded[int, None] = Bounded(conversations.max_sessions)
        """Sessions that had a turn here and are not stored."""

    def began(
        self,
        lease: Lease,
        *,
        claim: Claim | None,
        num_held_blocks: int,
        session_hash: int | None,
        has_named_session: bool = True,
    ) -> None:
        """Publish that one of our requests was sent, and what it is going to compute.

        A session without a name is stored from its second turn on: most have no second one.
        """
        stream_id = self._names.stream_id_of(lease.candidate)
        if stream_id is None:
            return  # removed
        booking = lease.booking
        chain = claim.keys if claim is not None else ()
        is_blind = self._caches.state(lease.candidate) == "blind"
        note = Began(
            number=lease.number,
            stream_id=stream_id,
            num_uncached_tokens=booking.num_uncached_tokens,
            num_cached_tokens=booking.num_cached_tokens,
            num_fetched_tokens=booking.num_fetched_tokens,
            streams=booking.streams,
            claimed=pack_keys(chain[num_held_blocks:]),
            session_hash=session_hash,
            held=pack_keys(chain[:num_held_blocks]) if is_blind else b"",
            is_from_pool=booking.is_from_pool,
            num_disk_tokens=booking.num_disk_tokens,
            is_batch=booking.is_batch,
            is_visit=booking.is_visit,
        )
        self._open[lease.number] = _Own(began=note, begun_s=lease.begun_s)
        self._last = lease.number
        self._put(note, len(note.claimed) + len(note.held), is_urgent=True)
        if session_hash is not None:
            entry = self._conversations.last(session_hash)
            if has_named_session or (entry is not None and entry.goes_on):
                self._turned.put(session_hash, None)

    def answered(self, lease: Lease, now_s: float) -> None:
        """Publish that the first token of one of our requests came now."""
        own = self._open.get(lease.number)
        if own is not None and not own.is_answered:
            own.is_answered = True
            own.began = msgspec.structs.replace(own.began, claimed=b"", held=b"")  # computed
            self._put(Answered(lease.number, (now_s - lease.begun_s) * 1000.0))

    def ended(self, lease: Lease, *, computed: bool) -> None:
        """Publish that one of our requests is over, however it ended."""
        if self._open.pop(lease.number, None) is not None:
            self._put(Ended(lease.number, computed))

    @property
    def num_open(self) -> int:
        """Count the leases that other routers know of."""
        return len(self._open)

    def tell(self, note: Note) -> None:
        """Add a note to the outbox that is about none of our requests; it is urgent."""
        self._told.append(note)
        self.on_note(0.0)

    def tell_later(self, note: Note, num_bytes: int) -> None:
        """Add a note that is dropped first if too many wait; these keep their order."""
        self._later.append((note, num_bytes))
        self._num_later_bytes += num_bytes
        while self._num_later_bytes > self._max_later_bytes:
            self._num_later_bytes -= self._later.popleft()[1]
            self._metrics.notes_dropped.inc()
        self.on_note(LATER_S)

    def take_later(self) -> tuple[Note, ...]:
        """Remove and return the notes that may wait, oldest first."""
        notes = tuple([note for note, _ in self._later])
        self._later.clear()
        self._num_later_bytes = 0
        return notes

    def alive(self) -> None:
        """Add a heartbeat to the outbox, behind all notes so far."""
        self._put(Alive(tuple(self._open), self._last))

    def take(self) -> tuple[Note, ...]:
        """Remove and return the notes to be published, oldest first."""
        if self._is_lost:
            self._is_lost = False
            for number, own in self._open.items():
                self._notes.append(own.began)
                if own.is_answered:
                    self._notes.append(Answered(number))
            self._notes.append(Alive(tuple(self._open), self._last))
        notes = (*self._notes, *self._told)
        self._notes.clear()
        self._told.clear()
        self._num_bytes = 0
        return notes

    def resend(self) -> None:
        """Publish everything again: notes did not arrive, or may not have."""
        self._metrics.notes_dropped.inc(len(self._notes))
        self._notes.clear()
        self._num_bytes = 0
        self._is_lost = True
        self.on_note(SOON_S)

    def load(self, now_s: float) -> bytes:
        """Pack all that we have in flight, for a router that joins."""
        leases = tuple(
            OpenLease(own.began, now_s - own.begun_s, own.is_answered)
            for own in self._open.values()
        )
        return encode(OpenLeases(self._last, leases))

    def take_sessions(self, max_sessions: int = 1000) -> dict[int, SessionState]:
        """Remove and return sessions that had a turn here: routers that join later read them."""
        taken: dict[int, SessionState] = {}
        while self._turned and len(taken) < max_sessions:
            session_hash = next(iter(self._turned))
            del self._turned[session_hash]
            session = self._conversations.last(session_hash)
            stream_id = self._names.stream_id_of(session.candidate) if session is not None else None
            if session is not None and stream_id is not None:
                taken[session_hash] = SessionState(stream_id, num_tokens=session.num_tokens)
        return taken

    def _put(self, note: Note, num_bytes: int = 0, *, is_urgent: bool = False) -> None:
        if self._is_lost:
            return  # sent again in one piece
        self._notes.append(note)
        self._num_bytes += num_bytes
        if len(self._notes) > self._max_notes or self._num_bytes > self._max_bytes:
            logger.warning(
                "notes dropped: redis does not accept them", extra={"num": len(self._notes)}
            )
            self.resend()
        else:
            self.on_note(0.0 if is_urgent else SOON_S)
