"""Conversations: where each one lives, and which of them have room in a cache.

A conversation *has room* at the replica of its last turn from the moment that the turn is sent
until it has been silent for longer than keeping its blocks is worth (`_hold_s`). The queue sends a
turn of a conversation with room only there; all others wait for room (`router.scheduling.rules`).
Policies count only conversations with room: a silent one is delayed by nothing.

The *own tokens* of a conversation are the tokens that it shares with no other conversation. They
are its last prompt without the part that was cached when the conversation began (a system prompt,
or the context of a parent). Turns that overlap are summed.

A turn is one request, however often it is booked. It ends when it is answered; a booking after a
failed one, or after a prefill elsewhere, belongs to the same turn. Turns of other routers count as
our own, as soon as their notes arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final, NamedTuple

from msgspec import Struct

from policies.view import CandidateId
from router.base.bounded import Bounded, RecentRate

PATIENCE: Final = 9.0
"""A conversation that is silent for so many usual pauses has no room, whatever it costs."""

_SELDOM: Final = 5.0
"""A conversation whose pauses are, in the mean, so many usual ones comes for single turns. With 1,
a fifth of agents' turns did, and their output was lower (docs/research/trace.md)."""

_FIRST_PAUSE_S: Final = 5.0  # until a pause was seen: about what an agent's tool takes
_MOST_PAUSE_S: Final = 30.0  # a longer pause counts as this long: a person has left
_FIRST_TURN_S: Final = 5.0  # until a turn was seen
_DECAY: Final = 0.95  # of pauses, turns and returns: half of the weight lies on the last 14
_FIRST_SHARE: Final = 0.2
"""The share of conversations that go on, until some did or did not. With 0.5, bursts of single
prompts at a fresh router waited 7 s for room while real engines stood idle."""

_ASKED_S: Final = 600.0
"""A turn that has come keeps its room for so long, as it may wait for its engine: clients wait no
longer. With 60 s, rooms of a full CPU tier were lost in the queue and computed again."""

_ARRIVALS_S: Final = (30.0, 3.0)  # of their rate: time constant, and least time to judge by


class Room(Struct, gc=False):
    """What the conversations with room at one candidate take."""

    sessions: dict[int, Conversation] = {}
    num_tokens: int = 0
    num_batch_tokens: int = 0  # of these, of class batch

    @property
    def num_sessions(self) -> int:
        """Count the conversations."""
        return len(self.sessions)


class Conversation(Struct, gc=False):
    """One conversation as of its last turn."""

    candidate: CandidateId
    last_s: float  # when a turn began or ended
    ticket_s: float = 0.0  # when it first came: its place among those that wait for room
    num_tokens: int = 0  # of the last prompt that was computed at the candidate
    num_own_tokens: int = 0
    num_kept_tokens: int = 0  # of its own; 0: it is not worth keeping while it is silent
    num_shared_tokens: int = 0
    cost_s: float = 0.0  # to compute its own tokens again
    begun_s: float = 0.0  # its last turn
    num_running: int = 0  # its bookings
    until_s: float = 0.0  # while it is silent, it has room until then
    has_room: bool = False
    goes_on: bool = False  # it has had a second turn
    is_batch: bool = False  # the class of its last turn
    is_open: bool = False  # its last turn has come and is not answered
    is_visitor: bool = False  # it has room for this turn only
    has_ended: bool = False  # its client says so
    num_pauses: int = 0
    paused_s: float = 0.0  # in all of them


NO_ROOM: Final = Room()


class WorkingSet(Struct, gc=False):
    """What live conversations need."""

    num_sessions: int = 0
    num_tokens: int = 0
    num_expected_tokens: float = 0.0  # those of one turn by the share that goes on


NO_WORKING_SET: Final = WorkingSet()


class _Need(NamedTuple):
    """What a live conversation needs."""

    candidate: CandidateId
    num_tokens: int
    num_expected_tokens: float


