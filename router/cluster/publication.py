"""What a leader publishes of its candidate's blocks, as deltas, and how far Redis has them.

What must live here: what the next delta is, and what is known of those before. What must not: who
leads (membership), how a delta is written (loops, redis_store).

A delta stays `pending` until Redis is known to have it; the next one comes after it. A rewrite,
where Redis does not have what is here, is a delta that clears, the contents in slices of several
moments, then what the journal noted meanwhile; only with the last of it there is a position again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from policies.view import CandidateId
from router.index.block_index import BlockIndex
from router.index.journal import Changes
from router.kv_events.stream import RankStream
from router.messages import Delta, Position, StreamHead, StreamId, StreamStatus, TierChange

CHUNK_BLOCKS: Final = 8_192
"""Blocks in one delta at most: some 20 ms of Redis' time, in which it answers no other router."""

_UNCHANGED: Final = Changes()


class Publication:
    """One stream as this router publishes it.

    Args:
        number: Of the last delta that Redis has.
        position: Which Redis has with it, and the index too; None: everything is to be rewritten.
        count_rewrite: Called when a rewrite begins.
    """

    __slots__ = (
        "_candidate",
        "_contents",
        "_count_rewrite",
        "_index",
        "_last_status",
        "_stream_id",
        "_wants_rewrite",
        "number",
        "pending",
        "position",
    )

    def __init__(
        self,
        stream_id: StreamId,
        candidate: CandidateId,
        index: BlockIndex,
        *,
        number: int,
        position: Position | None,
        count_rewrite: Callable[[], None],
    ) -> None:
        self.number = number
        self.position = position
        self.pending: Delta | None = None  # sent, or to be sent; not known to be in Redis
        self._stream_id = stream_id
        self._candidate = candidate
        self._index = index
        self._count_rewrite = count_rewrite
        self._last_status: StreamStatus | None = None  # that was published
        self._wants_rewrite = position is None
        self._contents: Iterator[TierChange] | None = None  # what a rewrite has still to say
        if position is not None:
            index.journal(candidate, True)

    def close(self) -> None:
        """Stop noting what changes."""
        self._index.journal(self._candidate, False)

    def next_delta(self, stream: RankStream) -> Delta | None:
        """Build the next delta; None: there is nothing to publish.

        It has to be acknowledged before there is another; until then it is the same.
        """
        if self.pending is None:
            self.pending = self._next_delta(stream)
        return self.pending

    def acknowledge(self) -> None:
        """Note that Redis has the pending delta."""
        delta = self.pending
        if delta is not None:
            self.number, self.position = delta.number, self._position_after(delta)
            self._last_status = delta.status or self._last_status
            self.pending = None

    def no_room(self) -> None:
        """Note that Redis has no room for the pending delta.

        What was removed goes alone, for there is room for that; what was stored waits again.
        """
        delta = self.pending
        if delta is None:
            return
        self._index.note_again(self._candidate, delta.changes)
        removed = [TierChange(c.tier, removed=c.removed) for c in delta.changes if c.removed]
        self.pending = None
        if removed or delta.cleared:
            self.pending = Delta(
                self._stream_id,
                delta.number,
                cleared=delta.cleared,
                changes=tuple(removed),
                continues=True,
            )

    def is_continued_by(self, head: StreamHead | None) -> bool:
        """Return whether Redis has just what was published last, or the pending delta after it.

        The number alone would not do: another router may have led meanwhile, or Redis lost its end
        and got another since. But there is one state at an engine's position.
        """
        if head is None or head.position is None:
            return False
        sent = self.pending
        if (
            sent is not None
            and sent.number == head.number
            and self._position_after(sent) == head.position
        ):
            self.acknowledge()
        return (self.number, self.position) == (head.number, head.position)

    def tombstones(self) -> list[Delta]:
        """Return the deltas that clear everything; of several, whichever number fits is written."""
        numbers = [self.number + 1]
        if self.pending is not None:  # it may arrive, or not
            numbers.append(self.number + 2)
        return [Delta(self._stream_id, number, cleared=True) for number in numbers]

    # -- inside ------------------------------------------------------------------------------

    def _next_delta(self, stream: RankStream) -> Delta | None:
        number = self.number + 1
        if self._wants_rewrite:
            return self._begin_rewrite(number)
        if self._contents is not None:
            change = next(self._contents, None)
            if change is not None:
                return Delta(self._stream_id, number, changes=(change,), continues=True)
            self._contents = None  # the journal has what changed meanwhile
            self._last_status = None  # the rewrite ends with a status and a position
        changes = self._index.take_changes(self._candidate, CHUNK_BLOCKS) or _UNCHANGED
        if changes.is_lost:
            return self._begin_rewrite(number)
        status = stream.status()
        if changes is _UNCHANGED and status == self._last_status:
            return None
        return Delta(
            self._stream_id,
            number,
            cleared=changes.cleared,
            changes=changes.changes,
            position=stream.position if changes.is_whole else None,
            status=status if status != self._last_status else None,
            continues=not changes.is_whole,
        )

    def _begin_rewrite(self, number: int) -> Delta:
        self._wants_rewrite = False
        self._count_rewrite()
        self._index.journal(self._candidate, True)
        self._contents = self._index.contents(self._candidate, CHUNK_BLOCKS)
        return Delta(self._stream_id, number, cleared=True, continues=True)

    def _position_after(self, delta: Delta) -> Position | None:
        """Return which position Redis has after a delta; see `Delta`."""
        if delta.continues or delta.cleared:
            return None if delta.continues else delta.position
        return delta.position or self.position
