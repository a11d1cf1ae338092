"""How much of an engine's event history is known, and what has to be asked for.

The contents of batches are not looked at. Marks are bytes that distinguish batches: their time
stamp. There are two rules.

1. The overlap proves identity. A restarted engine counts from 0 again, and one that came back
   unseen may have counted past the last known sequence. So replay is asked from the last batch that
   was applied, and that batch must come back as it was: else it is another engine.
2. Lost history is accepted. What the replay buffer no longer has stays unknown: begin again with
   the oldest batch there is. Blocks held since before are then missing from the index, which costs
   a computation, never a wrong answer.

The replay asks for n, the last batch that was applied, and what follows:

    it brings                                  it means                       action
    n, as it was, n + 1, ...                   the same engine                apply behind n
    n, but another batch                       restarted, counted past n      forget, replay from 0
    nothing                                    restarted, has not reached n   forget, replay from 0
    n + k first                                the buffer has lost n          begin again at n + k
    ..., m, m + k                              a reply was dropped            replay again from m
    ..., m, then silence                       the end was dropped            replay again from m

n may also be the last batch that another router applied, if the index was given its blocks
(`resume`): the proof is the same.

A ROUTER drops replies beyond its high-water mark (1,000 by default, and an engine's buffer has
10,000 batches), so the last two lines are not rare. They count as failed only without progress.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final

from router.base.messages import Position
from router.index.candidate_stream import HistoryCounters

MAX_FAILED_REPLAYS: Final = 3
"""Failed in a row before history is accepted as lost; the next connection tries again."""

_NUM_MARKS: Final = 1024


class BatchAction(Enum):
    """What to do with a batch, or with the end of a replay (which has none to apply)."""

    APPLY = auto()  # the next in order
    IGNORE = auto()  # known already, or the replay will bring it
    BEGIN = auto()  # history is complete from here: forget the rest, then apply
    BEGIN_PARTIAL = auto()  # what was before is lost: forget the rest, then apply
    EMPTY = auto()  # the engine has no history: forget the rest
    RESTARTED = auto()  # another engine answers: forget all


class _Replay(Enum):
    NONE = auto()  # none is under way
    FIRST = auto()  # waiting for the first reply
    FOLLOWING = auto()
    HOLE = auto()  # a reply was dropped, the rest is of no use
    USELESS = auto()  # another engine's, or not asked far enough back


class History:
    """The sequence of batches of one engine process, as far as it is known.

    Args:
        counters: Where gaps, replays and restarts are counted.
    """

    __slots__ = (
        "_is_behind",
        "_is_fresh",
        "_is_suspect",
        "_marks",
        "_num_failed",
        "_replay",
        "_replay_from",
        "counters",
        "has_replay",
        "next_sequence",
        "wanted",
    )

    def __init__(self, counters: HistoryCounters) -> None:
        self.counters = counters
        self.wanted: int | None = None  # the sequence to replay from; None: nothing to ask
        self.has_replay = True  # there is an endpoint to ask
        self._is_behind = False  # batches are missing that the wanted replay will bring
        self._is_fresh = False  # the wanted replay is of all there is
        self._is_suspect = False  # the engine may be another one: nothing passes before a replay
        self.next_sequence: int | None = None  # None: no history at all, not even an empty one
        self._marks: deque[tuple[int, bytes]] = deque(maxlen=_NUM_MARKS)
        self._replay = _Replay.NONE
        self._replay_from = 0
        self._num_failed = 0

    def resume(self, position: Position) -> None:
        """Go on behind a batch that was applied elsewhere, once a replay has proven the engine."""
        self.next_sequence = position.sequence + 1
        self._marks.append((position.sequence, position.mark))
        self.mark_suspect()

    def opened(self, *, has_replay: bool) -> None:
        """Record whether there is a replay endpoint."""
        self.has_replay = has_replay
        if not has_replay:
            self.wanted = None
            self._is_behind = self._is_suspect = False

    # -- live batches ------------------------------------------------------------------------

    def live(self, sequence: int, mark: bytes) -> BatchAction:
        """Judge a live batch."""
        is_proven = not self._is_fresh and not self._is_suspect
        if self.wanted is not None and not (is_proven and sequence == self.next_sequence):
            return BatchAction.IGNORE
        if self.next_sequence is None:
            return self._begin(sequence, mark)
        if sequence == self.next_sequence:
            return self._advance(sequence, mark)
        if sequence < self.next_sequence:
            return self._seen_before(sequence, mark)
        self.counters.num_gaps += 1
        if self.ask():
            self._is_behind = True
            return BatchAction.IGNORE
        return self._begin(sequence, mark)

    def _seen_before(self, sequence: int, mark: bytes) -> BatchAction:
        """Judge a sequence that was there before: a late duplicate, or another engine's."""
        known = next((other for number, other in self._marks if number == sequence), None)
        if known == mark or (known is None and self.ask()):
            self.counters.num_duplicates += 1
            return BatchAction.IGNORE
        self.counters.num_restarts += 1
        if self.ask_all():
            return BatchAction.RESTARTED
        return self._begin(sequence, mark)

    # -- replay ------------------------------------------------------------------------------

    def ask(self) -> bool:
        """Request the last batch and all behind it; False: there is no replay."""
        if self.next_sequence is None:
            return self.ask_all()
        if not self._can_ask():
            return False
        self.wanted = max(0, self.next_sequence - 1)
        self._is_fresh = False
        return True

    def ask_all(self) -> bool:
        """Request everything from the start, to begin again with it; False: there is no replay."""
        if not self._can_ask():
            return False
        self.wanted = 0
        self._is_behind = self._is_fresh = True
        if self._replay is not _Replay.NONE:
            self._replay = _Replay.USELESS
        return True

    def _can_ask(self) -> bool:
        return self.has_replay and self._num_failed < MAX_FAILED_REPLAYS

    def mark_suspect(self) -> None:
        """Hold batches until a replay has shown that the engine is the same: it reconnected.

        Without replay, sequences that go on are proof enough.
        """
        self.trust_replay()
        if self.ask_all() if self._is_fresh else self.ask():
            self._is_suspect = True
            if self._replay is not _Replay.NONE:
                self._replay = _Replay.USELESS

    def trust_replay(self) -> None:
        """Try replay again although it failed: the connection is a new one."""
        self._num_failed = 0

    def begin_replay(self) -> int:
        """Start the wanted replay; end it by `end_replay`, however it goes."""
        assert self.wanted is not None
        self.counters.num_replays += 1
        self._replay = _Replay.FIRST
        self._replay_from = self.wanted
        return self.wanted

    def reply(self, sequence: int, mark: bytes) -> BatchAction:
        """Judge one reply of the replay, in order."""
        if self._replay is _Replay.FIRST:
            self._replay = _Replay.FOLLOWING
            self._is_suspect = False
            return self._first_reply(sequence, mark)
        if self._replay is _Replay.FOLLOWING:
            assert self.next_sequence is not None
            if sequence == self.next_sequence:
                return self._advance(sequence, mark)
            if sequence > self.next_sequence:
                self._replay = _Replay.HOLE
        return BatchAction.IGNORE

    def _first_reply(self, sequence: int, mark: bytes) -> BatchAction:
        if self._is_fresh or self.next_sequence is None:
            return self._begin(sequence, mark)
        if sequence == self.next_sequence == 0:
            return self._advance(sequence, mark)
        if sequence >= self.next_sequence:
            return self._begin(sequence, mark)
        if (sequence, mark) in self._marks:
            return BatchAction.IGNORE
        self.counters.num_restarts += 1
        self.ask_all()
        return BatchAction.RESTARTED

    def end_replay(self, *, is_complete: bool) -> BatchAction:
        """Finish a replay: the end marker came, or (not complete) it broke off or timed out."""
        replay, self._replay = self._replay, _Replay.NONE
        is_cut = replay is _Replay.FOLLOWING and not is_complete
        if replay is _Replay.HOLE or is_cut:
            self._refill()
        elif not is_complete:
            self._fail()
        elif replay is _Replay.FIRST:
            return self._nothing_came()
        elif replay is _Replay.FOLLOWING:
            self._answered()
        return BatchAction.IGNORE

    def _nothing_came(self) -> BatchAction:
        self._is_suspect = False
        is_fresh = self._is_fresh or self.next_sequence is None
        if is_fresh or self.next_sequence == 0:
            self._answered()
            self.next_sequence = 0
            self._marks.clear()
            return BatchAction.EMPTY if is_fresh else BatchAction.IGNORE
        self.counters.num_restarts += 1
        self.ask_all()
        return BatchAction.RESTARTED

    def _refill(self) -> None:
        assert self.next_sequence is not None
        if self.next_sequence - 1 <= self._replay_from:  # no progress: do not ask for ever
            self._fail()
        self.ask()

    def _answered(self) -> None:
        self.wanted = None
        self._is_behind = self._is_fresh = False
        self._num_failed = 0

    def _fail(self) -> None:
        self.counters.num_failed_replays += 1
        self._num_failed += 1
        if self._can_ask():
            return
        if self._is_fresh or self._is_suspect:
            self.forget()
        self.wanted = None
        self._is_behind = False

    @property
    def is_caught_up(self) -> bool:
        """Whether all of the past that can be read was read."""
        if not self._can_ask():
            return True
        return self.next_sequence is not None and not self._is_behind

    @property
    def is_proven(self) -> bool:
        """Whether the known batches are those of the engine that is there now."""
        return self.next_sequence is not None and not self._is_suspect

    @property
    def position(self) -> Position | None:
        """The last batch applied; None: none, or all of history is being read again."""
        if self._is_fresh or not self._marks:
            return None
        return Position(*self._marks[-1])

    # -- what is known -----------------------------------------------------------------------

    def forget(self) -> None:
        """Reset: nothing is known, nothing wanted."""
        self.wanted = None
        self.next_sequence = None
        self._is_behind = self._is_fresh = self._is_suspect = False
        self._marks.clear()

    def _begin(self, sequence: int, mark: bytes) -> BatchAction:
        self._marks.clear()
        self._is_fresh = False
        self._advance(sequence, mark)
        if sequence == 0:
            return BatchAction.BEGIN
        self.counters.num_truncated += 1
        return BatchAction.BEGIN_PARTIAL

    def _advance(self, sequence: int, mark: bytes) -> BatchAction:
        self.next_sequence = sequence + 1
        self._marks.append((sequence, mark))
        return BatchAction.APPLY
