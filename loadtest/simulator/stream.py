"""A simulated engine's events as a router receives them: in order, some time after they happened.

Takes the place of `router.kv_events.stream` in front of the same index: the contract is known
from the start, nothing is lost, and there is no wire. What is late is not applied before its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from loadtest.simulator.blocks import Change
from policies.view import CandidateId
from router.contracts import HashContract
from router.index.block_index import BlockIndex
from router.index.candidate_stream import StreamState
from router.index.counters import StreamCounters
from router.messages import Position


class SimulatedStream:
    """One replica's events at one router; see `router.index.candidate_stream`."""

    __slots__ = (
        "_index",
        "_pending",
        "candidate",
        "capacity_blocks",
        "contract",
        "counters",
        "epoch",
        "on_applied",
    )

    has_history = True
    is_suspect = False
    position: Position | None = None
    reason = ""
    state: StreamState = "exact"

    def __init__(
        self,
        candidate: CandidateId,
        index: BlockIndex,
        *,
        contract: HashContract,
        capacity_blocks: int,
    ) -> None:
        self.candidate = candidate
        self.contract = contract
        self.capacity_blocks = capacity_blocks
        self.counters = StreamCounters()
        self.epoch = 0
        self.on_applied: Callable[[CandidateId], None] | None = None
        self._index = index
        self._pending: deque[tuple[float, list[Change]]] = deque()

    def send(self, changes: list[Change], due_s: float) -> None:
        """Put changes on their way; `due_s` is not before that of any sent earlier."""
        self._pending.append((due_s, changes))

    def catch_up(self, now_s: float) -> None:
        """Apply what has arrived by now."""
        pending = self._pending
        if not pending or pending[0][0] > now_s:
            return
        index, candidate, counters = self._index, self.candidate, self.counters
        while pending and pending[0][0] <= now_s:
            for change in pending.popleft()[1]:
                if change.is_stored:
                    index.store(candidate, change.keys)
                    counters.num_stored += len(change.keys)
                else:
                    counters.num_missing += index.remove(candidate, change.keys)
                    counters.num_removed += len(change.keys)
            counters.num_batches += 1
        if self.on_applied is not None:
            self.on_applied(candidate)

    def state_and_reason(self) -> tuple[StreamState, str]:
        """Return state and reason."""
        return self.state, self.reason

    def mark_suspect(self, reason: str) -> None:
        """Go on: these events are never wrong, only late."""
