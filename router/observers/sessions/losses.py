"""What losing each replica would cost: the tokens that live conversations have only there.

Computed on request, at most once a second. The work is bounded: of many conversations in a
large fleet a sample is examined, and each replica's own tokens are scaled by what it shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from heapq import nsmallest
from itertools import islice
from typing import Final

from msgspec import Struct

from policies.view import CandidateId, CostModel
from router.index.cache_view import CacheView
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.observers.sessions.threads import Thread
from router.replicas.fleet import Fleet
from router.replicas.replica import Candidate, Replica, candidates_of
from router.replicas.state import CandidateLoss
from router.request.fetch import Fetches

MAX_LOOKS: Final = 2_000
"""Look-ups of a prompt at a candidate; with 64 candidates each takes about 2 µs."""

_MAX_PROMPTS: Final = 128  # each takes about 70 µs, however few the candidates

_MAX_SESSIONS: Final = 1_000  # of the ledger, the last active first
_KEPT_S: Final = 1.0


class Alone(Struct, frozen=True):
    """How many tokens a prompt has only at its candidate, behind how many others."""

    num_tokens: int
    num_before: int


class _Live(Struct, frozen=True):
    """A live conversation whose last prompt is known."""

    digest: int  # of no meaning: those with the smallest are the sample
    candidate: CandidateId
    thread: Thread
    num_own_tokens: int
    num_shared_tokens: int


class _Sum(Struct):
    num_own: int = 0
    num_alone: int = 0
    compute_ms: float = 0.0


class Losses:
    """Computes the loss of each candidate; see the module."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        caches: CacheView,
        ledger: SessionLedger,
        fetches: Fetches | None,
        max_looks: int = MAX_LOOKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._ledger = ledger
        self._fetches = fetches
        self._max_looks = max_looks
        self._clock = clock
        self._last: tuple[float, Mapping[CandidateId, CandidateLoss]] = float("-inf"), {}

    def by_candidate(self) -> Mapping[CandidateId, CandidateLoss]:
        """Return the loss of each candidate with live conversations, up to a second old."""
        now_s = self._clock()
        if now_s - self._last[0] >= _KEPT_S:
            self._fleet.conversations.expire(now_s)
            self._last = now_s, self._compute(now_s)
        return self._last[1]

    def drop(self) -> None:
        """Compute again when next asked."""
        self._last = float("-inf"), {}

    def _compute(self, now_s: float) -> Mapping[CandidateId, CandidateLoss]:
        statuses = self._fleet.load.status(now_s)
        costs = {each.id: each.cost for each in statuses}
        candidates = {
            each.id: each
            for replica in self._fleet.members.replicas
            for each in candidates_of(replica)
        }
        most = max(1, min(_MAX_PROMPTS, self._max_looks // max(1, len(statuses))))
        sums: dict[CandidateId, _Sum] = {}
        total = _Sum()
        for each in nsmallest(most, self._live(), key=lambda live: live.digest):
            alone = self._alone(each, candidates)
            found = sums.setdefault(each.candidate, _Sum())
            for one in (found, total):
                one.num_own += each.num_own_tokens
                one.num_alone += alone.num_tokens
            if alone.num_tokens and each.candidate in costs:
                cost = costs[each.candidate]
                found.compute_ms += cost.prefill_ms(alone.num_tokens, alone.num_before)
        working_set = self._fleet.conversations.at
        return {
            id_: _scaled(sums.get(id_), total, working_set(id_).num_tokens, costs[id_])
            for id_ in costs
            if working_set(id_).num_sessions
        }

    def _live(self) -> Iterator[_Live]:
        """Yield live conversations, the last active first."""
        for session in islice(self._ledger, _MAX_SESSIONS):
            for digest in session.routing:
                found = self._fleet.conversations.last(digest)
                home = self._fleet.conversations.home(digest)
                thread = _thread_at(session, home)
                if home is not None and found is not None and thread is not None:
                    yield _Live(digest, home, thread, found.num_own_tokens, found.num_shared_tokens)

    def _alone(self, live: _Live, known: Mapping[CandidateId, Candidate]) -> Alone:
        """Count what a conversation has at its candidate, and nowhere else where it can go."""
        home, keys, contract = live.candidate, live.thread.keys, live.thread.contract
        if contract is None or home not in known:
            return Alone(live.num_own_tokens, live.num_shared_tokens)
        asked = [
            id_
            for id_ in self._caches.by_contract(known).get(contract, ())
            if id_ == home or _can_follow(known[id_].replica, known[home].replica)
        ]
        matches = self._caches.match(keys, asked)
        here = matches.pop(home, None)
        if here is None:
            return Alone(live.num_own_tokens, live.num_shared_tokens)
        num_blocks = max([each.num_cpu_blocks for each in matches.values()], default=0)
        if self._fetches is not None:
            others = [known[each] for each in matches]
            num_there = self._fetches.num_blocks(others, keys, self._caches.index)
            num_blocks = max(num_blocks, num_there)
        num_before = max(num_blocks * contract.block_size, live.num_shared_tokens)
        return Alone(max(0, here.num_cpu_blocks * contract.block_size - num_before), num_before)


def _thread_at(session: Session, candidate: CandidateId | None) -> Thread | None:
    """Find the last prompt of a session at a candidate, if its blocks are known."""
    threads = [each for each in session.threads if each.candidate == candidate and each.keys]
    return max(threads, key=lambda each: each.at_s, default=None)


def _can_follow(other: Replica, lost: Replica) -> bool:
    """Return whether the conversations of a lost replica can go on at another."""
    return (
        other.name != lost.name
        and other.base_model == lost.base_model
        and other.is_offered
        and other.role != "prefill"
    )


def _scaled(found: _Sum | None, total: _Sum, num_own: int, cost: CostModel) -> CandidateLoss:
    """Scale what was examined of a candidate, else of all, to all its own tokens."""
    if found is not None and found.num_own:
        num_tokens = num_own * found.num_alone / found.num_own
        compute_ms = num_own * found.compute_ms / found.num_own
    else:  # if no prompt is known at all, no other place is known, either
        num_tokens = num_own * (total.num_alone / total.num_own if total.num_own else 1.0)
        compute_ms = num_tokens * cost.ms_per_token
    return CandidateLoss(num_tokens=round(num_tokens), compute_s=round(compute_ms / 1000.0, 3))
