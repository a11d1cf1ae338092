"""A simulated engine's events as a router receives them: in order, some time after they happened.

It replaces `router.kv_events.stream` in front of the same index. The contract is known from the
start, no batch is lost, and there is no wire.
"""

from __future__ import annotations

from collections import deque

from loadtest.engine_model.blocks import Change, Removed, Stored
from loadtest.engine_model.cpu_tier import Dropped, Offloaded
from policies.view import CandidateId
from router.base.contracts import HashContract
from router.base.messages import Position
from router.index.block_index import BlockIndex
from router.index.candidate_stream import CandidateStream, StreamState


class SimulatedStream(CandidateStream):
    """One replica's events at one router."""

    __slots__ = ("_index", "_pending", "capacity_blocks", "contract")

    capacity_blocks: int
    contract: HashContract

    has_history = True
    is_suspect = False
    unknown: frozenset[str] = frozenset()
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
        super().__init__(candidate)
        self.contract = contract
        self.capacity_blocks = capacity_blocks
        self._index = index
        self._pending: deque[tuple[float, list[Change | Offloaded | Dropped]]] = deque()

    def send(self, changes: list[Change | Offloaded | Dropped], due_s: float) -> None:
        """Send changes; `due_s` is not before that of any sent earlier."""
        self._pending.append((due_s, changes))

    def catch_up(self, now_s: float) -> None:
        """Apply the changes that have arrived by now."""
        pending = self._pending
        if not pending or pending[0][0] > now_s:
            return
        index, candidate, counters = self._index, self.candidate, self.counters
        while pending and pending[0][0] <= now_s:
            for change in pending.popleft()[1]:
                if isinstance(change, Stored):
                    index.store(candidate, change.keys)
                    counters.blocks.num_stored += len(change.positions)
                elif isinstance(change, Removed):
                    counters.blocks.num_missing += index.remove(candidate, change.keys)
                    counters.blocks.num_removed += len(change.keys)
                elif isinstance(change, Offloaded):
                    index.store(candidate, change.keys, "cpu")
                elif isinstance(change, Dropped):
                    index.remove(candidate, change.keys, "cpu")
            counters.num_batches += 1
        self._applied()

    def state_and_reason(self) -> tuple[StreamState, str]:
        return self.state, self.reason

    def mark_suspect(self, reason: str) -> None:
        """Do nothing: these events are never wrong, only late."""
