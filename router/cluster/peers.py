"""Other routers: our requests as notes for them, and what their notes change here.

    began      a lease begins           their ledger, their claims, their sessions
    answered   its first token came     their queue, their cost model
    ended      it is given back         all of it
    alive      a heartbeat              ends what was lost on the way

Outward, notes wait in an outbox until a loop takes them; inward, each note changes the same fleet,
caches and sessions that our own requests do. What must not live here: how and when notes travel
(redis_store, loops).

A note may be late, lost or arrive twice: see router.cluster.lease_tracker. Overflow rule of the
outbox: above `max_notes`, or `max_bytes` of claimed keys, all of it is dropped, and what is taken
next lists every open lease anew, with a heartbeat that ends the rest; `resend` does the same for
notes that were taken and may not have arrived. What that loses is what others would have learned
from requests that are over by then: first-token times, sessions (which are stored, too).

Cost: a request takes three notes, some 60 bytes each, and its claim, 8 bytes a new block: of a
turn with 2,000 new tokens 1 kB, of a cold prompt of 100,000 tokens 50 kB. Of prompts to BLIND
candidates the whole chain goes: all routers guess alike what is cached there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from policies.view import CandidateId
from router.cluster.candidate_names import CandidateNames
from router.cluster.lease_tracker import LeaseTracker
from router.contracts import BlockKey
from router.index.cache_view import CacheView, Claim
from router.messages import (
    Alive,
    Answered,
    Began,
    Consumed,
    Ended,
    Load,
    Note,
    Notes,
    OpenLease,
    Registered,
    SessionState,
    StreamId,
    Suspected,
    decode_load,
    encode,
    pack_keys,
    unpack_keys,
)
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking, Lease
from router.replicas.sessions import Sessions, SessionView

logger = logging.getLogger(__name__)

LEASE_S: Final = 3.0
"""A router silent for so long is forgotten, with all it has in flight."""

MAX_ROUTERS: Final = 1_024


class NullPeers:
    """The peers of a router without Redis: none."""

    __slots__ = ()

    def began(
        self,
        lease: Lease,
        *,
        claim: Claim | None,
        num_held_blocks: int,
        session_hash: int | None,
    ) -> None:
        """See `Peers.began`."""

    def answered(self, lease: Lease, now_s: float) -> None:
        """See `Peers.answered`."""

    def ended(self, lease: Lease, *, computed: bool) -> None:
        """See `Peers.ended`."""


NULL_PEERS: Final = NullPeers()


class _Own(Struct):
    """One of our open leases, as it is sent again."""

    began: Began
    begun_s: float
    is_answered: bool = False


class _Work(Struct):
    """One of another router's open leases, as it is booked here."""

    begun_s: float
    unbooked: Began | None  # its candidate is not known (yet)
    is_answered: bool = False
    lease: Lease | None = None
    claim: Claim | None = None


class _Peer:
    """One other router."""

    __slots__ = ("seen_s", "work")

    def __init__(self) -> None:
        self.seen_s = 0.0
        self.work: LeaseTracker[_Work] = LeaseTracker()


def _ignore(candidate: CandidateId, reason: str) -> None:
    """Do nothing about a suspicion."""


