"""A release of the router's queue with 10,000 requests waiting, without the decision itself.

There are eight candidates, as many sessions as requests, and prompts of 100 to 50,000 tokens that
were all placed before. The window of one candidate has just opened, the other seven are full. Each
release is one sample, in CPU time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.setting import Setting
from policies.view import CandidateCost, CandidateId, ReplicaView
from router.replicas.cost_fit import PRIOR
from router.replicas.fleet import Fleet
from router.replicas.ledger import InFront
from router.replicas.working_sets import WorkingSets
from router.scheduling.queue import Limit, Queue
from router.scheduling.waiting import QueueRules, Waiting

_NUM_WAITING: Final = 10_000
_NUM_CANDIDATES: Final = 8
_CAPACITY: Final = 1_000_000
_EVERY_S: Final = 0.01
_QUEUE_MS: Final = 1_000.0  # work at each candidate: enough for a full window


def run(setting: Setting) -> list[Line]:
    """Measure."""
    releases = Releases(_NUM_WAITING)
    number = setting.size(3_000, 50)
    taken_us = [releases.release() for _ in setting.track(range(number), "releases")]
    return [
        distribution(
            f"release, {_NUM_WAITING:,} waiting, {_NUM_CANDIDATES} candidates",
            "µs",
            taken_us,
            Budget("p99", 1_000.0),
        )
    ]


class _Chosen(Struct, frozen=True):
    view: ReplicaView

    num_pooled_tokens: int | None = None

    def costs(self) -> tuple[CandidateCost, ...]:
        return ()


class _Candidates(Fleet):
    """Replicas with caches of one size, and without idle time."""

    def __init__(self, num_ahead: Mapping[CandidateId, int]) -> None:
        super().__init__()
        self._num_ahead = num_ahead

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        return self._num_ahead[candidate]

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        return _CAPACITY


class Releases:
    """A queue of constant length: each request that is sent is replaced."""

    def __init__(self, num_waiting: int) -> None:
        self._dice = random.Random(7)
        self._ids = [CandidateId(f"r{number + 1}") for number in range(_NUM_CANDIDATES)]
        self._num_ahead = dict.fromkeys(self._ids, 2)
        self._working_sets = WorkingSets()
        self._now_s = 1_000.0
        self.num_sent = 0
        self.queue: Queue[_Chosen] = Queue(
            QueueRules(max_wait_s=1e9),
            self._working_sets,
            _Candidates(self._num_ahead),
            lambda waiting, choice: True,
        )
        for _ in range(num_waiting):
            self._add()
        for _ in range(2 * num_waiting // 8):  # until each was placed once
            self.release()

    def release(self) -> float:
        """Open the window of a candidate and release; return the time in µs."""
        self._now_s += _EVERY_S
        open_one = self._dice.choice(self._ids)
        self._num_ahead[open_one] = 1
        start_s = time.thread_time()
        self.queue.release(self._now_s, self._choose, self._send, self._refuse)
        taken_s = time.thread_time() - start_s
        while len(self.queue) < _NUM_WAITING:
            self._add()
        return taken_s * 1e6

    def _add(self) -> None:
        session = self._dice.getrandbits(60)
        num_tokens = int(100 * 500 ** self._dice.random())
        wants = self._dice.choice(self._ids)
        self.queue.add(Waiting(wants, session, num_tokens, self._now_s))

    def _choose(self, waiting: Waiting, in_front_ms: InFront) -> _Chosen:
        candidate = waiting.item
        return _Chosen(
            ReplicaView(
                id=candidate,
                num_waiting=self._num_ahead[candidate],
                queue_ms=_QUEUE_MS,
                cost=PRIOR,
            )
        )

    def _send(self, waiting: Waiting, choice: _Chosen, why: str) -> None:
        self.num_sent += 1
        candidate = choice.view.id
        self._num_ahead[candidate] = 2
        assert waiting.session is not None
        self._working_sets.begin(waiting.session, candidate, waiting.num_tokens, 0, self._now_s)
        self._working_sets.end(waiting.session, self._now_s)

    def _refuse(self, waiting: Waiting, limit: Limit, excess_ms: float) -> None:
        raise AssertionError("no request has a deadline")
