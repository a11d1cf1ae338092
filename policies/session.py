"""Policies that keep a conversation together, regardless of its content."""

from __future__ import annotations

from typing import ClassVar

from policies.hashing import rendezvous
from policies.load import least_loaded, load_text, pick
from policies.policy import Policy
from policies.view import Decision, Snapshot


class SessionHash(Policy, frozen=True, kw_only=True):
    """Choose by a rendezvous hash of the session: `argmax over candidates of mix(hash(candidate)
    xor session)`. Without a session it hashes the prompt's first blocks, without tokens it draws.
    There is no state, and every router agrees. But an overloaded candidate stays overloaded: load
    cannot move a session.
    """

    name: ClassVar[str] = "session_hash"

    def decide(self, snapshot: Snapshot) -> Decision:
        request, replicas = snapshot.request, snapshot.replicas
        if request.session_hash is not None:
            key, reason = request.session_hash, "hash of the session"
        elif request.first_blocks_hash is not None:
            key, reason = request.first_blocks_hash, "hash of the first blocks, no session"
        else:
            return Decision(candidate=pick(snapshot, replicas).id, reason="no session, no tokens")
        chosen = rendezvous(tuple([replica.id for replica in replicas]), key)
        return Decision(candidate=replicas[chosen].id, reason=reason)


class SessionSticky(Policy, frozen=True, kw_only=True):
    """Choose the replica of the session's last turn, as long as that replica is eligible. A new
    session (or a request without one) goes to the least loaded. Sessions start evenly but do not
    stay even, because long sessions pile up where they started.
    """

    name: ClassVar[str] = "session_sticky"

    def decide(self, snapshot: Snapshot) -> Decision:
        home = snapshot.request.session_candidate
        if home is not None and any(replica.id == home for replica in snapshot.replicas):
            return Decision(candidate=home, reason="the session's last turn ran here")
        chosen = least_loaded(snapshot, snapshot.replicas)
        why = "new session" if home is None else f"session's {home} is out"
        return Decision(candidate=chosen.id, reason=f"{why}; {load_text(chosen)}")
