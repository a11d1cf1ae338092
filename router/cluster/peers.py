"""Other routers: what their notes change here.

    began      a lease begins           our ledger, our claims, our sessions
    answered   its first token came     our queue, our cost model
    ended      it is given back         all of it
    alive      a heartbeat              ends what was lost on the way
    left       it has ended             ends what it had left open

Each note changes the same fleet, caches and sessions that our own requests change. A note may be
late, lost or received twice: `LeaseTracker` has the rules. How notes travel is in redis_store
and sharing, our own notes are in outbox.

Rules of leases, for a router whose lease numbers grow:

1. A begin is one lease, however often it is received. One whose end was received stays ended.
2. A heartbeat lists what is open up to number `last`. What it does not list is over.
3. What it lists and we do not know was lost on the way: it is *missing* until it comes again.
4. A begin up to `last` that is not missing is an old one: it is over.
5. A load (all that was open at some moment) is joined by begins, then ends what it lacks. It may
   be older or newer than the last heartbeat: rules 1 and 4 hold for it, too.

No I/O, no clock; the values are the caller's.

`NoteKinds` are the kinds of notes that routers send each other, and who receives each. The owner of
a kind registers it. The notes of an entry are decoded in one step. If one is malformed, or of a
kind that is not registered here, it is left out, and the others count.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
from msgspec import Struct

from router.base.contracts import BlockKey
from router.base.decoding import UNDECODABLE, Text, decoder
from router.base.messages import (
    Alive,
    Answered,
    Began,
    Ended,
    Left,
    Note,
    Notes,
    OpenLeases,
    SessionState,
    decode_load,
    unpack_words,
)
from router.cluster.candidate_source import CandidateNames
from router.index.cache_view import CacheView
from router.index.candidate_stream import Claim
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking, Lease
from router.scheduling.conversations import Conversations

N = TypeVar("N", bound=Note)

Receive = Callable[[N, str, float], object]
"""Takes a note, the name of the router that sent it, and now."""


class _RawNotes(Struct, frozen=True, array_like=True):
    """`Notes`, not decoded yet."""

    router: Text
    notes: tuple[msgspec.Raw, ...]


_decode_entry = decoder(_RawNotes, "msgpack")


class NoteKinds:
    """The registry of kinds. `num_garbage` counts the notes and entries that were left out."""

    def __init__(self) -> None:
        self.num_garbage = 0
        self._receivers: dict[type[Note], Receive[Any]] = {}
        self._with_own: set[type[Note]] = set()
        self._decode: Callable[[msgspec.Raw], Note] = msgspec.msgpack.Decoder(Note).decode
        self._decode_all: Callable[[bytes], tuple[str, tuple[Note, ...]]] | None = None

    def register(self, kind: type[N], receive: Receive[N], *, with_own: bool = False) -> None:
        """Register the receiver of a kind of notes. Its tag tells it from the other kinds.

        `with_own`: our own, too, as they come back: their order among the others' counts.
        """
        self._receivers[kind] = receive
        if with_own:
            self._with_own.add(kind)
        kinds: Any = reduce(operator.or_, self._receivers)
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._decode_all = msgspec.msgpack.Decoder(tuple[Text, tuple[kinds, ...]]).decode

    def decode(self, packed: bytes) -> Notes:
        """Decode what a router published.

        Raises:
            ValueError: it is none.
        """
        if self._decode_all is not None:
            with suppress(*UNDECODABLE):  # one of them is malformed, or of an unknown kind
                return Notes(*self._decode_all(packed))
        try:
            entry = _decode_entry(packed)
        except ValueError:
            self.num_garbage += 1
            raise
        notes = []
        for each in entry.notes:
            try:
                notes.append(self._decode(each))
            except UNDECODABLE:
                self.num_garbage += 1
        return Notes(entry.router, tuple(notes))

    def receive(self, note: Note, router: str, now_s: float, *, is_own: bool) -> None:
        """Pass a note to the receiver of its kind.

        Raises:
            ValueError: it is malformed.
        """
        receive = self._receivers.get(type(note))
        if receive is not None and (not is_own or type(note) in self._with_own):
            receive(note, router, now_s)


T = TypeVar("T")

MAX_LEASES: Final = 100_000
"""The most leases of one router that are open at once; more are not tracked."""


class LeaseTracker(Generic[T]):
    """The open leases of one other router, each with the caller's value."""

    __slots__ = ("_ended", "_last", "missing", "open")

    def __init__(self) -> None:
        self.open: dict[int, T] = {}
        self.missing: set[int] = set()  # listed as open, but not known here
        self._last = 0  # of the newest heartbeat or load
        self._ended: set[int] = set()  # whose end came since the newest heartbeat

    def can_begin(self, number: int) -> bool:
        """Return whether a lease is a new one, or its begin an old note."""
        if number in self.open or number in self._ended or len(self.open) >= MAX_LEASES:
            return False
        return number > self._last or number in self.missing

    def begin(self, number: int, value: T) -> None:
        """Open a lease that `can_begin`."""
        self.open[number] = value
        self.missing.discard(number)

    def end(self, number: int) -> T | None:
        """Close a lease; None if it is not open. A later begin of it is an old one."""
        if len(self._ended) < MAX_LEASES:
            self._ended.add(number)
        self.missing.discard(number)
        return self.open.pop(number, None)

    def keep(self, listed: Collection[int], last: int) -> list[T]:
        """Apply a heartbeat; return what is over by it, oldest first."""
        over = self._close_unlisted(listed, last)
        if last >= self._last:  # else an old one, received again
            self._last = last
            self.missing = {n for n in listed if n not in self.open and n not in self._ended}
            # One still listed ended after this heartbeat was made: its begin may come once more.
            self._ended = {n for n in self._ended if n > last or n in listed}
        return over

    def joined(self, listed: Collection[int], last: int) -> list[T]:
        """Apply a load whose leases have been begun; return what is over by it."""
        over = self._close_unlisted(listed, last)
        self.missing = {number for number in self.missing if number > last}
        self._last = max(self._last, last)
        return over

    def _close_unlisted(self, listed: Collection[int], last: int) -> list[T]:
        listed = frozenset(listed)
        over = [number for number in self.open if number <= last and number not in listed]
        return [self.open.pop(number) for number in over]


