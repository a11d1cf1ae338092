"""One candidate's stream as another router tells it: that router follows the engine, we follow it.

What must live here: which of its deltas count, and what is believed. What must not: Redis, the
log's ids and the way a snapshot is read (the owner does it), clocks.

What is told is absolute, so only the order matters. The table is the whole protocol; n is the
number of the last delta that counts.

    comes                          so
    a delta of number n + 1        apply
    one that clears                apply, whatever its number: all before it is of no interest
    n or less                      ignore: a snapshot, or the log read twice
    n + 2 or more                  something was lost: apply nothing, `wants_snapshot`
    a snapshot taken at m          swap in whole, go on behind m

A snapshot read while the feed goes on holds some of what came after m too. For matches that does no
harm: the deltas behind m say it again. But there is no position before they all have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from policies.view import CandidateId
from router.contracts import DEFAULT_SEED, HashContract
from router.index.block_index import BlockIndex
from router.index.candidate_stream import StreamReason, StreamState
from router.index.counters import StreamCounters
from router.index.staged_blocks import StagedBlocks
from router.messages import Delta, FeedState, Position, Standing, TierChange

_KEY_BYTES: Final = 8


class SharedStream:
    """Keeps one candidate's part of the index equal to what its feed says.

    Args:
        block_size: The engine's, until its feed says otherwise.
        capacity_blocks: The same.
        seed: Text to guess as the engine's seed until then.
        counters: Go on counting where the candidate's last stream stopped.
    """

    __slots__ = (
        "_distrust",
        "_guess",
        "_index",
        "_is_fed",
        "_lost_reason",
        "_mixed_until",
        "_position",
        "_standing",
        "candidate",
        "counters",
        "epoch",
        "number",
        "on_applied",
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
        self.candidate = candidate
        self.counters = StreamCounters() if counters is None else counters
        self.epoch = 0
        self.number: int | None = None  # of the last delta that counts; None: nothing is known
        self.on_applied: Callable[[CandidateId], None] | None = None
        self.wants_snapshot = True  # the owner loads one; until then nothing changes here
        self._index = index
        self._guess = Standing("blind", StreamReason.NO_EVENTS, contract, capacity_blocks)
        self._standing = self._guess
        self._distrust: str | None = None
        self._is_fed = False  # somebody leads, and has told how it stands
        self._lost_reason: str | None = None  # what was not understood in this epoch
        self._position: Position | None = None
        self._mixed_until: int | None = None  # blocks of several moments before this number

    # -- for readers -------------------------------------------------------------------------

    @property
    def contract(self) -> HashContract:
        """How to hash a prompt so that it meets this candidate's blocks."""
        return self._standing.contract

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the candidate has."""
        return self._standing.capacity_blocks

    @property
    def position(self) -> Position | None:
        """The engine's last batch that is in the index; None: unknown, or moments are mixed."""
        if self._mixed_until is not None and (self.number or 0) < self._mixed_until:
            return None
        return self._position

    @property
    def has_history(self) -> bool:
        """Whether what can be known of the time before now is known."""
        is_read = self.number is not None and not self.wants_snapshot
        return is_read and self._is_fed and self._standing.is_proven

    @property
    def is_distrusted(self) -> bool:
        """Whether its matches are not to be believed, here or where it is fed."""
        return self._distrust is not None or self._standing.is_distrusted

    @property
    def doubt(self) -> str | None:
        """Why whoever feeds it must read history again; None: it need not.

        To be told (`Doubted`) now and then until it is gone: whoever was told may be dead.
        """
        return self._distrust

    @property
    def state(self) -> StreamState:
        """How much the index can be believed about this candidate."""
        return self.standing()[0]

    @property
    def reason(self) -> str:
        """Why it is in this state, for operators; empty if EXACT."""
        return self.standing()[1]

    def standing(self) -> tuple[StreamState, str]:
        """Tell state and reason; of several reasons the gravest."""
        told = self._standing
        if self.number is None or told.state == "blind":
            return "blind", told.reason
        for reason in (
            self._distrust,
            "part of its feed was lost" if self.wants_snapshot else None,
            None if self._is_fed else "nobody feeds it yet: as old as whoever fed it last",
            self._lost_reason,
        ):
            if reason is not None:
                return "degraded", reason
        return told.state, told.reason

    def standing_now(self) -> Standing:
        """Tell how it stands where it is fed, and what was missed on the way here.

        With `position`, what another stream needs to `resume` what this one knows.
        """
        told = self._standing
        return Standing(
            state=self.state,
            reason=self.reason,
            contract=told.contract,
            capacity_blocks=told.capacity_blocks,
            is_verified=told.is_verified,
            is_distrusted=self.is_distrusted,
            lacks=self._lost_reason or told.lacks,
            is_proven=self._is_fed and told.is_proven,
        )

    # -- the feed ----------------------------------------------------------------------------

    def load(self, state: FeedState, staged: StagedBlocks, *, through: int | None = None) -> None:
        """Swap in a snapshot. O(1); claims of requests in flight stay.

        Args:
            state: Where the feed stood before the snapshot's first block was read, or after the
                last delta that was applied to `staged` since.
            staged: The blocks, empty thereafter.
            through: The feed's number after the last block was read; None: as in `state`.
        """
        self._index.replace(self.candidate, staged)
        self.epoch += 1
        self.number, self._position, self._mixed_until = state.number, state.position, through
        self._standing = self._guess if state.standing is None else state.standing
        self._is_fed = state.is_fed
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
        if delta.standing is not None:
            self._standing = delta.standing
        self.counters.num_batches += 1
        self._is_fed = True
        self._applied()

    def distrust(self, reason: str) -> None:
        """Stop believing, until whoever feeds it has read history again (a delta that clears).

        All ways to read it again begin with one, and none other is needed: a snapshot taken
        meanwhile would say what was wrong once more.
        """
        self._distrust = reason

    # -- inside ------------------------------------------------------------------------------

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
        self._distrust = None
        self._lost_reason = None
        self._mixed_until = None

    def _is_sound(self, change: TierChange) -> bool:
        """Tell whether a change can be applied; what it said is lost otherwise, until an epoch."""
        num_bytes = len(change.stored), len(change.removed)
        if any(num % _KEY_BYTES for num in num_bytes) or any(n < 1 for _, n in change.copies):
            self.counters.num_undecodable += 1
            self._lost_reason = "part of its feed was not understood"
            return False
        if change.tier == "pool":
            self.counters.num_unknown_medium += sum(num_bytes) // _KEY_BYTES
            return False
        self.counters.num_stored += num_bytes[0] // _KEY_BYTES
        self.counters.num_removed += num_bytes[1] // _KEY_BYTES
        return True

    def _applied(self) -> None:
        if self.on_applied is not None:
            self.on_applied(self.candidate)
