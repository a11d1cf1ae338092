"""Who feeds a candidate's blocks, and what this router has told or heard of it so far.

What must live here: roles, numbers, what to write next, what to do with what was heard. What must
not: Redis, tasks, clocks (the loops of this package drive it).

    DIRECT     we follow the engine, for ourselves alone: Redis is gone, or has not said who leads
    LEADING    we hold the lease: we follow the engine, and tell the others
    FOLLOWING  another router tells us, through the log

    from        to          when                        the blocks we know
    -           FOLLOWING   found while Redis is up     loaded from the snapshot, then the log
    -           DIRECT      found while it is down      read from the engine
    FOLLOWING   LEADING     the lease was free          kept; the engine replays from our position
    FOLLOWING   DIRECT      Redis is gone               kept; likewise
    DIRECT      LEADING     the lease was free          kept, and written to Redis whole, unless
                                                        what is there is ours up to the last change
    DIRECT      FOLLOWING   another has the lease, and  ours until the snapshot is whole, then its
                            has told what we know
    LEADING     DIRECT      Redis is gone, lease lost   kept; changes are noted for a while
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Final

from policies.view import CandidateId
from router.cluster.shared_stream import SharedStream
from router.index.cache_view import CacheView
from router.index.staged_blocks import StagedBlocks
from router.kv_events.stream import RankStream
from router.messages import Delta, FeedId, FeedState, Position, Standing, TierChange

logger = logging.getLogger(__name__)

CHUNK_BLOCKS: Final = 8_192
"""Blocks in one delta at most: some 20 ms of Redis' time, in which it answers nobody else."""

_MAX_POSTPONED: Final = 50
"""Snapshots that may be behind what we know, before the one who leads is believed all the same."""


class Role(Enum):
    DIRECT = auto()
    LEADING = auto()
    FOLLOWING = auto()


class Loading:
    """A snapshot under way, and what the log says meanwhile; both go in at once."""

    __slots__ = ("deltas", "is_complete", "staged", "state", "through")

    def __init__(self) -> None:
        self.state: FeedState | None = None  # of the feed, before the first block; None: no feed
        self.staged = StagedBlocks()
        self.deltas: list[Delta] = []
        self.through: int | None = None  # the feed's number after the last block was read
        self.is_complete = False


class Feed:
    """One candidate's part of the global index, as this router sees it."""

    __slots__ = (
        "awaited",
        "candidate",
        "changed",
        "chunks",
        "has_blocks",
        "id",
        "loading",
        "num_postponed",
        "number",
        "position",
        "role",
        "told",
        "unacked",
        "wants_load",
        "wants_rewrite",
    )

    def __init__(
        self, feed: FeedId, candidate: CandidateId, role: Role, *, has_blocks: bool
    ) -> None:
        self.id = feed
        self.candidate = candidate
        self.role = role
        self.has_blocks = has_blocks  # they are kept here, too, while another router feeds them
        self.changed = asyncio.Event()  # the role is another one
        self.wants_load = role is Role.FOLLOWING
        self.awaited: Position | None = None  # who leads must have come so far to be followed
        self.num_postponed = 0  # snapshots in a row that had not
        self.loading: Loading | None = None
        self.number: int | None = None  # of our last delta that Redis has; None: it is not ours
        self.position: Position | None = None  # which Redis has since then
        self.unacked: Delta | None = None  # sent, and not heard of yet
        self.told: Standing | None = None  # what Redis knows of our standing
        self.wants_rewrite = False
        self.chunks: Iterator[TierChange] | None = None  # of a rewrite under way

    @property
    def may_lead(self) -> bool:
        """Whether what is known here would do as a start: nothing has to be loaded first."""
        return not self.wants_load and self.loading is None

    def become(self, role: Role) -> None:
        """Change the role, and wake whoever follows the candidate."""
        if role is not self.role:
            self.role = role
            self.changed.set()