logger = logging.getLogger(__name__)

LEASE_S: Final = 3.0
"""A router silent for so long is forgotten, with all it has in flight."""

MAX_ROUTERS: Final = 1_024


class _Work(Struct):
    """One of another router's open leases, as it is booked here."""

    begun_s: float
    unbooked: Began | None  # its candidate is not known (yet)
    is_answered: bool = False
    lease: Lease | None = None
    claim: Claim | None = None
    session_hash: int | None = None


class _Peer:
    """One other router."""

    __slots__ = ("seen_s", "work")

    def __init__(self) -> None:
        self.seen_s = 0.0
        self.work: LeaseTracker[_Work] = LeaseTracker()


def _ignore(*_: object) -> None:
    """Do nothing about it."""


class Peers:
    """The other routers, as this one knows them.

    Args:
        name: Ours among routers, unique to the process.
        lease_s: A router silent for so long is forgotten.
    """

    def __init__(
        self,
        name: str,
        *,
        fleet: Fleet,
        caches: CacheView,
        conversations: Conversations,
        names: CandidateNames,
        metrics: Metrics,
        lease_s: float = LEASE_S,
    ) -> None:
        self.name = name
        self._fleet = fleet
        self._caches = caches
        self._conversations = conversations
        self._names = names
        self._metrics = metrics
        self._lease_s = lease_s
        self._peers: dict[str, _Peer] = {}
        self.notes = NoteKinds()
        self.notes.register(Began, self._receive)
        self.notes.register(Answered, self._receive)
        self.notes.register(Ended, self._receive)
        self.notes.register(Alive, self._receive)
        self.notes.register(Left, _ignore)

    def receive(self, packed: bytes, now_s: float) -> None:
        """Apply what a router published, if it can be read."""
        try:
            notes = self.notes.decode(packed)
        except ValueError:  # it is counted
            return
        self.apply(notes, now_s)

    def apply(self, notes: Notes, now_s: float) -> None:
        """Apply notes that were published together. Our own change nothing but by their order."""
        router, is_own = notes.router, notes.router == self.name
        if not is_own:
            if any(isinstance(note, Left) for note in notes.notes):
                self._left(router, now_s)
                return
            if self._peer(router, now_s) is None:
                return
        for note in notes.notes:
            if not is_own:
                self._count(str(note.__struct_config__.tag))
            try:
                self.notes.receive(note, router, now_s, is_own=is_own)
            except ValueError:
                self._count("malformed")

    def _receive(self, note: Began | Answered | Ended | Alive, router: str, now_s: float) -> None:
        """Apply what another router says of its requests."""
        peer = self._peers[router]
        match note:
            case Began():
                self._began(peer, note, now_s)
            case Answered(number=number, ttft_ms=ttft_ms):
                self._answered(peer, number, now_s, ttft_ms)
            case Ended(number=number, computed=computed):
                self._end(peer.work.end(number), now_s, computed=computed)
            case Alive(open=numbers, last=last):
                self._kept(peer, peer.work.keep(numbers, last), now_s)

    def join(self, loads: Mapping[str, bytes], now_s: float) -> None:
        """Add what other routers have in flight.

        Each load may be older or newer than the notes that follow.
        """
        joined: list[tuple[_Peer, OpenLeases]] = []
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
            self._began(peer, lease.began, now_s - max(0.0, lease.age_s))
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
                "router removed: it is silent",
                extra={"router": router, "leases": len(self._peers[router].work.open)},
            )
            self.forget(router, now_s)
        return silent

    def _left(self, router: str, now_s: float) -> None:
        self._count("left")
        if router in self._peers:
            logger.info("router left", extra={"router": router})
            self.forget(router, now_s)

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

    def learn_sessions(self, states: Mapping[int, SessionState], now_s: float) -> None:
        """Add stored sessions; what we know ourselves is newer."""
        for session_hash, state in states.items():
            candidate = self._names.candidate_of(state.stream_id)
            if candidate is not None:
                self._conversations.learn(session_hash, candidate, state.num_tokens, now_s)

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

    def _began(self, peer: _Peer, note: Began, begun_s: float) -> None:
        if not peer.work.can_begin(note.number):
            return
        num_read, num_on_disk = note.num_fetched_tokens, note.num_disk_tokens
        if min(note.num_uncached_tokens, note.num_cached_tokens, num_on_disk) < 0 or (
            num_read < num_on_disk
        ):
            self._count("malformed")
            return
        work = _Work(begun_s=begun_s, unbooked=note, session_hash=note.session_hash)
        peer.work.begin(note.number, work)
        if not self._book(work):
            self._count("unknown_feed")

    def _book(self, work: _Work) -> bool:
        """Book a lease and its claim; False: its candidate is not known (yet)."""
        note = work.unbooked
        if note is None:
            return True
        candidate = self._names.candidate_of(note.stream_id)
        if candidate is None:
            return False
        work.unbooked = None
        num_tokens = note.num_uncached_tokens + note.num_cached_tokens
        booking = Booking(
            num_uncached_tokens=note.num_uncached_tokens,
            num_cached_tokens=note.num_cached_tokens,
            num_fetched_tokens=note.num_fetched_tokens,
            is_from_pool=note.is_from_pool,
            num_disk_tokens=note.num_disk_tokens,
            streams=note.streams,
            is_ours=False,
            session_hash=note.session_hash if num_tokens else None,  # else it had no prompt
            is_batch=note.is_batch,
            is_visit=note.is_visit,
        )
        work.lease = self._fleet.load.admit(candidate, booking, work.begun_s)
        keys = self._unpacked(note)
        if keys:
            num_held = len(note.held) // 8
            work.claim = self._caches.claim(candidate, keys, num_held)
        if work.is_answered and work.lease is not None:
            self._fleet.load.first_token(work.lease, work.begun_s)
        return True

    def _unpacked(self, note: Began) -> Sequence[BlockKey]:
        """Return the chain that a request uses at its candidate, as far as the note has it."""
        try:
            keys = unpack_words(note.held + note.claimed if note.held else note.claimed)
        except ValueError:
            self._count("malformed")
            return ()
        return cast(Sequence[BlockKey], keys)

    def _answered(self, peer: _Peer, number: int, now_s: float, ttft_ms: float | None) -> None:
        work = peer.work.open.get(number)
        if work is None:
            return
        work.is_answered = True
        if work.lease is not None:
            self._fleet.load.first_token(work.lease, now_s, ttft_ms)

    def _kept(self, peer: _Peer, over: Iterable[_Work], now_s: float) -> None:
        """End what is over, and book what could not be booked when it began."""
        for work in over:
            self._end(work, now_s, computed=False)
        for work in peer.work.open.values():
            self._book(work)

    def _end(self, work: _Work | None, now_s: float, *, computed: bool) -> None:
        """Release what another router's request took here."""
        if work is None:
            return
        if work.lease is not None:
            self._fleet.load.end(work.lease, now_s, None, is_answered=computed)
            if computed and work.session_hash is not None:
                booking = work.lease.booking
                num_tokens = booking.num_uncached_tokens + booking.num_cached_tokens
                self._conversations.computed(work.session_hash, work.lease.candidate, num_tokens)
        if work.claim is not None:
            self._caches.release(work.claim, computed=computed, now_s=now_s)

    def _count(self, kind: str) -> None:
        self._metrics.peer_notes.labels(kind).inc()
