"""This router's part in each candidate's stream: who leads it, and what that means here.

What must live here: roles, and what to do when they change. What must not: Redis, tasks, clocks
(the loops of this package drive it), what a leader publishes (publication), how a follower begins
(catch_up).

    DIRECT     we follow the engine for ourselves: Redis is gone, or no leader is known yet
    LEADING    we hold the lease: we follow the engine, and publish what changes
    FOLLOWING  another router leads: we follow its deltas, through the log

    from        to          when                        the blocks we know
    -           FOLLOWING   found while Redis is up     loaded from the snapshot, then the log
    -           DIRECT      found while it is down      read from the engine
    FOLLOWING   LEADING     the lease was free          kept; the engine replays from our position
    FOLLOWING   DIRECT      Redis is gone               kept; likewise
    DIRECT      LEADING     the lease was free          kept, and written to Redis whole, unless
                                                        what is there is ours up to the last change
    DIRECT      FOLLOWING   another has the lease, and  ours until the snapshot is whole, then its
                            published what we know
    LEADING     DIRECT      Redis is gone, lease lost   kept; changes are noted for a while
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from enum import Enum, auto

from policies.view import CandidateId
from router.cluster.catch_up import CatchUp, Loading
from router.cluster.publication import Publication
from router.cluster.shared_stream import SharedStream
from router.index.cache_view import CacheView
from router.index.candidate_stream import CandidateStream
from router.kv_events.stream import RankStream
from router.messages import Delta, Position, StreamHead, StreamId

logger = logging.getLogger(__name__)


class Role(Enum):
    DIRECT = auto()
    LEADING = auto()
    FOLLOWING = auto()


class Membership:
    """This router as one of those that share a candidate's stream."""

    __slots__ = (
        "candidate",
        "catch_up",
        "changed",
        "has_blocks",
        "publication",
        "role",
        "stream_id",
    )

    def __init__(
        self, stream_id: StreamId, candidate: CandidateId, role: Role, *, has_blocks: bool
    ) -> None:
        self.stream_id = stream_id
        self.candidate = candidate
        self.role = role
        self.changed = asyncio.Event()  # the role is another one
        self.has_blocks = has_blocks  # they are kept here, too, while another router leads
        self.catch_up = CatchUp(wanted=role is Role.FOLLOWING)
        self.publication: Publication | None = None  # None: what Redis has is not ours

    def become(self, role: Role) -> None:
        """Change the role, and wake what follows the candidate."""
        if role is not self.role:
            self.role = role
            self.changed.set()


