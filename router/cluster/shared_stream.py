"""One candidate's stream as its leader publishes it: that router follows the engine, we follow it.

What must live here: which deltas count, and what is known by them. What must not: Redis, the log's
ids and the way a snapshot is read (the owner does it), clocks.

Deltas are absolute, so only their order matters. The table is the whole protocol; n is the number
of the last delta that counts.

    comes                          so
    a delta of number n + 1        apply
    one that clears                apply, whatever its number: all before it is of no interest
    n or less                      ignore: a snapshot, or the log read twice
    n + 2 or more                  something was lost: apply nothing, `wants_snapshot`
    a snapshot taken at m          swap in whole, go on behind m

A snapshot read while the leader goes on holds some of what came after m, too. For matches that does
no harm: the deltas behind m say it again. But there is no position before they all have.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from policies.view import CandidateId
from router.contracts import DEFAULT_SEED, HashContract
from router.index.block_index import BlockIndex
from router.index.candidate_stream import CandidateStream, StreamReason, StreamState
from router.index.counters import StreamCounters
from router.index.hit_length import make_layout
from router.index.staged_blocks import StagedBlocks
from router.messages import Delta, Position, StreamHead, StreamStatus, TierChange

_KEY_BYTES: Final = 8


class SharedStream(CandidateStream):
    """The stream of a candidate that another router leads.

    Args:
        block_size: The engine's, until the leader says otherwise.
        capacity_blocks: The same.
        seed: Text to guess as the engine's seed until then.
    """

    __slots__ = (
        "_guess",
        "_has_leader",
        "_index",
        "_lost_reason",
        "_mixed_until",
        "_position",
        "_status",
        "_suspicion",
        "number",
        "wants_snapshot",
    )

    def __init__(
        self,
        candidate: CandidateId,
        index: BlockIndex,
        *,
        block_size: int,
        capacity_blocks: int,
        seed: str = DEFAULT_SEED,
        counters: StreamCounters | None = None,
    ) -> None:
        contract = HashContract(algorithm="sha256", block_size=block_size, seed=seed)
        super().__init__(candidate, counters)
        self.number: int | None = None  # of the last delta that counts; None: nothing is known
        self.wants_snapshot = True  # the owner loads one; until then nothing changes here
        self._index = index
        self._guess = StreamStatus("blind", StreamReason.NO_EVENTS, contract, capacity_blocks)
        self._status = self._guess
        self._suspicion: str | None = None
        self._has_leader = False  # a router leads, and has published since
        self._lost_reason: str | None = None  # what was not understood in this epoch
        self._position: Position | None = None
        self._mixed_until: int | None = None  # blocks of several moments before this number

    # -- for readers -------------------------------------------------------------------------

    @property
    def contract(self) -> HashContract:
        return self._status.contract

    @property
    def capacity_blocks(self) -> int:
        return self._status.capacity_blocks

    @property
    def position(self) -> Position | None:
        if self._mixed_until is not None and (self.number or 0) < self._mixed_until:
            return None
        return self._position

    @property
    def has_history(self) -> bool:
        is_read = self.number is not None and not self.wants_snapshot
        return is_read and self._has_leader and self._status.is_proven

    @property
    def is_suspect(self) -> bool:
        return self._suspicion is not None or self._status.is_suspect

    @property
    def suspicion(self) -> str | None:
        """Why the leader must read history again; None: it need not.

        To be sent (`Suspected`) now and then until it is gone: the leader may have died.
        """
        return self._suspicion

    @property
    def unknown(self) -> Collection[str]:
        return self._status.unknown

    @property
    def removes_all_copies(self) -> bool:
        return self._status.removes_all_copies

    @property
    def is_blind(self) -> bool:
        return self.number is None or self._status.state == "blind"

    def state_and_reason(self) -> tuple[StreamState, str]:
        status = self._status
        if self.is_blind:
            return "blind", status.reason
        for reason in (
            self._suspicion,
            "part of its stream was lost" if self.wants_snapshot else None,
            None if self._has_leader else "no router leads it yet: as old as its last leader",
            self._lost_reason,
        ):
            if reason is not None:
                return "degraded", reason
        return status.state, status.reason

    def status(self) -> StreamStatus:
        """Return the leader's status, with what was missed on the way here.

        With `position`, what another stream needs to `resume` what this one knows.
        """
        status = self._status
        return StreamStatus(
            state=self.state,
            reason=self.reason,
            contract=status.contract,
            capacity_blocks=status.capacity_blocks,
            is_verified=status.is_verified,
            is_suspect=self.is_suspect,
            lacks=self._lost_reason or status.lacks,
            is_proven=self._has_leader and status.is_proven,
            groups=status.groups,
            unknown=status.unknown,
            removes_all_copies=status.removes_all_copies,
        )

    # -- what the leader publishes -----------------------------------------------------------

    def load(self, head: StreamHead, staged: StagedBlocks, *, through: int | None = None) -> None:
        """Swap in a snapshot. O(1); claims of requests in flight stay.

        Args:
            head: Of the stream before the snapshot's first block was read, or after the last delta
                that was applied to `staged` since.
            staged: The blocks, empty thereafter.
            through: The stream's number after the last block was read; None: as in `head`.
        """
        self._index.replace(self.candidate, staged)
        self.epoch += 1
        self.number, self._position, self._mixed_until = head.number, head.position, through
        self._read(self._guess if head.status is None else head.status)
        self._has_leader = head.has_leader
        self.wants_snapshot = False
        self._lost_reason = None
        self._applied()

    def apply(self, delta: Delta) -> None:
        """Apply an entry of the log, in the order of the log."""
        if not delta.cleared and not self._is_next(delta.number):
            return
        if delta.cleared:
            self._begin_epoch()
        sound = [change for change in delta.changes if self._is_sound(change)]
        self._index.apply(self.candidate, sound, cleared=delta.cleared)
        self.number = delta.number
        if delta.continues:
            self._position = None
        elif delta.cleared or delta.position is not None:
            self._position = delta.position
        if delta.status is not None:
            self._read(delta.status)
        self.counters.num_batches += 1
        self._has_leader = True
        self._applied()

    def mark_suspect(self, reason: str) -> None:
        # Until the leader has read history again, which begins with a delta that clears. Nothing
        # else ends it: a snapshot taken meanwhile would say what was wrong once more.
        self._suspicion = reason

    # -- inside ------------------------------------------------------------------------------

    def _read(self, status: StreamStatus) -> None:
        """Believe the leader's status; its KV groups say how the blocks are hit."""
        self._status = status
        if status.groups:
            is_named = status.contract.algorithm != "warmroute"
            layout = make_layout(status.groups, status.contract.block_size) if is_named else None
            self._index.lay_out(self.candidate, layout)
        else:
            self._index.forget_layout(self.candidate)

    def _is_next(self, number: int) -> bool:
        if self.number is None or self.wants_snapshot:
            return False
        if number <= self.number:
            self.counters.num_duplicates += 1
            return False
        if number > self.number + 1:
            self.counters.num_gaps += 1
            self.wants_snapshot = True
            return False
        return True

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.counters.num_clears += 1
        self.wants_snapshot = False
        self._suspicion = None
        self._lost_reason = None
        self._mixed_until = None

    def _is_sound(self, change: TierChange) -> bool:
        """Return whether a change can be applied; else it is missing until the next epoch."""
        num_bytes = len(change.stored), len(change.removed)
        if any(num % _KEY_BYTES for num in num_bytes) or any(n < 1 for _, n in change.copies):
            self.counters.num_undecodable += 1
            self._lost_reason = "part of its stream was not understood"
            return False
        if change.tier == "pool":
            self.counters.num_unknown_medium += sum(num_bytes) // _KEY_BYTES
            return False
        self.counters.num_stored += num_bytes[0] // _KEY_BYTES
        self.counters.num_removed += num_bytes[1] // _KEY_BYTES
        return True
