"""Sessions: where the last turn of each ran, and how long its prompt was."""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId


class SessionView(Struct, frozen=True, kw_only=True, gc=False):
    """One session as of its last turn."""

    candidate: CandidateId
    last_seen_s: float
    num_tokens: int = 0  # of the last prompt that was computed there; of an unknown one a guess


class Sessions:
    """The last turns of at most `max_sessions` sessions, for `ttl_s` each; least recent goes."""

    __slots__ = ("_seen", "_ttl_s", "max_sessions")

    def __init__(self, *, max_sessions: int = 100_000, ttl_s: float = 3600.0) -> None:
        if max_sessions < 1 or not ttl_s > 0.0:
            raise ValueError(f"sessions need room and time: {max_sessions=} {ttl_s=}")
        self.max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._seen: OrderedDict[int, SessionView] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, session_hash: int, now_s: float) -> SessionView | None:
        """Find a session; None if it was never seen or its time is over."""
        session = self._seen.get(session_hash)
        if session is None or now_s - session.last_seen_s > self._ttl_s:
            return None
        return session

    def last(self, session_hash: int) -> SessionView | None:
        """Find a session's last turn, whenever that was."""
        return self._seen.get(session_hash)

    def note(self, session_hash: int, candidate: CandidateId, now_s: float) -> SessionView:
        """Record a turn that is sent to `candidate`; O(1) amortised."""
        known = self.get(session_hash, now_s)
        is_same = known is not None and known.candidate == candidate
        session = SessionView(
            candidate=candidate,
            last_seen_s=now_s,
            num_tokens=known.num_tokens if known is not None and is_same else 0,
        )
        self._seen[session_hash] = session
        self._seen.move_to_end(session_hash)
        self._drop_old(now_s)
        return session

    def computed(self, session_hash: int, candidate: CandidateId, num_tokens: int) -> None:
        """Record that a turn's prompt is computed; where the session has moved on, do nothing."""
        session = self._seen.get(session_hash)
        if session is not None and session.candidate == candidate:
            self._seen[session_hash] = replace(session, num_tokens=num_tokens)

    def learn(self, session_hash: int, session: SessionView) -> None:
        """Take over what another router knows of a session that is new here; else do nothing."""
        if session_hash not in self._seen:
            self._seen[session_hash] = session
            self._drop_old(session.last_seen_s)

    def _drop_old(self, now_s: float) -> None:
        """Drop the least recent while there are too many, or while they are expired."""
        while self._seen:  # pragma: no branch
            oldest = next(iter(self._seen.values()))
            if len(self._seen) <= self.max_sessions and now_s - oldest.last_seen_s <= self._ttl_s:
                break
            self._seen.popitem(last=False)
