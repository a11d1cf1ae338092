"""One rank's event stream as a synchronous state machine: what is applied, and what counts.

What must live here: the order of things (sequence -> blocks), epochs, status. What must not:
sockets and clocks (router.kv_events.follower drives it; `now_s` is an argument), sequence numbers
(sequence), the meaning of an event (blocks).

Frames in, one command out: `wanted_replay`, the sequence to replay from.

As time passes, `Presence` says how long blocks count, `Rereading` when history is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from policies.view import CandidateId
from router.base.backoff import Backoff
from router.base.contracts import DEFAULT_SEED, BlockKey, HashContract
from router.base.messages import Position, StreamStatus
from router.index.block_index import BlockIndex
from router.index.candidate_stream import CandidateStream, StreamCounters, StreamReason, StreamState
from router.kv_events.blocks import RankBlocks
from router.kv_events.contract_search import Phase
from router.kv_events.sequence import BatchAction, History
from router.kv_events.wire import decode

BLIND_AFTER_S: Final = 60.0
"""Without a publisher for so long the candidate's blocks do not count any more."""

REREAD_S: Final = (1.0, 300.0)
"""First and longest pause before history is read again after a batch that was not understood.

The engine may have it in one piece. Once its buffer has lost the batch, the rest is right."""


class Presence:
    """Whether the publisher is there."""

    __slots__ = ("_waits_since_s", "gone_s", "why_silent")

    def __init__(self) -> None:
        self.why_silent: str | None = None  # why there was none, for `BLIND_AFTER_S` or longer
        self.gone_s: float | None = None  # since when it is not there any more
        self._waits_since_s: float | None = None  # for the first one

    def came(self) -> None:
        """Record that it is there."""
        self.gone_s = self._waits_since_s = self.why_silent = None

    def went(self, now_s: float) -> None:
        """Record that it is gone; only the first time counts."""
        if self.gone_s is None:
            self.gone_s = now_s

    def not_heard(self, now_s: float, reason: str) -> None:
        """Record that none has answered so far, and why that may be."""
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= BLIND_AFTER_S:
            self.why_silent = reason

    def is_lost(self, now_s: float) -> bool:
        """Return whether it is gone for so long that its blocks do not count."""
        return self.gone_s is not None and now_s - self.gone_s >= BLIND_AFTER_S


class Rereading:
    """When history is read again, with growing pauses."""

    __slots__ = ("_backoff", "_due_s")

    def __init__(self) -> None:
        self._backoff = Backoff(*REREAD_S)
        self._due_s: float | None = None  # when history is, or was, read again

    def is_due(self, now_s: float) -> bool:
        """Return whether to read now; the first call begins a pause."""
        due_s = self._due_s
        if due_s is not None and now_s < due_s:
            return False
        if due_s is not None and now_s - due_s > REREAD_S[1]:  # long ago
            self._backoff.reset()
        self._due_s = now_s + self._backoff.next_s()
        return due_s is not None


class Notice(NamedTuple):
    """A line for the log."""

    text: str
    fields: dict[str, str]


