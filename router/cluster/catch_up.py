"""What a router needs before it can follow a stream: a snapshot, and the log since.

A snapshot is loaded beside what is known, which goes on answering; then it replaces it at once.
Who followed the engine itself until now may know more than the snapshot: then it waits until the
new leader has published as much.
"""

from __future__ import annotations

from typing import Final

from router.index.candidate_stream import CandidateStream
from router.index.staged_blocks import StagedBlocks
from router.kv_events.stream import RankStream
from router.messages import Delta, Position, StreamHead

_MAX_POSTPONED: Final = 50
"""Snapshots that may be behind what is known here, before the leader is believed all the same."""


class Loading:
    """A snapshot under way, and what the log says meanwhile; both go in at once."""

    __slots__ = ("deltas", "head", "is_complete", "staged", "through")

    def __init__(self) -> None:
        self.head: StreamHead | None = None  # before the first block; None: Redis has no stream
        self.staged = StagedBlocks()
        self.deltas: list[Delta] = []
        self.through: int | None = None  # the stream's number after the last block was read
        self.is_complete = False


class CatchUp:
    """One member's way to the state from which it can follow the log.

    A snapshot may be `wanted` while one is `loading`: then entries of the log were lost meanwhile.
    """

    __slots__ = ("_awaited", "_num_postponed", "loading", "wanted")

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.loading: Loading | None = None
        self._awaited: Position | None = None  # the leader must have come so far
        self._num_postponed = 0  # snapshots in a row that had not

    @property
    def is_done(self) -> bool:
        """Whether nothing has to be loaded: what is known here would do to lead."""
        return not self.wanted and self.loading is None

    def want(self, newer_than: Position | None) -> None:
        """Want a snapshot that has this position of the engine; None: any."""
        self.wanted, self._awaited, self._num_postponed = True, newer_than, 0

    def stop_waiting(self) -> None:
        """Want no snapshot of a leader that had to come so far: it leads no more."""
        if self._awaited is not None:
            self.wanted, self._awaited = False, None

    def cancel(self) -> StagedBlocks | None:
        """Want nothing; return what was loaded so far."""
        staged = self.loading.staged if self.loading is not None else None
        self.wanted, self.loading, self._awaited = False, None, None
        return staged

    def begin(self) -> Loading:
        """Begin to load a snapshot; the log is kept from here on."""
        self.wanted, self.loading = False, Loading()
        return self.loading

    def accepts(self, loading: Loading, stream: CandidateStream | None) -> bool:
        """Return whether a snapshot that begins is worth what is known here by now.

        After an outage it may be as old as that: blocks that were evicted meanwhile, or an engine
        that is no more. The leader publishes that soon; until then snapshots are given up.
        """
        head, awaited = loading.head, self._awaited
        if self.loading is not loading or awaited is None:
            return True
        if not isinstance(stream, RankStream) or self._num_postponed >= _MAX_POSTPONED:
            return True
        if not stream.has_seen(awaited):  # its engine restarted
            awaited = self._awaited = stream.position or awaited
        if (
            head is not None
            and head.position is not None
            and head.position.sequence >= awaited.sequence
            and stream.has_seen(head.position)
        ):
            return True
        self._num_postponed += 1
        self.loading, self.wanted = None, True
        return False

    def complete(self, through: int | None) -> None:
        """Note that all blocks are here; `through`: the stream's number after the last of them."""
        assert self.loading is not None
        self.loading.is_complete, self.loading.through = True, through
        self._awaited = None

    def take(self) -> Loading | None:
        """Hand out a complete snapshot; from here on the log is followed."""
        loading = self.loading
        if loading is None or not loading.is_complete:
            return None
        self.loading = None
        return loading