class Peers:
    """Translates between notes and state; see the module.

    Args:
        name: Ours among routers, unique to the process.
        lease_s: A router silent for so long is forgotten.
        on_suspected: Called with candidate and reason where another router found predictions wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        fleet: Fleet,
        caches: CacheView,
        sessions: Sessions,
        names: CandidateNames,
        metrics: Metrics,
        lease_s: float = LEASE_S,
        max_notes: int = 20_000,
        max_bytes: int = 16 * 1024 * 1024,
        on_suspected: Callable[[CandidateId, str], None] = _ignore,
    ) -> None:
        self.name = name
        self.on_suspected = on_suspected
        self._fleet = fleet
        self._caches = caches
        self._sessions = sessions
        self._names = names
        self._metrics = metrics
        self._lease_s = lease_s
        self._max_notes = max_notes
        self._max_bytes = max_bytes
        self._open: dict[int, _Own] = {}
        self._last = 0
        self._outbox: list[Note] = []
        self._suspicions: dict[StreamId, Suspected] = {}  # one of a stream is enough
        self._num_bytes = 0
        self._is_lost = False
        self._turned: dict[int, None] = {}  # sessions that had a turn here and are not stored
        self._peers: dict[str, _Peer] = {}

    # -- outward -----------------------------------------------------------------------------

    def began(
        self,
        lease: Lease,
        *,
        claim: Claim | None,
        num_held_blocks: int,
        session_hash: int | None,
    ) -> None:
        """Note that one of our requests was sent, and what it is going to compute."""
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
            num_held=num_held_blocks,
            session_hash=session_hash,
            held=pack_keys(chain[:num_held_blocks]) if is_blind else b"",
        )
        self._open[lease.number] = _Own(began=note, begun_s=lease.begun_s)
        self._last = lease.number
        self._put(note, len(note.claimed) + len(note.held))
        if session_hash is not None:
            self._turned[session_hash] = None

    def answered(self, lease: Lease, now_s: float) -> None:
        """Note that the first token of one of our requests came now."""
        own = self._open.get(lease.number)
        if own is not None and not own.is_answered:
            own.is_answered = True
            own.began = msgspec.structs.replace(own.began, claimed=b"", held=b"")  # computed
            self._put(Answered(lease.number, (now_s - lease.begun_s) * 1000.0))

    def ended(self, lease: Lease, *, computed: bool) -> None:
        """Note that one of our requests is over, however it ended."""
        if self._open.pop(lease.number, None) is not None:
            self._put(Ended(lease.number, computed))

    def suspected(self, candidate: CandidateId, reason: str) -> None:
        """Ask a candidate's leader to read history anew: predictions turned out wrong."""
        stream_id = self._names.stream_id_of(candidate)
        if stream_id is not None:
            self._suspicions[stream_id] = Suspected(stream_id, reason)

    def alive(self) -> None:
        """Put a heartbeat into the outbox, behind all notes so far."""
        self._put(Alive(tuple(self._open), self._last))

    def take(self) -> tuple[Note, ...]:
        """Take the notes to be published, oldest first."""
        if self._is_lost:
            self._is_lost = False
            for number, own in self._open.items():
                self._outbox.append(own.began)
                if own.is_answered:
                    self._outbox.append(Answered(number))
            self._outbox.append(Alive(tuple(self._open), self._last))
        notes = (*self._outbox, *self._suspicions.values())
        self._outbox.clear()
        self._suspicions.clear()
        self._num_bytes = 0
        return notes

    def resend(self) -> None:
        """Publish everything anew: notes did not arrive, or not for certain."""
        self._metrics.notes_dropped.inc(len(self._outbox))
        self._outbox.clear()
        self._num_bytes = 0
        self._is_lost = True

    def load(self, now_s: float) -> bytes:
        """Pack all that we have in flight, for a router that joins."""
        leases = tuple(
            OpenLease(own.began, now_s - own.begun_s, own.is_answered)
            for own in self._open.values()
        )
        return encode(Load(self._last, leases))

    def take_sessions(self, max_sessions: int = 1000) -> dict[int, SessionState]:
        """Take sessions that had a turn here, to be stored for routers that join later."""
        taken: dict[int, SessionState] = {}
        while self._turned and len(taken) < max_sessions:
            session_hash = next(iter(self._turned))
            del self._turned[session_hash]
            session = self._sessions.last(session_hash)
            stream_id = self._names.stream_id_of(session.candidate) if session is not None else None
            if session is not None and stream_id is not None:
                taken[session_hash] = SessionState(stream_id, session.num_turns, session.gap_s)
        return taken

    def _put(self, note: Note, num_bytes: int = 0) -> None:
        if self._is_lost:
            return  # sent again in one piece
        self._outbox.append(note)
        self._num_bytes += num_bytes
        if len(self._outbox) > self._max_notes or self._num_bytes > self._max_bytes:
            logger.warning(
                "notes dropped: redis does not take them", extra={"num": len(self._outbox)}
            )
            self.resend()

    # -- inward ------------------------------------------------------------------------------

    def apply(self, notes: Notes, now_s: float) -> None:
        """Apply another router's notes to our state; our own are passed over."""
        if notes.router == self.name:
            return
        peer = self._peer(notes.router, now_s)
        if peer is None:
            return
        for note in notes.notes:
            self._count(str(note.__struct_config__.tag))
            match note:
                case Began():
                    self._began(peer, note, now_s)
                case Answered(number=number, ttft_ms=ttft_ms):
                    self._answered(peer, number, now_s, ttft_ms)
                case Ended(number=number, computed=computed):
                    self._end(peer.work.end(number), now_s, computed=computed)
                case Alive(open=numbers, last=last):
                    self._kept(peer, peer.work.keep(numbers, last), now_s)
                case Suspected(stream_id=stream_id, reason=reason):
                    candidate = self._names.candidate_of(stream_id)
                    if candidate is not None:
                        self.on_suspected(candidate, reason)
                case Consumed():
                    pass  # for the tenants' accounts
                case _:
                    assert isinstance(note, Registered)  # for the registry's loop

    def join(self, loads: Mapping[str, bytes], now_s: float) -> None:
        """Take over what other routers have in flight; again where `wanted` says so.

        Each may be older or newer than the notes that follow.
        """
        joined: list[tuple[_Peer, Load]] = []
        for router, packed in loads.items():
            if router == self.name:
                continue
            try:
                load = decode_load(packed)
            except ValueError:
                self._count("malformed")
                continue
            peer = self._peer(router, now_s)
            if peer is not None:
                joined.append((peer, load))
        leases = [(peer, lease) for peer, load in joined for lease in load.open]
        leases.sort(key=lambda pair: -pair[1].age_s)  # in the order they began
        for peer, lease in leases:
            self._began(peer, lease.began, now_s - max(0.0, lease.age_s), is_new=False)
            if lease.is_answered:
                self._answered(peer, lease.began.number, now_s, None)
        for peer, load in joined:
            over = peer.work.joined([lease.began.number for lease in load.open], load.last)
            self._kept(peer, over, now_s)

    def wanted(self) -> tuple[str, ...]:
        """Name the routers that have requests in flight of which we know only the number."""
        return tuple(name for name, peer in self._peers.items() if peer.work.missing)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Forget the routers that are silent for too long; return their names."""
        silent = tuple(name for name, p in self._peers.items() if now_s - p.seen_s > self._lease_s)
        for router in silent:
            self._metrics.peers_forgotten.inc()
            logger.warning(
                "router forgotten: it is silent",
                extra={"router": router, "leases": len(self._peers[router].work.open)},
            )
            self.forget(router, now_s)
        return silent

    def forget(self, router: str, now_s: float) -> None:
        """Drop what another router has in flight: it is gone. Nothing of it counts as computed."""
        peer = self._peers.pop(router, None)
        if peer is not None:
            for work in peer.work.open.values():
                self._end(work, now_s, computed=False)

    @property
    def routers(self) -> tuple[str, ...]:
        """The other routers that were not silent for long."""
        return tuple(self._peers)

    @property
    def num_open_elsewhere(self) -> int:
        """How many requests other routers have in flight, as far as we know."""
        return sum(len(peer.work.open) for peer in self._peers.values())

    def learn_sessions(self, states: Mapping[int, SessionState], now_s: float) -> None:
        """Take over stored sessions; what we know ourselves is newer."""
        for session_hash, state in states.items():
            candidate = self._names.candidate_of(state.stream_id)
            if candidate is not None:
                session = SessionView(
                    candidate=candidate,
                    num_turns=state.num_turns,
                    last_seen_s=now_s,
                    gap_s=state.gap_s,
                )
                self._sessions.learn(session_hash, session)

    def _peer(self, router: str, now_s: float) -> _Peer | None:
        """Find another router, or add it; None: there are too many."""
        peer = self._peers.get(router)
        if peer is None and len(self._peers) >= MAX_ROUTERS:
            self._count("malformed")
            return None
        if peer is None:
            peer = self._peers[router] = _Peer()
            logger.info("router found", extra={"router": router})
        peer.seen_s = now_s
        return peer

    def _began(self, peer: _Peer, note: Began, begun_s: float, *, is_new: bool = True) -> None:
        if not peer.work.can_begin(note.number):
            return
        if min(note.num_uncached_tokens, note.num_cached_tokens, note.num_fetched_tokens) < 0:
            self._count("malformed")
            return
        work = _Work(begun_s=begun_s, unbooked=note)
        peer.work.begin(note.number, work)
        if not self._book(work):
            self._count("unknown_feed")
        elif is_new and note.session_hash is not None and work.lease is not None:
            self._sessions.note(note.session_hash, work.lease.candidate, begun_s)

    def _book(self, work: _Work) -> bool:
        """Book a lease and its claim; False: its candidate is not known (yet)."""
        note = work.unbooked
        if note is None:
            return True
        candidate = self._names.candidate_of(note.stream_id)
        if candidate is None:
            return False
        work.unbooked = None
        booking = Booking(
            num_uncached_tokens=note.num_uncached_tokens,
            num_cached_tokens=note.num_cached_tokens,
            num_fetched_tokens=note.num_fetched_tokens,
            streams=note.streams,
            is_ours=False,
        )
        work.lease = self._fleet.admit(candidate, booking, work.begun_s)
        held = self._unpacked(note.held)
        keys = held + self._unpacked(note.claimed)
        if keys:
            work.claim = self._caches.claim(candidate, keys, len(held))
        if work.is_answered and work.lease is not None:
            self._fleet.first_token_elsewhere(work.lease, work.begun_s, None)
        return True

    def _unpacked(self, claimed: bytes) -> list[BlockKey]:
        try:
            return unpack_keys(claimed)
        except ValueError:
            self._count("malformed")
            return []

    def _answered(self, peer: _Peer, number: int, now_s: float, ttft_ms: float | None) -> None:
        work = peer.work.open.get(number)
        if work is None:
            return
        work.is_answered = True
        if work.lease is not None:
            self._fleet.first_token_elsewhere(work.lease, now_s, ttft_ms)

    def _kept(self, peer: _Peer, over: Iterable[_Work], now_s: float) -> None:
        """End what is over, and book what could not be booked when it began."""
        for work in over:
            self._end(work, now_s, computed=False)
        for work in peer.work.open.values():
            self._book(work)

    def _end(self, work: _Work | None, now_s: float, *, computed: bool) -> None:
        """Give back what another router's request took here."""
        if work is None:
            return
        if work.lease is not None:
            self._fleet.end(work.lease, now_s, None)
        if work.claim is not None:
            self._caches.release(work.claim, computed=computed, now_s=now_s)

    def _count(self, kind: str) -> None:
        self._metrics.peer_notes.labels(kind).inc()
