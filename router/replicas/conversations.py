"""Conversations: where the last turn of each ran, and how much of a cache the live ones need.

The *own tokens* of a conversation are the tokens that it shares with no other conversation. They
are its last prompt without the part that was cached when the conversation began (a system prompt,
or the context of a parent).

A conversation is *live* until it has been silent for several usual pauses between two turns. A
conversation of one turn counts by the share of conversations that recently had a second turn: a
question that is asked once needs no place in a cache.

Turns of other routers count as our own, as soon as their notes arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.base.bounded import Bounded
from router.replicas.recent import RecentRate

PATIENCE: Final = 3.0
"""A live conversation is over after this many usual pauses of silence."""

MIN_PATIENCE_S: Final = 0.5
_FIRST_PAUSE_S: Final = 5.0  # until a pause was seen: about what an agent's tool takes
_MOST_PAUSE_S: Final = 30.0
"""A longer pause counts as this long, so that persons who are away keep no room from others."""

_FIRST_TURN_S: Final = 5.0  # until a turn was seen
_LEAST_CYCLE_S: Final = 1e-3
_TIME_DECAY: Final = 0.95  # of pauses and turns: half of the weight lies on the last 14
_SHARE_DECAY: Final = 0.95
_FIRST_SHARE: Final = 0.2
"""The share of conversations that go on, until some did or did not. With 0.5, bursts of single
prompts at a fresh router waited 7 s for room while real engines stood idle."""

_LONGEST_TURN_S: Final = 3600.0  # the end of a longer turn was lost
_ARRIVALS_S: Final = (30.0, 3.0)  # of their rate: time constant, and least time to judge by


class WorkingSet(Struct, gc=False):
    """What the live conversations of one candidate need."""

    num_sessions: int = 0
    num_tokens: int = 0
    num_once_tokens: int = 0  # of these, of conversations of a single turn


NO_WORKING_SET: Final = WorkingSet()


class Conversation(Struct, gc=False):
    """One conversation as of its last turn."""

    candidate: CandidateId
    last_s: float  # when a turn began or ended
    num_tokens: int = 0  # of the last prompt that was computed at the candidate
    num_own_tokens: int = 0
    num_shared_tokens: int = 0
    since_s: float = 0.0  # live without a break since then
    begun_s: float = 0.0  # its last turn
    num_running: int = 0  # turns
    goes_on: bool = False  # it has had a second turn
    is_batch: bool = False  # the class of its last turn
    is_asked: bool = False  # a turn has arrived and is not sent yet
    has_ended: bool = False  # its client says so


class Conversations:
    """Conversations by digest; every operation is O(1) amortised, unless it says otherwise.

    Args:
        max_sessions: How many conversations are remembered that are over; the oldest goes first.
        ttl_s: For how long they are remembered.
    """

    __slots__ = (
        "_arrivals",
        "_batch_sets",
        "_live",
        "_past",
        "_pause_s",
        "_sets",
        "_sets_of",
        "_share",
        "_ttl_s",
        "_turn_s",
        "max_sessions",
        "patience_s",
    )  # fmt: skip

    def __init__(self, *, max_sessions: int = 100_000, ttl_s: float = 3600.0) -> None:
        if max_sessions < 1 or not ttl_s > 0.0:
            raise ValueError(f"sessions need room and time: {max_sessions=} {ttl_s=}")
        self.max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._live: OrderedDict[int, Conversation] = OrderedDict()  # silent for longest first
        self._past: Bounded[int, Conversation] = Bounded(max_sessions)  # over for longest first
        self._sets: dict[CandidateId, WorkingSet] = {}
        self._batch_sets: dict[CandidateId, WorkingSet] = {}  # the part of class batch
        self._sets_of = {False: (self._sets,), True: (self._sets, self._batch_sets)}  # by is_batch
        self._pause_s = _FIRST_PAUSE_S
        self.patience_s = PATIENCE * _FIRST_PAUSE_S  # how long a silent one counts as live
        self._turn_s = _FIRST_TURN_S
        self._share = _FIRST_SHARE  # of conversations that go on
        self._arrivals = RecentRate(*_ARRIVALS_S)

    def __len__(self) -> int:
        return len(self._live) + len(self._past)

    # -- turns -------------------------------------------------------------------------------

    def begin(
        self,
        session: int,
        candidate: CandidateId,
        num_tokens: int,
        num_cached_tokens: int,
        now_s: float,
        *,
        is_batch: bool = False,
    ) -> None:
        """Start a turn of `num_tokens` of prompt, of which `num_cached_tokens` are cached there."""
        self.expire(now_s)
        self._arrivals.add(now_s)
        self.asked(session, now_s)
        entry = self._take(session)
        if entry is None:
            entry = self._resume(session, candidate, num_cached_tokens, now_s)
        if entry.candidate != candidate:
            entry.candidate, entry.num_tokens = candidate, 0
        entry.is_batch = is_batch
        entry.is_asked = entry.has_ended = False
        entry.last_s = entry.begun_s = now_s
        entry.num_running += 1
        entry.num_own_tokens = max(0, num_tokens - entry.num_shared_tokens)
        self._put(session, entry)

    def asked(self, session: int, now_s: float) -> None:
        """Record that another turn of a conversation has arrived, sent or not.

        The pause ends here, even if the conversation was over. If only pauses of live conversations
        counted, a usual pause that is too short would never grow again. If the wait in the queue
        counted as pause, long waits would make the usual pause longer, keep room for silent
        conversations, and so make waits longer.
        """
        live = self._live.get(session)
        entry = live or self._past.get(session)
        if entry is None:
            return
        if not entry.num_running and not entry.is_asked:
            entry.is_asked = True
            pause_s = min(now_s - entry.last_s, _MOST_PAUSE_S)
            self._pause_s += (1.0 - _TIME_DECAY) * (pause_s - self._pause_s)
            self.patience_s = max(MIN_PATIENCE_S, PATIENCE * self._pause_s)
        if live is not None and not entry.goes_on:
            entry.goes_on = True
            for sets in self._sets_of[entry.is_batch]:
                sets[entry.candidate].num_once_tokens -= entry.num_own_tokens
            self._share += (1.0 - _SHARE_DECAY) * (1.0 - self._share)

    def computed(self, session: int, candidate: CandidateId, num_tokens: int) -> None:
        """Record that a turn's prompt is computed; ignored if the conversation has moved on."""
        entry = self._live.get(session) or self._past.get(session)
        if entry is not None and entry.candidate == candidate:
            entry.num_tokens = num_tokens

    def end(self, session: int, now_s: float) -> None:
        """Finish a turn, whatever its outcome; unknown ones are ignored."""
        entry = self._live.get(session)
        if entry is not None:
            self._turn_s += (1.0 - _TIME_DECAY) * (now_s - entry.begun_s - self._turn_s)
            entry.num_running = max(0, entry.num_running - 1)
            entry.last_s = now_s
            self._live.move_to_end(session)  # it was active last
            if entry.has_ended and not entry.num_running:
                self._take(session)
                self._retire(session, entry)

    def finish(self, session: int) -> bool:
        """End a conversation whose client says that it is over; False: it is not live.

        A turn that still runs keeps its place until it ends.
        """
        entry = self.last(session)
        if entry is None:
            return False
        entry.has_ended = True
        if session not in self._live:
            return False
        if not entry.num_running:
            self._take(session)
            self._retire(session, entry)
        return True

    def learn(self, session: int, candidate: CandidateId, num_tokens: int, now_s: float) -> None:
        """Add what another router knows of a conversation that is new here."""
        if session not in self._live and session not in self._past:
            self._past.put(session, Conversation(candidate, now_s, num_tokens, goes_on=True))

    def expire(self, now_s: float) -> None:
        """Move conversations that are over out of the working sets."""
        while self._live:
            session, entry = next(iter(self._live.items()))
            if now_s - entry.last_s <= self.patience_s:
                break
            self._take(session)
            if entry.num_running and now_s - entry.begun_s <= _LONGEST_TURN_S:
                entry.last_s = now_s  # a long answer; it is looked at again later
                self._put(session, entry)
            else:
                self._retire(session, entry)
        while self._past:
            oldest = next(iter(self._past.values()))
            if now_s - oldest.last_s <= self._ttl_s:
                break
            self._past.popitem(last=False)

    def remove(self, candidate: CandidateId) -> None:
        """End the conversations of a candidate that is gone; O(sessions)."""
        for session in [s for s, e in self._live.items() if e.candidate == candidate]:
            entry = self._take(session)
            assert entry is not None
            self._past.put(session, entry)

    # -- questions ---------------------------------------------------------------------------

    def get(self, session: int, now_s: float) -> Conversation | None:
        """Find a conversation; None if it was never seen or its time is over."""
        entry = self._live.get(session) or self._past.get(session)
        return entry if entry is not None and now_s - entry.last_s <= self._ttl_s else None

    def last(self, session: int) -> Conversation | None:
        """Find a conversation, whenever its last turn was."""
        return self._live.get(session) or self._past.get(session)

    @property
    def cycle_s(self) -> float:
        """How long a turn at an engine and the pause after it take together."""
        return max(_LEAST_CYCLE_S, self._turn_s + self._pause_s)

    def arrivals_per_s(self, now_s: float) -> float:
        """Return how many turns a second were sent recently, to all candidates."""
        return self._arrivals.at(now_s)

    def num_sessions(self, candidates: Iterable[CandidateId], but: int | None) -> tuple[int, ...]:
        """Count the live conversations of each candidate without `but`; empty: there are none."""
        if not self._sets:
            return ()
        entry = self._live.get(but) if but is not None else None
        home = entry.candidate if entry is not None else None
        at = self._sets.get
        return tuple([at(id_, NO_WORKING_SET).num_sessions - (id_ == home) for id_ in candidates])

    def at(self, candidate: CandidateId) -> WorkingSet:
        """Return a candidate's working set, not to be changed. `expire` first."""
        return self._sets.get(candidate, NO_WORKING_SET)

    def num_tokens_at(self, candidate: CandidateId, *, for_batch: bool = True) -> float:
        """Return how many tokens at a candidate are expected to be used again.

        Not `for_batch`: by interactive requests alone. They do not wait for room of batch requests.
        """
        num_tokens = self._expected(self._sets.get(candidate, NO_WORKING_SET))
        if not for_batch and candidate in self._batch_sets:
            num_tokens -= self._expected(self._batch_sets[candidate])
        return num_tokens

    def goes_on(self, session: int) -> bool:
        """Return whether a conversation has had a second turn."""
        entry = self.last(session)
        return entry is not None and entry.goes_on

    def home(self, session: int) -> CandidateId | None:
        """Return the candidate of a live conversation; None: it is not live."""
        entry = self._live.get(session)
        return entry.candidate if entry is not None else None

    def num_own_tokens(self, session: int, num_tokens: int, num_cached_tokens: int) -> int:
        """Return how many own tokens a conversation has with a turn of `num_tokens`."""
        entry = self._live.get(session) or self._past.get(session)
        num_shared = num_cached_tokens if entry is None else entry.num_shared_tokens
        return max(0, num_tokens - num_shared)

    def num_tokens_before(self, session: int, *, for_batch: bool = False) -> float:
        """Return `num_tokens_at` of the conversations that get room before this one; O(sessions).

        Those are the older ones of its class at its candidate. With `for_batch`, all interactive
        ones are also before it.
        """
        own, share = self._live[session], self._share
        return sum(
            [
                entry.num_own_tokens * (1.0 if entry.goes_on else share)
                for entry in self._live.values()
                if entry.candidate == own.candidate
                and entry is not own
                and entry.is_batch <= for_batch
                and (entry.since_s < own.since_s or entry.is_batch < for_batch)
            ]
        )

    # -- private -----------------------------------------------------------------------------

    def _expected(self, found: WorkingSet) -> float:
        return found.num_tokens - (1.0 - self._share) * found.num_once_tokens

    def _resume(
        self, session: int, candidate: CandidateId, num_cached_tokens: int, now_s: float
    ) -> Conversation:
        """Make a conversation live that is new, or that was over."""
        entry = self._past.pop(session, None)
        if entry is None:
            return Conversation(
                candidate, now_s, num_shared_tokens=num_cached_tokens, since_s=now_s
            )
        entry.goes_on, entry.since_s, entry.num_running = True, now_s, 0
        return entry

    def _retire(self, session: int, entry: Conversation) -> None:
        """Remember a conversation that is over, and whether it had a second turn."""
        if not entry.goes_on:
            self._share *= _SHARE_DECAY
        self._past.put(session, entry)

    def _take(self, session: int) -> Conversation | None:
        entry = self._live.pop(session, None)
        if entry is not None:
            for sets in self._sets_of[entry.is_batch]:
                found = sets[entry.candidate]
                found.num_sessions -= 1
                found.num_tokens -= entry.num_own_tokens
                if not entry.goes_on:
                    found.num_once_tokens -= entry.num_own_tokens
                if not found.num_sessions:
                    del sets[entry.candidate]
        return entry

    def _put(self, session: int, entry: Conversation) -> None:
        """Add a conversation behind all others: it was active last."""
        self._live[session] = entry
        for sets in self._sets_of[entry.is_batch]:
            found = sets.get(entry.candidate)
            if found is None:
                found = sets[entry.candidate] = WorkingSet()
            found.num_sessions += 1
            found.num_tokens += entry.num_own_tokens
            if not entry.goes_on:
                found.num_once_tokens += entry.num_own_tokens