class RankStream(CandidateStream):
    """The stream of a candidate whose engine this router follows.

    Args:
        block_size: The engine's, until its events say otherwise.
        capacity_blocks: How many blocks the candidate has; bounds what is guessed while BLIND.
        seeds: Texts to try as the engine's seed before the defaults; the first is the guess.
        lora_paths: Adapter name to path; read live.
        pool_stored: Takes the blocks that a connector wrote to the shared pool; None: the replica
            has no pool, what it stores on the cpu is its own.
    """

    __slots__ = (
        "_blocks",
        "_counts_once_until",
        "_history",
        "_is_partial",
        "_is_resuming",
        "_lost_reason",
        "_num_known_removed",
        "_presence",
        "_rereading",
        "_suspicion",
        "_why_again",
        "capacity_blocks",
        "is_blind",
    )

    capacity_blocks: int
    is_blind: bool

    def __init__(
        self,
        candidate: CandidateId,
        index: BlockIndex,
        *,
        block_size: int,
        capacity_blocks: int,
        seeds: Sequence[str] = (),
        lora_paths: Mapping[str, str] | None = None,
        pool_stored: Callable[[Sequence[BlockKey]], None] | None = None,
        counters: StreamCounters | None = None,
    ) -> None:
        guess = HashContract(
            algorithm="sha256", block_size=block_size, seed=next(iter(seeds), DEFAULT_SEED)
        )
        super().__init__(candidate, counters)
        self.capacity_blocks = capacity_blocks
        self._blocks = RankBlocks(
            index,
            candidate,
            self.counters.blocks,
            contract=guess,
            seeds=seeds,
            lora_paths=lora_paths,
            pool_stored=pool_stored,
        )
        self._history = History(self.counters.history)
        self.is_blind = True  # no batch was understood
        self._is_partial = False
        self._num_known_removed = 0  # in a row, none unknown, while history is lost
        self._is_resuming = False  # what the engine did since is not all read yet
        self._counts_once_until: int | None = None  # the newest batch in blocks that were given
        self._lost_reason: str | None = None  # what is missing until the next epoch
        self._suspicion: str | None = None
        self._presence = Presence()
        self._rereading = Rereading()  # of a part that was not understood
        self._why_again: str | None = None  # why it is to be read again, not logged yet

    # -- for readers -------------------------------------------------------------------------

    @property
    def contract(self) -> HashContract:
        return self._blocks.search.contract  # of each replica, for each decision: one call less

    @property
    def position(self) -> Position | None:
        return self._history.position

    @property
    def next_sequence(self) -> int | None:
        """Return the sequence of the batch that comes next; None: there is no history."""
        return self._history.next_sequence

    @property
    def has_history(self) -> bool:
        return self._history.is_caught_up and not self._is_resuming

    @property
    def is_read(self) -> bool:
        """Whether the engine was reached, and all that it can replay was read."""
        return self.has_history and (not self.is_blind or self._history.is_proven)

    @property
    def is_suspect(self) -> bool:
        return self._suspicion is not None

    @property
    def lacks_history(self) -> bool:
        is_named = self._blocks.phase is not Phase.TRANSLATED  # else a removal is not understood
        return self._is_partial and is_named and not self._blocks.groups

    @property
    def unknown(self) -> Collection[str]:
        return self._blocks.unknown_keys.kinds

    def state_and_reason(self) -> tuple[StreamState, str]:
        if self.is_blind:
            if self._presence.why_silent is not None:
                return "blind", self._presence.why_silent
            if self.counters.num_undecodable:
                return "blind", StreamReason.EVENTS_NOT_UNDERSTOOD
            return "blind", self._lost_reason or StreamReason.NO_EVENTS
        phase = self._blocks.search.phase
        for is_so, reason in (
            (self._suspicion is not None, self._suspicion),
            (self._is_resuming, StreamReason.RESUMING),
            (self._presence.gone_s is not None, StreamReason.UNREACHABLE),
            (not self._history.is_caught_up, StreamReason.READING),
            (phase is Phase.TRANSLATED, StreamReason.TRANSLATED),
            (phase is Phase.SEARCHING, StreamReason.UNVERIFIED),
            (not self._blocks.understands_groups, StreamReason.GROUPS),
            (bool(self._lacks), self._lacks),
        ):
            if is_so:
                return "degraded", reason or ""
        return "exact", ""

    def status(self) -> StreamStatus:
        """Describe it for other routers; with `position` one of them can `resume` it."""
        state, reason = self.state_and_reason()
        return StreamStatus(
            state=state,
            reason=reason,
            contract=self.contract,
            capacity_blocks=self.capacity_blocks,
            is_verified=self._blocks.phase is not Phase.SEARCHING,
            is_suspect=self.is_suspect,
            lacks=self._lacks,
            groups=self._blocks.groups,
            unknown=tuple(sorted(self.unknown)),
        )

    def take_notices(self) -> list[Notice]:
        """Return what has happened since the last call that a log should show."""
        notices = []
        why, self._why_again = self._why_again, None
        if why is not None:
            notices.append(Notice("its event history is read again", {"reason": why}))
        form, self._blocks.unknown_form = self._blocks.unknown_form, None
        if form is not None:
            text = "an extra key of its blocks is not understood: nothing is predicted for these"
            prompts = ", ".join(sorted(self.unknown))
            notices.append(Notice(text, {"key": form, "prompts": prompts}))
        return notices

    @property
    def _lacks(self) -> str:
        """What was missed in this epoch; empty: nothing."""
        if self._lost_reason is not None:
            return self._lost_reason
        return StreamReason.PARTIAL if self._is_partial else ""

    # -- starting from known blocks ----------------------------------------------------------

    def resume(
        self,
        position: Position,
        status: StreamStatus,
        now_s: float,
        *,
        newest: Position | None,
    ) -> bool:
        """Start from blocks that the index is given.

        For a new stream, before it has a follower. A replay must prove that the engine is the one
        that wrote the batch at `position` (router.kv_events.sequence). If it is not, everything is
        forgotten. Until then the state is DEGRADED and matches count; if the publisher cannot be
        reached they count for `patience.BLIND_AFTER_S`.

        The blocks may contain batches of the replay, up to `newest`. A block that these store once
        more counts once. So a copy may be missed, which costs a computation at worst.

        Args:
            position: The blocks contain all batches up to here.
            status: Of the stream that the blocks are from.
            now_s: Monotonic time.
            newest: The blocks contain no batch behind this one; None: not known.

        Returns:
            False if the blocks are of no use: hashes that only the other stream can translate, or
            a blind or suspect state.
        """
        if status.contract.algorithm == "warmroute" or status.state == "blind" or status.is_suspect:
            return False
        self._blocks.take_over(status)
        self._history.resume(position)
        self.is_blind = False
        self._is_resuming = True
        self._counts_once_until = newest.sequence if newest is not None else None
        self._is_partial = status.lacks == StreamReason.PARTIAL
        self._lost_reason = None if self._is_partial else status.lacks or None
        self._presence.went(now_s)
        return True

    # -- the connection ----------------------------------------------------------------------

    def opened(self, *, has_replay: bool) -> None:
        """Record that a follower has started, and whether there is a replay endpoint."""
        self._history.opened(has_replay=has_replay)

    def connected(self) -> None:
        """Record that the publisher is there: ask what was missed, and whether it is the same."""
        self._presence.came()
        self._history.mark_suspect()

    def disconnected(self, now_s: float) -> None:
        """Record that the publisher is gone; its blocks count for `patience.BLIND_AFTER_S` more."""
        self._presence.went(now_s)

    def unheard(self, now_s: float, reason: str) -> None:
        """Record that no publisher has answered so far, and why that may be."""
        self._presence.not_heard(now_s, reason)

    def tick(self, now_s: float) -> None:
        """Apply the time: BLIND if the publisher is gone for long; read history again if due."""
        if not self.is_blind and self._presence.is_lost(now_s):
            self._history.forget()
            self._blocks.emptied()
            self._begin_epoch()
            self.is_blind = True
            self._lost_reason = StreamReason.LOST
        elif self._lost_reason == StreamReason.BATCH_NOT_UNDERSTOOD and not (
            self._presence.gone_s is not None or self._history.wanted is not None
        ):
            if self._rereading.is_due(now_s):
                self._why_again = StreamReason.BATCH_NOT_UNDERSTOOD
                self._history.trust_replay()
                self._history.ask_all()

    def failed(self, reason: str) -> None:
        """Record, on a new stream, why the last one failed: nothing is known any more."""
        self.counters.num_failures += 1
        self._lost_reason = reason

    def verify(self) -> None:
        """Ask for the last batch again: whether it is the same engine, and whether any was missed.

        Cheap (one batch comes back); for quiet streams.
        """
        if self._history.wanted is None:
            self._history.trust_replay()
            self._history.ask()

    # -- batches and replay ------------------------------------------------------------------

    def receive(self, sequence: int, payload: bytes) -> None:
        """Receive a live batch: apply it, ignore it, or want history first."""
        self._blocks.counts_once = False
        self._act(self._history.live(sequence, _mark(payload)), payload)

    @property
    def wanted_replay(self) -> int | None:
        """The sequence to replay from, None: nothing is missing."""
        return self._history.wanted

    def begin_replay(self) -> int:
        """Start the wanted replay; end it by `end_replay`, however it goes."""
        return self._history.begin_replay()

    def replayed(self, sequence: int, payload: bytes) -> None:
        """Receive one reply, in order."""
        until = self._counts_once_until
        self._blocks.counts_once = self._is_resuming and (until is None or sequence <= until)
        self._act(self._history.reply(sequence, _mark(payload)), payload)

    def end_replay(self, *, is_complete: bool) -> None:
        """Finish a replay: the end marker came, or (not complete) it broke off or timed out."""
        self._act(self._history.end_replay(is_complete=is_complete), b"")

    # -- trust -------------------------------------------------------------------------------

    def mark_suspect(self, reason: str) -> None:
        # A second suspicion does not start the reading again while it is under way.
        is_reading = self._suspicion is not None and self._history.wanted is not None
        self._suspicion = reason
        if not is_reading:
            self._why_again = reason
            self.resync()

    def cleared(self) -> None:
        """Drop what the engine is known to have lost; its own word for it is yet to come."""
        self._blocks.emptied()
        self._blocks.clear()
        self._applied()

    def resync(self) -> None:
        """Read the whole history again, as far as it goes back."""
        self._history.trust_replay()
        if not self._history.ask_all():
            self._begin_epoch()
            self._is_partial = True

    # -- inside ------------------------------------------------------------------------------

    def _act(self, action: BatchAction, payload: bytes) -> None:
        match action:
            case BatchAction.APPLY:
                self._apply(payload)
            case BatchAction.BEGIN | BatchAction.BEGIN_PARTIAL:
                self._begin_epoch()
                self._is_partial = action is BatchAction.BEGIN_PARTIAL
                self._apply(payload)
            case BatchAction.EMPTY:
                self._begin_epoch()
            case BatchAction.RESTARTED:
                self._blocks.restart()
                self._begin_epoch()
        history = self._history
        if self._is_resuming and history.is_proven and history.wanted is None:
            self._is_resuming = False  # not by the first reply: the rest may clear everything

    def _begin_epoch(self) -> None:
        self._blocks.clear()
        self.epoch += 1
        self._is_partial = False
        self._num_known_removed = 0
        self._lost_reason = None
        self._suspicion = None
        self._is_resuming = self._blocks.counts_once = False

    def _apply(self, payload: bytes) -> None:
        """Apply the next batch; the one place where the index changes."""
        blocks = self.counters.blocks
        num_clears = blocks.num_clears
        num_removed, num_missing = blocks.num_removed, blocks.num_missing
        try:
            batch = decode(payload, with_tokens=self._blocks.wants_tokens)
            if self.is_blind:
                self.is_blind = False
                self._blocks.clear()  # the guess made while BLIND
            self._blocks.apply(batch, payload)
        except ValueError:  # of `apply`: tokens that were not read before
            self.counters.num_undecodable += 1
            self._lost_reason = StreamReason.BATCH_NOT_UNDERSTOOD
            return
        self.counters.num_batches += 1
        if blocks.num_clears > num_clears:  # history is complete from here
            self._is_partial = False
            self._lost_reason = None
        if self.lacks_history:
            num_unknown = blocks.num_missing - num_missing
            self._observe_removals(blocks.num_removed - num_removed, num_unknown)
        if self._blocks.needs_history:
            self._read_again()
        self._applied()

    def _observe_removals(self, num_blocks: int, num_unknown: int) -> None:
        """End PARTIAL once the engine has evicted a whole cache of known blocks in a row.

        It evicts the least recently used first. So a block of lost history is gone by then, or was
        used, which proved it (router.index.candidate_stream). Of a cpu tier nothing is proven.
        """
        self._num_known_removed = 0 if num_unknown else self._num_known_removed + num_blocks
        if self._num_known_removed >= self.capacity_blocks and not self._blocks.has_cpu_tier:
            self._is_partial = False

    def _read_again(self) -> None:
        """Begin an epoch under another contract: blocks are indexed under wrong keys."""
        self._blocks.needs_history = False
        self._why_again = "its hashes are made in another way"
        self._begin_epoch()
        self._is_partial = True
        self._history.ask_all()


def _mark(payload: bytes) -> bytes:
    """Return what distinguishes batches: the payload's head, with the engine's time stamp."""
    return payload[:10]