class SharedFeeds:
    """All feeds of the candidates this router has found.

    Args:
        caches: Where their streams and blocks are.
        keeps_blocks: Whether blocks that others feed are kept here too; else they are looked up.
    """

    def __init__(self, caches: CacheView, *, keeps_blocks: bool = True) -> None:
        self._caches = caches
        self._index = caches.index
        self._feeds: dict[FeedId, Feed] = {}
        self._keeps_blocks = keeps_blocks
        self.num_rewrites = 0
        self.num_loads = 0
        self.farewells: list[Delta] = []  # to be written as they are

    def __iter__(self) -> Iterator[Feed]:
        return iter(list(self._feeds.values()))

    def get(self, feed: FeedId) -> Feed | None:
        """Find a feed of a candidate we know."""
        return self._feeds.get(feed)

    def join(self, id_: FeedId, candidate: CandidateId, *, is_shared: bool) -> Feed:
        """Begin with a candidate that was found; `is_shared`: Redis is up."""
        role = Role.FOLLOWING if is_shared else Role.DIRECT
        feed = Feed(id_, candidate, role, has_blocks=self._keeps_blocks)
        self._feeds[id_] = feed
        return feed

    def leave(self, feed: Feed) -> None:
        """Forget a feed: its candidate is gone, or another process."""
        self._stop_telling(feed)
        if self._feeds.get(feed.id) is feed:
            del self._feeds[feed.id]

    def end_epoch(self, feed: Feed) -> None:
        """Let nobody believe any more what we told: the engine that held it is gone."""
        if feed.number is not None:
            numbers = [feed.number + 1]
            if feed.unacked is not None:  # it may arrive, or not: the one or the other will fit
                numbers.append(feed.number + 2)
            self.farewells += [Delta(feed.id, number, cleared=True) for number in numbers]
            self._stop_telling(feed)

    # -- who feeds ---------------------------------------------------------------------------

    def go_alone(self) -> None:
        """Redis is gone: follow every engine ourselves, from what we know."""
        self.farewells.clear()  # who leads after this begins anew
        for feed in self:
            feed.wants_load, feed.awaited = False, None
            if feed.loading is not None:
                self._index.discard(feed.loading.staged)
                feed.loading = None
            feed.become(Role.DIRECT)

    def deal(self, held: frozenset[FeedId], states: Mapping[FeedId, FeedState]) -> bool:
        """Take over what we hold the lease of, give up what we do not.

        Returns:
            Whether all that we hold is led; else ask again soon.
        """
        all_led = True
        for feed in self:
            if feed.id in held:
                if feed.awaited is not None:  # who was to come so far leads no more
                    feed.wants_load, feed.awaited = False, None
                if feed.role is not Role.LEADING:
                    all_led &= feed.may_lead and self._lead(feed, states.get(feed.id))
            elif feed.role is Role.LEADING:
                logger.info(
                    "another router feeds this candidate", extra={"candidate": feed.candidate}
                )
                self.lose(feed)
                self._want_other(feed)
            elif feed.role is Role.DIRECT and feed.may_lead:
                self._want_other(feed)
        return all_led

    def lose(self, feed: Feed) -> None:
        """Stop telling: what is in Redis is not what we told. Who leads shows the next deal."""
        self._stop_telling(feed)
        feed.become(Role.DIRECT)

    def _want_other(self, feed: Feed) -> None:
        """Want to follow another router, once it has told what we know ourselves."""
        stream = self._caches.stream(feed.candidate)
        feed.wants_load, feed.num_postponed = True, 0
        feed.awaited = stream.position if isinstance(stream, RankStream) else None

    def _lead(self, feed: Feed, state: FeedState | None) -> bool:
        stream = self._caches.stream(feed.candidate)
        number = state.number if state is not None else 0
        if isinstance(stream, SharedStream):
            if not feed.has_blocks:  # who feeds must know what there is
                feed.has_blocks = feed.wants_load = True
                return False
            if number != (stream.number or 0):
                return False  # what the last one told is still on its way
            self._take_over(feed, stream, state)
        elif not self._continues(feed, state):
            if state is not None and state.position is not None and _knows_little(stream):
                feed.wants_load = True  # what others left in Redis is worth more: lead after that
                return False
            self.rewrite(feed, number)
        logger.info(
            "we feed this candidate",
            extra={"candidate": feed.candidate, "rewrite": feed.wants_rewrite},
        )
        feed.become(Role.LEADING)
        return True

    def _take_over(self, feed: Feed, stream: SharedStream, state: FeedState | None) -> None:
        """Go on behind the last router's last delta; anew, if it was in the middle of something."""
        number = state.number if state is not None else 0
        if state is None or state.position is None or stream.position is None:
            self.rewrite(feed, number)
        else:
            self._index.journal(feed.candidate, True)
            feed.number, feed.position, feed.told = number, stream.position, None

    def _continues(self, feed: Feed, state: FeedState | None) -> bool:
        """Tell whether Redis has just what we wrote last, and what came after is in the journal.

        The number alone would not do: another router may have led meanwhile, or Redis lost its
        end and then was told another. But there is one state at an engine's position.
        """
        if state is None or state.position is None or feed.wants_rewrite:
            return False
        sent = feed.unacked
        if (
            sent is not None
            and sent.number == state.number
            and _position_after(feed, sent) == state.position
        ):
            self.acknowledge(feed)
        return (feed.number, feed.position) == (state.number, state.position)

    # -- what we tell ------------------------------------------------------------------------

    def next_delta(self, feed: Feed) -> Delta | None:
        """Build the next delta of a feed we lead; None: there is nothing to tell.

        It has to be acknowledged before there is another; until then it is the same.
        """
        stream = self._caches.stream(feed.candidate)
        if feed.unacked is None and isinstance(stream, RankStream) and feed.number is not None:
            feed.unacked = self._next_delta(feed, stream, feed.number + 1)
        return feed.unacked

    def _next_delta(self, feed: Feed, stream: RankStream, number: int) -> Delta | None:
        if feed.wants_rewrite:
            feed.wants_rewrite = False
            self.num_rewrites += 1
            self._index.journal(feed.candidate, True)
            feed.chunks = self._index.contents(feed.candidate, CHUNK_BLOCKS)
            return Delta(feed.id, number, cleared=True, continues=True)
        if feed.chunks is not None:
            change = next(feed.chunks, None)
            if change is not None:
                return Delta(feed.id, number, changes=(change,), continues=True)
            feed.chunks = None  # the journal has what changed meanwhile
            feed.told = None  # and what follows ends the rewrite: standing, and a position
        changes = self._index.take_changes(feed.candidate, CHUNK_BLOCKS)
        if changes is not None and changes.is_lost:
            feed.wants_rewrite = True
            return self._next_delta(feed, stream, number)
        standing = stream.standing_now()
        if changes is None and standing == feed.told:
            return None
        is_whole = changes is None or changes.is_whole
        return Delta(
            feed.id,
            number,
            cleared=changes is not None and changes.cleared,
            changes=changes.changes if changes is not None else (),
            position=stream.position if is_whole else None,
            standing=standing if standing != feed.told else None,
            continues=not is_whole,
        )

    def acknowledge(self, feed: Feed) -> None:
        """Note that Redis has the delta that was sent last."""
        if feed.unacked is not None:
            feed.number = feed.unacked.number
            feed.position = _position_after(feed, feed.unacked)
            feed.told = feed.unacked.standing or feed.told
            feed.unacked = None

    def no_room(self, feed: Feed) -> None:
        """Note that Redis has no room for what was sent.

        What was removed is told alone, for that goes through; what was stored is pending again.
        """
        delta = feed.unacked
        if delta is None:
            return
        self._index.note_again(feed.candidate, delta.changes)
        removed = [TierChange(c.tier, removed=c.removed) for c in delta.changes if c.removed]
        feed.unacked = None
        if removed or delta.cleared:
            feed.unacked = Delta(
                feed.id,
                delta.number,
                cleared=delta.cleared,
                changes=tuple(removed),
                continues=True,
            )

    def rewrite(self, feed: Feed, number: int) -> None:
        """Write everything anew behind delta `number`: what Redis has is not what we wrote."""
        self._stop_telling(feed)
        feed.number, feed.wants_rewrite = number, True

    def _stop_telling(self, feed: Feed) -> None:
        self._index.journal(feed.candidate, False)
        feed.number, feed.position, feed.unacked, feed.told = None, None, None, None
        feed.chunks, feed.wants_rewrite = None, False

    # -- what we hear ------------------------------------------------------------------------

    def heard(self, delta: Delta) -> None:
        """Take an entry of the log; what we wrote ourselves is no news."""
        feed = self._feeds.get(delta.feed)
        if feed is None:
            return
        if feed.loading is not None:
            feed.loading.deltas.append(delta)
        elif feed.role is Role.FOLLOWING and not feed.wants_load:
            self._apply(feed, delta)

    def _apply(self, feed: Feed, delta: Delta) -> None:
        stream = self._caches.stream(feed.candidate)
        if isinstance(stream, SharedStream):
            stream.apply(delta if feed.has_blocks else _without_blocks(delta))
            feed.wants_load |= stream.wants_snapshot

    def gap(self) -> None:
        """Learn that entries of the log are gone: what others feed has to be loaded anew."""
        for feed in self:
            if feed.role is Role.FOLLOWING or feed.loading is not None:
                feed.wants_load = True

    def accepts(self, feed: Feed, loading: Loading) -> bool:
        """Tell whether a snapshot that begins is worth what we know ourselves by now.

        After an outage it may be as old as that: blocks that were evicted meanwhile, or an engine
        that is no more. Who leads tells it soon; else the snapshot is given up, to be tried again.
        """
        stream, state = self._caches.stream(feed.candidate), loading.state
        if feed.loading is not loading or feed.awaited is None:
            return True
        if not isinstance(stream, RankStream) or feed.num_postponed >= _MAX_POSTPONED:
            return True
        if not stream.has_seen(feed.awaited):  # its engine restarted
            feed.awaited = stream.position or feed.awaited
        if (
            state is not None
            and state.position is not None
            and state.position.sequence >= feed.awaited.sequence
            and stream.has_seen(state.position)
        ):
            return True
        feed.num_postponed += 1
        feed.loading, feed.wants_load = None, True
        return False

    def begin_load(self, feed: Feed) -> Loading:
        """Begin to take a snapshot in; what the log says meanwhile is kept for after it."""
        feed.wants_load = False
        if feed.role is Role.DIRECT:
            feed.has_blocks = self._keeps_blocks
        feed.loading = Loading()
        return feed.loading

    def end_load(self, feed: Feed, loading: Loading, *, through: int | None) -> None:
        """All of the snapshot is here. Where we follow the engine, that has to end first.

        `through`: where the feed stood after the last block was read.
        """
        if feed.loading is not loading:
            self._index.discard(loading.staged)  # Redis went away meanwhile, or the candidate
            return
        loading.is_complete, loading.through = True, through
        feed.awaited = None
        if feed.role is Role.FOLLOWING:
            self.settle(feed)
        else:
            self._stop_telling(feed)
            feed.become(Role.FOLLOWING)

    def settle(self, feed: Feed) -> None:
        """Put a complete snapshot in place of what was known; from here on the log tells."""
        loading, stream = feed.loading, self._caches.stream(feed.candidate)
        if loading is None or not loading.is_complete or not isinstance(stream, SharedStream):
            return
        feed.loading = None
        self.num_loads += 1
        state = loading.state or FeedState(0, None, None, is_fed=False)
        if not feed.has_blocks:  # nobody could go on from there with nothing
            state = FeedState(state.number, None, state.standing, state.is_fed)
        stream.load(state, loading.staged, through=loading.through)
        for delta in loading.deltas:
            self._apply(feed, delta)


def _knows_little(stream: object) -> bool:
    """Tell whether a direct stream has not read its engine's whole history."""
    return (
        not isinstance(stream, RankStream)
        or bool(stream.standing_now().lacks)
        or (stream.state == "blind")
    )


def _position_after(feed: Feed, delta: Delta) -> Position | None:
    """Say which position Redis has after a delta; see `Delta`."""
    if delta.continues or delta.cleared:
        return None if delta.continues else delta.position
    return delta.position or feed.position


def _without_blocks(delta: Delta) -> Delta:
    """Keep what a delta says of the feed; without blocks there is no position to go on from."""
    return Delta(
        delta.feed, delta.number, cleared=delta.cleared, standing=delta.standing, continues=True
    )
