"""How this router keeps a candidate's blocks known: from its engine, or from its leader.

A watch asks `follow`, and does not see which way it goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing, suppress
from typing import Final

from policies.view import CandidateId
from router.cluster.candidate_names import CandidateNames
from router.cluster.candidate_source import CandidateSource
from router.cluster.link import Link
from router.cluster.membership import Membership, Memberships, Role
from router.cluster.outbox import Outbox
from router.cluster.shared_stream import SharedStream
from router.index.cache_view import CacheView
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream

logger = logging.getLogger(__name__)

_SUSPICION_S: Final = 1.0  # a suspicion is sent so often until it is gone
_SETTLE_S: Final = 5.0
"""How long a candidate waits for Redis before it is followed without; a Redis that refuses is not
waited for. Who begins without reads what the engine can replay, and has to write it all."""


class Following:
    """Follows candidates, by the way that their memberships say."""

    def __init__(
        self,
        *,
        caches: CacheView,
        names: CandidateNames,
        memberships: Memberships,
        link: Link,
        outbox: Outbox,
    ) -> None:
        self._caches = caches
        self._names = names
        self._memberships = memberships
        self._link = link
        self._outbox = outbox

    async def follow(self, source: CandidateSource) -> None:
        """Keep a candidate's blocks known, by the way that is open, until cancelled.

        Raises:
            ValueError, ConfigError: its event endpoint is none.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await self._link.settled.wait()
        id_ = self._names.stream_id_of(source.candidate)
        if id_ is None:  # removed meanwhile
            return
        member = self._memberships.join(id_, source.candidate, is_shared=self._link.is_up)
        try:
            while True:
                if member.role is Role.FOLLOWING:
                    await self._follow_router(member, source)
                else:
                    await self._follow_engine(member, source)
        finally:
            self._memberships.leave(member)

    async def _follow_engine(self, member: Membership, source: CandidateSource) -> None:
        """Follow the engine ourselves, until another router is to be followed."""
        events = source.events()
        known = self._caches.stream(member.candidate)
        if isinstance(known, RankStream):
            stream = known
        else:
            stream = source.rank_stream()
            self._caches.hand_over(member.candidate, stream)
            if isinstance(known, SharedStream) and known.position is not None:
                stream.resume(known.position, known.status(), time.monotonic())
            else:  # there is no point in the engine's history to go on from
                self._caches.index.clear(member.candidate)
        with closing(events):  # cancelled before its first step, the follower would not
            async with asyncio.TaskGroup() as tg:
                task = tg.create_task(follow(stream, events), name=f"events {member.candidate}")
                while member.role is not Role.FOLLOWING:
                    member.changed.clear()
                    await member.changed.wait()
                task.cancel()

    async def _follow_router(self, member: Membership, source: CandidateSource) -> None:
        """Follow another router through the log, until the engine has to be followed."""
        stream = source.shared_stream()
        self._caches.hand_over(member.candidate, stream)
        self._memberships.swap_in(member)
        while member.role is Role.FOLLOWING:
            member.changed.clear()
            await member.changed.wait()

    def restarted(self, candidate: CandidateId) -> None:
        """Let the others know that a candidate's engine is a new process, and holds nothing."""
        id_ = self._names.stream_id_of(candidate)
        member = self._memberships.get(id_) if id_ is not None else None
        if member is not None and member.role is Role.LEADING:
            self._memberships.end_epoch(member)
        else:
            self._outbox.suspected(candidate, "its engine restarted")

    async def repeat_suspicions(self) -> None:
        """Ask the leader of a suspect candidate to read history anew, until it has."""
        while True:
            for member in self._memberships:
                stream = self._caches.stream(member.candidate)
                if isinstance(stream, SharedStream) and stream.suspicion is not None:
                    self._outbox.suspected(member.candidate, stream.suspicion)
            await asyncio.sleep(_SUSPICION_S)

    def suspected(self, candidate: CandidateId, reason: str) -> None:
        """Read history anew, if we follow the engine of a candidate that another suspects."""
        stream = self._caches.stream(candidate)
        if isinstance(stream, RankStream):
            logger.info(
                "another router suspects a candidate",
                extra={"candidate": candidate, "reason": reason},
            )
            stream.mark_suspect(reason)
