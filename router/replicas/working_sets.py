"""Conversations that are alive, and how much of each cache they take.

A conversation's footprint are the tokens that no other one shares with it: all of its last prompt
but what was found in the cache when it began (a system prompt, a parent's context). It is alive
until it has been silent for some times the usual pause between two turns of one conversation.
One of a single turn so far counts by the share of those that went on, of late: what is asked once
alone needs no place in a cache. It is of the class that its last turn had.
Other routers' turns count as ours do, as their notes come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.replicas.recent import RecentRate

PATIENCE: Final = 3.0
"""Usual pauses after which a silent conversation is taken to be over, until it goes on."""

MIN_PATIENCE_S: Final = 0.5
_FIRST_PAUSE_S: Final = 5.0  # until one was seen: about what an agent's tool takes
_FIRST_TURN_S: Final = 5.0  # likewise
_LEAST_CYCLE_S: Final = 1e-3
_TIME_DECAY: Final = 0.95  # of pauses and turns: half of the weight lies on the last 14
_SHARE_DECAY: Final = 0.95
_FIRST_SHARE: Final = 0.2
"""Of conversations that go on, until some did or did not. Those that do show it within a pause, the
others only when they are over: with a half, bursts of single prompts at a fresh router waited 7 s
for room while real engines stood idle."""

_LONGEST_TURN_S: Final = 3600.0  # who ran for longer has lost its end
_MAX_OVER: Final = 100_000
_ARRIVALS_S: Final = (30.0, 3.0)  # of their pace: time constant, and least time to judge by


class WorkingSet(Struct, gc=False):
    """What lives at one candidate."""

    num_sessions: int = 0
    num_tokens: int = 0
    num_once_tokens: int = 0  # of these, of conversations of a single turn


NO_WORKING_SET: Final = WorkingSet()


class _Session(Struct, gc=False):
    candidate: CandidateId
    num_own_tokens: int
    num_shared_tokens: int
    since_s: float  # it has been there, without having been over in between
    last_s: float  # a turn of it began or ended
    begun_s: float  # its last turn
    num_running: int  # turns
    goes_on: bool  # it has had a second turn
    is_batch: bool  # its class
    is_asked: bool = False  # a turn has come that is not sent yet


class WorkingSets:
    """Live conversations by digest; every operation is O(1) amortised, unless it says otherwise."""

    __slots__ = ("_arrivals", "_batch_sets", "_over", "_pause_s", "_sessions", "_sets", "_share",
                 "_turn_s")  # fmt: skip

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, _Session] = OrderedDict()  # silent for longest first
        self._sets: dict[CandidateId, WorkingSet] = {}
        self._batch_sets: dict[CandidateId, WorkingSet] = {}  # of these, what is of class batch
        self._over: OrderedDict[int, int] = OrderedDict()  # what silent ones shared, if they go on
        self._pause_s = _FIRST_PAUSE_S
        self._turn_s = _FIRST_TURN_S
        self._share = _FIRST_SHARE  # of conversations that go on
        self._arrivals = RecentRate(*_ARRIVALS_S)

    @property
    def patience_s(self) -> float:
        """For how long a silent conversation is taken to be alive."""
        return max(MIN_PATIENCE_S, PATIENCE * self._pause_s)

    @property
    def cycle_s(self) -> float:
        """In what time a conversation comes back: a turn at its engine, and the pause after it."""
        return max(_LEAST_CYCLE_S, self._turn_s + self._pause_s)

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
        """Note a turn that is sent: `num_tokens` of prompt, of which so many are cached there."""
        self.expire(now_s)
        self._arrivals.add(now_s)
        self.asked(session, now_s)
        known = self._take(session)
        if known is None:
            goes_on = session in self._over
            num_shared = self._over.pop(session, num_cached_tokens)
            entry = _Session(candidate, 0, num_shared, now_s, now_s, now_s, 1, goes_on, is_batch)
        else:
            entry = known
            entry.candidate = candidate
            entry.is_batch = is_batch
            entry.is_asked = False
            entry.last_s = entry.begun_s = now_s
            entry.num_running += 1
        entry.num_own_tokens = max(0, num_tokens - entry.num_shared_tokens)
        self._put(session, entry)

    def asked(self, session: int, now_s: float) -> None:
        """Note that a further turn has come of a conversation that is alive, sent or not yet.

        Its pause is over: what it waits in a router from here on is none. If that counted, waits
        would make usual pauses longer, and these keep room for the silent, for whom others wait.
        """
        entry = self._sessions.get(session)
        if entry is None:
            return
        if not entry.num_running and not entry.is_asked:
            entry.is_asked = True
            pause_s = now_s - entry.last_s
            self._pause_s += (1.0 - _TIME_DECAY) * (pause_s - self._pause_s)
        if not entry.goes_on:
            entry.goes_on = True
            for sets in self._sets_of(entry):
                sets[entry.candidate].num_once_tokens -= entry.num_own_tokens
            self._share += (1.0 - _SHARE_DECAY) * (1.0 - self._share)

    def end(self, session: int, now_s: float) -> None:
        """Note that a turn is over, however it ended; unknown ones are ignored."""
        entry = self._take(session)
        if entry is not None:
            self._turn_s += (1.0 - _TIME_DECAY) * (now_s - entry.begun_s - self._turn_s)
            entry.num_running = max(0, entry.num_running - 1)
            entry.last_s = now_s
            self._put(session, entry)

    def arrivals_per_s(self, now_s: float) -> float:
        """Return the pace at which turns come lately, to all candidates."""
        return self._arrivals.at(now_s)

    def num_sessions(self, candidates: Iterable[CandidateId], but: int | None) -> tuple[int, ...]:
        """Count who lives at each candidate, `but` left out; empty: none lives."""
        if not self._sets:
            return ()
        home = self.home(but) if but is not None else None
        at = self._sets.get
        return tuple([at(id_, NO_WORKING_SET).num_sessions - (id_ == home) for id_ in candidates])

    def at(self, candidate: CandidateId) -> WorkingSet:
        """Return what lives at a candidate; not to be changed. `expire` first."""
        return self._sets.get(candidate, NO_WORKING_SET)

    def num_tokens_at(self, candidate: CandidateId, *, for_batch: bool = True) -> float:
        """Return how many tokens at a candidate are expected to be asked for again.

        Not `for_batch`: by interactive requests. They do not wait for the room of others.
        """
        num_tokens = self._expected(self.at(candidate))
        if not for_batch and candidate in self._batch_sets:
            num_tokens -= self._expected(self._batch_sets[candidate])
        return num_tokens

    def _expected(self, found: WorkingSet) -> float:
        return found.num_tokens - (1.0 - self._share) * found.num_once_tokens

    def home(self, session: int) -> CandidateId | None:
        """Return where a live conversation is; None: it is not alive."""
        entry = self._sessions.get(session)
        return entry.candidate if entry is not None else None

    def num_own_tokens(self, session: int, num_tokens: int, num_cached_tokens: int) -> int:
        """Return the footprint that a turn of `num_tokens` would have."""
        entry = self._sessions.get(session)
        if entry is not None:
            num_shared = entry.num_shared_tokens
        else:
            num_shared = self._over.get(session, num_cached_tokens)
        return max(0, num_tokens - num_shared)

    def num_last_tokens(self, session: int) -> int | None:
        """Return the length of a live conversation's last prompt; None: it is not alive."""
        entry = self._sessions.get(session)
        return None if entry is None else entry.num_own_tokens + entry.num_shared_tokens

    def num_tokens_before(self, session: int, *, for_batch: bool = False) -> float:
        """Return `num_tokens_at` a session's home of those that have room before it; O(sessions).

        Of its class those that came before it; and `for_batch` all interactive ones.
        """
        own, share = self._sessions[session], self._share
        return sum(
            [
                entry.num_own_tokens * (1.0 if entry.goes_on else share)
                for entry in self._sessions.values()
                if entry.candidate == own.candidate
                and entry is not own
                and entry.is_batch <= for_batch
                and (entry.since_s < own.since_s or entry.is_batch < for_batch)
            ]
        )

    def expire(self, now_s: float) -> None:
        """Let go of conversations that are over."""
        patience_s = self.patience_s
        while self._sessions:
            session, entry = next(iter(self._sessions.items()))
            if now_s - entry.last_s <= patience_s:
                break
            self._take(session)
            if entry.num_running and now_s - entry.begun_s <= _LONGEST_TURN_S:
                entry.last_s = now_s  # a long answer; it is looked at again in a while
                self._put(session, entry)
            else:
                if not entry.goes_on:
                    self._share *= _SHARE_DECAY
                self._over[session] = entry.num_shared_tokens
                if len(self._over) > _MAX_OVER:
                    self._over.popitem(last=False)

    def remove(self, candidate: CandidateId) -> None:
        """Forget all that lives at a candidate that is gone; O(sessions)."""
        for session in [s for s, e in self._sessions.items() if e.candidate == candidate]:
            self._take(session)

    def _take(self, session: int) -> _Session | None:
        entry = self._sessions.pop(session, None)
        if entry is not None:
            for sets in self._sets_of(entry):
                found = sets[entry.candidate]
                found.num_sessions -= 1
                found.num_tokens -= entry.num_own_tokens
                if not entry.goes_on:
                    found.num_once_tokens -= entry.num_own_tokens
                if not found.num_sessions:
                    del sets[entry.candidate]
        return entry

    def _put(self, session: int, entry: _Session) -> None:
        """Put a session behind all others: it is the last to be silent."""
        self._sessions[session] = entry
        for sets in self._sets_of(entry):
            found = sets.get(entry.candidate)
            if found is None:
                found = sets[entry.candidate] = WorkingSet()
            found.num_sessions += 1
            found.num_tokens += entry.num_own_tokens
            if not entry.goes_on:
                found.num_once_tokens += entry.num_own_tokens

    def _sets_of(self, entry: _Session) -> tuple[dict[CandidateId, WorkingSet], ...]:
        return (self._sets, self._batch_sets) if entry.is_batch else (self._sets,)