class Conversations:
    """Conversations by digest; every operation is O(log n) amortised, unless it says otherwise.

    Args:
        max_sessions: How many conversations are remembered that have no room; the oldest goes
            first.
        ttl_s: For how long they are remembered.

    `pause_s` and `turn_s`: How long a usual pause takes, and a turn at an engine.
    """

    def __init__(self, *, max_sessions: int = 100_000, ttl_s: float = 3600.0) -> None:
        if max_sessions < 1 or not ttl_s > 0.0:
            raise ValueError(f"sessions need room and time: {max_sessions=} {ttl_s=}")
        self.max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._live: dict[int, Conversation] = {}  # with room
        self._past: Bounded[int, Conversation] = Bounded(max_sessions)  # silent for longest first
        self._tickets: Bounded[int, float] = Bounded(max_sessions)  # of those that had no turn
        self._rooms: dict[CandidateId, Room] = {}
        self._until: list[tuple[float, int]] = []  # heap: when a silent one may lose its room
        self.pause_s = _FIRST_PAUSE_S
        self.turn_s = _FIRST_TURN_S
        self._share = _FIRST_SHARE  # of conversations that go on
        self._recent: OrderedDict[int, float] = OrderedDict()  # live without room: silent since
        self._needs: dict[int, _Need] = {}  # of all live ones
        self._working_sets: dict[CandidateId, WorkingSet] = {}
        self._arrivals = RecentRate(*_ARRIVALS_S)

    def __len__(self) -> int:
        return len(self._live) + len(self._past)

    # -- turns -------------------------------------------------------------------------------

    def asked(self, session: int, now_s: float, parent: int | None = None) -> float:
        """Record that a turn has come, sent or not; return the conversation's ticket.

        The pause ends here: a wait in the queue is no pause. A sub-agent has its parent's ticket.
        """
        entry = self.last(session)
        if entry is None:
            ticket_s = self._tickets.get(session)
            if ticket_s is None:
                above = self.last(parent) if parent is not None else None
                ticket_s = now_s if above is None else min(above.ticket_s, now_s)
                self._tickets.put(session, ticket_s)
            return ticket_s
        if not entry.is_open:
            self._arrivals.add(now_s)
            if not entry.num_running:
                self._learn_return(session, entry, now_s)
                entry.num_pauses += 1
                entry.paused_s += now_s - entry.last_s
            entry.is_open = True
        if entry.has_room and not entry.num_running:
            self._keep(session, entry, now_s + _ASKED_S)
        return entry.ticket_s

    def left(self, session: int, now_s: float) -> None:
        """Record that a client left the queue: its turn will not be sent."""
        entry = self.last(session)
        if entry is not None:
            entry.is_open = False
            if entry.has_room and not entry.num_running:
                self._pause(session, entry, now_s)

    def begin(
        self,
        session: int,
        candidate: CandidateId,
        num_tokens: int,
        num_cached_tokens: int,
        now_s: float,
        *,
        cost_s: float = 0.0,
        is_batch: bool = False,
        is_visit: bool = False,
    ) -> None:
        """Book a turn of `num_tokens` of prompt, of which `num_cached_tokens` are cached there.

        Args:
            cost_s: To compute all of the prompt, `num_tokens`.
            is_visit: It was sent without room, and has none after it.
        """
        self.expire(now_s)
        entry = self.last(session)
        if entry is None:
            ticket_s = self._tickets.pop(session, now_s)
            entry = Conversation(candidate, now_s, ticket_s, num_shared_tokens=num_cached_tokens)
            self._arrivals.add(now_s)
        else:
            self.asked(session, now_s)
        self._take(session)
        num_own_tokens = max(0, num_tokens - entry.num_shared_tokens)
        if entry.candidate != candidate:
            entry.candidate, entry.num_tokens = candidate, 0
        elif entry.num_running:  # sub-agents under one id
            num_own_tokens += entry.num_own_tokens
        entry.num_own_tokens = num_own_tokens
        entry.cost_s = cost_s * num_own_tokens / max(1, num_tokens)
        entry.is_batch = is_batch
        entry.is_visitor = is_visit
        entry.num_kept_tokens = num_own_tokens if self._hold_s(entry) else 0
        entry.is_open = entry.has_ended = False
        entry.last_s = entry.begun_s = now_s
        entry.num_running += 1
        self._put(session, entry)

    def computed(self, session: int, candidate: CandidateId, num_tokens: int) -> None:
        """Record that a turn's prompt is computed; ignored if the conversation has moved on."""
        entry = self.last(session)
        if entry is not None and entry.candidate == candidate:
            entry.num_tokens = num_tokens

    def end(self, session: int, num_tokens: int, now_s: float, *, is_answered: bool = True) -> None:
        """End the booking of a turn of `num_tokens`; unknown ones are ignored.

        Not `is_answered`: another booking of the same turn may follow.
        """
        entry = self._live.get(session)
        if entry is None or not entry.num_running:
            return
        if is_answered:
            self.turn_s += (1.0 - _DECAY) * (now_s - entry.begun_s - self.turn_s)
        entry.num_running -= 1
        entry.last_s = now_s
        if entry.num_running:
            self._take(session)
            num_over_tokens = max(0, num_tokens - entry.num_shared_tokens)
            entry.num_own_tokens = max(0, entry.num_own_tokens - num_over_tokens)
            entry.num_kept_tokens = min(entry.num_own_tokens, entry.num_kept_tokens)
            self._put(session, entry)
        else:
            entry.is_open = not is_answered
            self._pause(session, entry, now_s)

    def finish(self, session: int) -> bool:
        """End a conversation whose client says that it is over; False: it is not live.

        A turn that still runs keeps its room until it ends.
        """
        entry = self.last(session)
        if entry is None:
            return False
        entry.has_ended = True
        if session not in self._needs:
            return False
        if entry.has_room:
            self.leave(session)
        else:
            self._forget(session)
        return True

    def learn(self, session: int, candidate: CandidateId, num_tokens: int, now_s: float) -> None:
        """Add what another router knows of a conversation that is new here."""
        if session not in self._live and session not in self._past:
            found = Conversation(candidate, now_s, now_s, num_tokens=num_tokens, goes_on=True)
            self._past.put(session, found)

    def leave(self, session: int) -> None:
        """Take the room of a conversation unless a turn runs; it keeps its ticket."""
        entry = self._live.get(session)
        if entry is not None and not entry.num_running:
            self._take(session)
            self._past.put(session, entry)
            if entry.has_ended:
                self._forget(session)
                self._share *= 1.0 if entry.goes_on else _DECAY
            else:
                self._remember(session, entry, entry.last_s)

    def expire(self, now_s: float) -> None:
        """Take the room of conversations that have been silent for too long."""
        while self._until and self._until[0][0] <= now_s:
            until_s, session = heappop(self._until)
            entry = self._live.get(session)
            if entry is not None and not entry.num_running and entry.until_s == until_s:
                self.leave(session)
        while self._recent:
            session, since_s = next(iter(self._recent.items()))
            if now_s - since_s <= PATIENCE * self.pause_s:
                break
            self._forget(session)
            entry = self._past.get(session)
            if entry is not None and entry.is_open and now_s - entry.last_s <= self._ttl_s:
                self._remember(session, entry, now_s)  # its turn waits
            elif entry is not None and not entry.goes_on:
                self._share *= _DECAY
        while self._past:
            oldest = next(iter(self._past.values()))
            if now_s - oldest.last_s <= self._ttl_s:
                break
            self._past.popitem(last=False)

    def remove(self, candidate: CandidateId) -> None:
        """Take the rooms of a candidate that is gone; O(sessions)."""
        for session in list(self.at(candidate).sessions):
            self._live[session].num_running = 0
            self.leave(session)
        for session in [s for s, need in self._needs.items() if need.candidate == candidate]:
            self._forget(session)

    # -- questions ---------------------------------------------------------------------------

    def get(self, session: int, now_s: float) -> Conversation | None:
        """Find a conversation; None if it was never seen or its time is over."""
        entry = self.last(session)
        return entry if entry is not None and now_s - entry.last_s <= self._ttl_s else None

    def last(self, session: int) -> Conversation | None:
        """Find a conversation, whenever its last turn was."""
        return self._live.get(session) or self._past.get(session)

    def arrivals_per_s(self, now_s: float) -> float:
        """Return how many turns a second came recently, for all candidates."""
        return self._arrivals.at(now_s)

    def comes_seldom(self, session: int) -> bool:
        """Return whether a conversation comes for single turns, as of its turn that has come.

        It has no room, and it is new or pauses for so long that it would not keep any.
        """
        entry = self.last(session)
        if entry is None:
            return True
        return not entry.has_room and entry.paused_s > _SELDOM * self.pause_s * entry.num_pauses

    def num_running_tokens(self, candidate: CandidateId) -> int:
        """Sum the own tokens of the conversations whose turns run at a candidate."""
        each = self.at(candidate).sessions.values()
        return sum([one.num_own_tokens for one in each if one.num_running])

    def num_sessions(self, candidates: Iterable[CandidateId], but: int | None) -> tuple[int, ...]:
        """Count the conversations with room at each candidate without `but`; empty: none has."""
        if not self._rooms:
            return ()
        home = self.home(but) if but is not None else None
        at = self._rooms.get
        return tuple([at(id_, NO_ROOM).num_sessions - (id_ == home) for id_ in candidates])

    def at(self, candidate: CandidateId) -> Room:
        """Return who has room at a candidate, not to be changed. `expire` first."""
        return self._rooms.get(candidate, NO_ROOM)

    def working_set(self, candidate: CandidateId) -> WorkingSet:
        """Return what a candidate's live conversations need, with room or without.

        A conversation is live until it has been silent for several usual pauses.
        """
        return self._working_sets.get(candidate, NO_WORKING_SET)

    def lives_at(self, session: int) -> CandidateId | None:
        """Return the candidate of a live conversation; None: it is not live."""
        need = self._needs.get(session)
        return need.candidate if need is not None else None

    def rooms(self) -> Iterable[CandidateId]:
        """Return the candidates where any conversation has room."""
        return self._rooms

    def home(self, session: int) -> CandidateId | None:
        """Return the candidate where a conversation has room; None: it has none."""
        entry = self._live.get(session)
        return entry.candidate if entry is not None else None

    def bound_to(self, session: int) -> CandidateId | None:
        """Return the only candidate that a conversation's next turn may go to; None: there is none.

        Turns that overlap may go to several: sub-agents under one id.
        """
        entry = self._live.get(session)
        return entry.candidate if entry is not None and not entry.num_running else None

    def num_own_tokens(self, session: int, num_tokens: int, num_cached_tokens: int) -> int:
        """Return how many own tokens a conversation has with a turn of `num_tokens`."""
        entry = self.last(session)
        num_shared = num_cached_tokens if entry is None else entry.num_shared_tokens
        return max(0, num_tokens - num_shared)

    # -- private -----------------------------------------------------------------------------

    def _learn_return(self, session: int, entry: Conversation, now_s: float) -> None:
        """Learn from a pause that is over."""
        pause_s = min(now_s - entry.last_s, _MOST_PAUSE_S)
        self.pause_s += (1.0 - _DECAY) * (pause_s - self.pause_s)
        if not entry.goes_on and (entry.has_room or session in self._recent):
            self._share += (1.0 - _DECAY) * (1.0 - self._share)
        entry.goes_on = True

    def _pause(self, session: int, entry: Conversation, now_s: float) -> None:
        """Begin a pause: the conversation keeps its room while its blocks are worth it.

        Computing it again delays all that have room there. So its room is worth `n x cost`, times
        the chance that it returns. If it is not expected within that time, it leaves at once.
        """
        hold_s = self._hold_s(entry)
        if not hold_s or entry.is_visitor or entry.has_ended:
            self.leave(session)
        else:
            self._keep(session, entry, now_s + hold_s)

    def _hold_s(self, entry: Conversation) -> float:
        returns = 1.0 if entry.goes_on else self._share
        num_there = self.at(entry.candidate).num_sessions + (not entry.has_room)
        hold_s = returns * num_there * entry.cost_s
        return 0.0 if hold_s < self.pause_s else min(hold_s, PATIENCE * self.pause_s)

    def _remember(self, session: int, entry: Conversation, since_s: float) -> None:
        """Count a conversation without room until it has been silent for long."""
        self._count(session, entry)
        self._recent[session] = since_s

    def _count(self, session: int, entry: Conversation) -> None:
        """Count what a live conversation needs, in place of what it needed before."""
        self._forget(session)
        num_tokens = entry.num_own_tokens
        num_expected = num_tokens * (1.0 if entry.goes_on else self._share)
        self._needs[session] = _Need(entry.candidate, num_tokens, num_expected)
        there = self._working_sets.setdefault(entry.candidate, WorkingSet())
        there.num_sessions += 1
        there.num_tokens += num_tokens
        there.num_expected_tokens += num_expected

    def _forget(self, session: int) -> None:
        """Count a conversation no longer: it is not live."""
        self._recent.pop(session, None)
        need = self._needs.pop(session, None)
        if need is None:
            return
        there = self._working_sets[need.candidate]
        there.num_sessions -= 1
        there.num_tokens -= need.num_tokens
        there.num_expected_tokens -= need.num_expected_tokens
        if not there.num_sessions:
            del self._working_sets[need.candidate]  # floats drift

    def _keep(self, session: int, entry: Conversation, until_s: float) -> None:
        entry.until_s = until_s
        heappush(self._until, (until_s, session))

    def _take(self, session: int) -> None:
        """Take a conversation's room, if it has any."""
        entry = self._live.pop(session, None)
        if entry is not None:
            room = self._rooms[entry.candidate]
            del room.sessions[session]
            room.num_tokens -= entry.num_kept_tokens
            room.num_batch_tokens -= entry.num_kept_tokens * entry.is_batch
            if not room.sessions:
                del self._rooms[entry.candidate]
            entry.has_room = False

    def _put(self, session: int, entry: Conversation) -> None:
        """Give a conversation room where it is."""
        self._past.pop(session, None)
        self._count(session, entry)
        self._live[session] = entry
        room = self._rooms.setdefault(entry.candidate, Room())
        room.sessions[session] = entry
        room.num_tokens += entry.num_kept_tokens
        room.num_batch_tokens += entry.num_kept_tokens * entry.is_batch
        entry.has_room = True