class Memberships:
    """All streams of the candidates this router has found.

    Args:
        caches: Where their streams and blocks are.
        keeps_blocks: Whether blocks that others lead are kept here too; else they are looked up.
    """

    def __init__(self, caches: CacheView, *, keeps_blocks: bool = True) -> None:
        self._caches = caches
        self._index = caches.index
        self._members: dict[StreamId, Membership] = {}
        self._keeps_blocks = keeps_blocks
        self.num_rewrites = 0
        self.num_loads = 0
        self.tombstones: list[Delta] = []  # to be written as they are

    def __iter__(self) -> Iterator[Membership]:
        return iter(list(self._members.values()))

    def get(self, stream_id: StreamId) -> Membership | None:
        """Find the membership in a stream; None: its candidate is not known here."""
        return self._members.get(stream_id)

    def join(self, stream_id: StreamId, candidate: CandidateId, *, is_shared: bool) -> Membership:
        """Begin with a candidate that was found; `is_shared`: Redis is up."""
        role = Role.FOLLOWING if is_shared else Role.DIRECT
        member = Membership(stream_id, candidate, role, has_blocks=self._keeps_blocks)
        self._members[stream_id] = member
        return member

    def leave(self, member: Membership) -> None:
        """Forget a stream: its candidate is gone, or another process."""
        self._stop_publishing(member)
        if self._members.get(member.stream_id) is member:
            del self._members[member.stream_id]

    def end_epoch(self, member: Membership) -> None:
        """Clear what we published: the engine that held it is gone."""
        if member.publication is not None:
            self.tombstones += member.publication.tombstones()
            self._stop_publishing(member)

    # -- who leads ---------------------------------------------------------------------------

    def disconnected(self) -> None:
        """Redis is gone: follow every engine ourselves, from what we know."""
        self.tombstones.clear()  # who leads after this begins anew
        for member in self:
            staged = member.catch_up.cancel()
            if staged is not None:
                self._index.discard(staged)
            member.become(Role.DIRECT)

    def reconcile(self, held: frozenset[StreamId], heads: Mapping[StreamId, StreamHead]) -> bool:
        """Lead what we hold the lease of, follow what another router holds.

        Returns:
            Whether all that we hold is led; else ask again soon.
        """
        all_led = True
        for member in self:
            if member.stream_id in held:
                member.catch_up.stop_waiting()
                if member.role is not Role.LEADING:
                    head = heads.get(member.stream_id)
                    all_led &= member.catch_up.is_done and self._lead(member, head)
            elif member.role is Role.LEADING:
                logger.info(
                    "another router leads the replica", extra={"candidate": member.candidate}
                )
                self.step_down(member)
                self._want_to_follow(member)
            elif member.role is Role.DIRECT and member.catch_up.is_done:
                self._want_to_follow(member)
        return all_led

    def step_down(self, member: Membership) -> None:
        """Stop publishing: what Redis has is not ours. Who leads is found with the next beat."""
        self._stop_publishing(member)
        member.become(Role.DIRECT)

    def rewrite(self, member: Membership, number: int) -> None:
        """Write everything anew behind delta `number`: what Redis has is not ours."""
        self._publish(member, number, None)

    def _want_to_follow(self, member: Membership) -> None:
        """Want a snapshot, once another router has published what we know ourselves."""
        stream = self._caches.stream(member.candidate)
        member.catch_up.want(stream.position if isinstance(stream, RankStream) else None)

    def _lead(self, member: Membership, head: StreamHead | None) -> bool:
        """Lead a stream whose lease we hold; False: not yet."""
        stream = self._caches.stream(member.candidate)
        number = head.number if head is not None else 0
        position = head.position if head is not None else None
        is_rewrite = False
        if isinstance(stream, SharedStream):
            if not member.has_blocks:  # a leader must know what there is
                member.has_blocks = member.catch_up.wanted = True
                return False
            if number != (stream.number or 0):
                return False  # what the last leader published is still on its way
            # One that died in the middle of something left no position: begin anew.
            is_rewrite = position is None or stream.position is None
            self._publish(member, number, None if is_rewrite else stream.position)
        elif member.publication is None or not member.publication.is_continued_by(head):
            if position is not None and _knows_little(stream):
                member.catch_up.wanted = True  # what Redis has is worth more: lead after that
                return False
            is_rewrite = True
            self.rewrite(member, number)
        logger.info(
            "this router leads the replica",
            extra={"candidate": member.candidate, "rewrite": is_rewrite},
        )
        member.become(Role.LEADING)
        return True

    # -- what a leader publishes -------------------------------------------------------------

    def next_delta(self, member: Membership) -> Delta | None:
        """Build the next delta of a stream we lead; None: there is nothing to publish."""
        stream, publication = self._caches.stream(member.candidate), member.publication
        if publication is None:
            return None
        if not isinstance(stream, RankStream):
            return publication.pending
        return publication.next_delta(stream)

    def _publish(self, member: Membership, number: int, position: Position | None) -> None:
        self._stop_publishing(member)
        member.publication = Publication(
            member.stream_id,
            member.candidate,
            self._index,
            number=number,
            position=position,
            count_rewrite=self._count_rewrite,
        )

    def _stop_publishing(self, member: Membership) -> None:
        if member.publication is not None:
            member.publication.close()
            member.publication = None

    def _count_rewrite(self) -> None:
        self.num_rewrites += 1

    # -- what a follower receives ------------------------------------------------------------

    def receive(self, delta: Delta) -> None:
        """Take an entry of the log; what we wrote ourselves is no news."""
        member = self._members.get(delta.stream_id)
        if member is None:
            return
        catch_up = member.catch_up
        if catch_up.loading is not None:
            catch_up.loading.deltas.append(delta)
        elif member.role is Role.FOLLOWING and not catch_up.wanted:
            self._apply(member, delta)

    def reload(self) -> None:
        """Load anew what others lead: entries of the log are gone."""
        for member in self:
            if member.role is Role.FOLLOWING or member.catch_up.loading is not None:
                member.catch_up.wanted = True

    def wanting(self) -> list[Membership]:
        """Return the memberships whose snapshot has not been begun."""
        return [m for m in self if m.catch_up.wanted and m.catch_up.loading is None]

    def begin_load(self, member: Membership) -> Loading:
        """Begin to take a snapshot in; what the log says meanwhile is kept for after it."""
        if member.role is Role.DIRECT:
            member.has_blocks = self._keeps_blocks
        return member.catch_up.begin()

    def accepts(self, member: Membership, loading: Loading) -> bool:
        """Return whether a snapshot is loaded whose head is known now; see `CatchUp`."""
        return member.catch_up.accepts(loading, self._caches.stream(member.candidate))

    def end_load(self, member: Membership, loading: Loading, *, through: int | None) -> None:
        """All of the snapshot is here. Where we follow the engine, that has to end first.

        `through`: the stream's number after the last block was read.
        """
        if member.catch_up.loading is not loading:
            self._index.discard(loading.staged)  # Redis went away meanwhile, or the candidate
            return
        member.catch_up.complete(through)
        if member.role is Role.FOLLOWING:
            self.swap_in(member)
        else:
            self._stop_publishing(member)
            member.become(Role.FOLLOWING)

    def swap_in(self, member: Membership) -> None:
        """Put a complete snapshot in place of what was known; from here on the log is followed."""
        stream = self._caches.stream(member.candidate)
        if not isinstance(stream, SharedStream):
            return
        loading = member.catch_up.take()
        if loading is None:
            return
        self.num_loads += 1
        head = loading.head or StreamHead(0, None, None, has_leader=False)
        if not member.has_blocks:  # there is nothing to go on from
            head = StreamHead(head.number, None, head.status, head.has_leader)
        stream.load(head, loading.staged, through=loading.through)
        self._keep_groups(member)
        for delta in loading.deltas:
            self._apply(member, delta)

    def _apply(self, member: Membership, delta: Delta) -> None:
        stream = self._caches.stream(member.candidate)
        if isinstance(stream, SharedStream):
            stream.apply(delta if member.has_blocks else _without_blocks(delta))
            member.catch_up.wanted |= stream.wants_snapshot
            self._keep_groups(member)

    def _keep_groups(self, member: Membership) -> None:
        """Keep the blocks of a model with several KV groups: Redis is asked for prefixes only."""
        if not member.has_blocks and self._index.has_groups(member.candidate):
            member.has_blocks = member.catch_up.wanted = True


def _knows_little(stream: CandidateStream | None) -> bool:
    """Return whether a direct stream has not read its engine's whole history."""
    return not isinstance(stream, RankStream) or bool(stream.status().lacks) or stream.is_blind


def _without_blocks(delta: Delta) -> Delta:
    """Keep what a delta says of the stream; without blocks there is no position to go on from."""
    return Delta(
        delta.stream_id, delta.number, cleared=delta.cleared, status=delta.status, continues=True
    )
