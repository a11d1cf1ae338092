"""Which requests may be sent again: not those that bring replicas down, and not too many.

A request that is in flight when its replica goes down is a suspect. It is the culprit if it was at
two deaths, and one of these holds:

1. It is the only request that was at all deaths that it was at.
2. Several requests were, and it is the only one whose answer had not begun at any of these deaths.

Innocent requests are not refused while they accompany a culprit. They are sent again, are answered,
and are no suspects any more. Once the culprit is known, its deaths count for no other request.
Requests are known by a digest, so a request that is sent again is recognised.

A death is remembered for an hour. A culprit is refused for ten minutes after its last death. So a
request that is sent again and again ends one replica each time, not two. Each router learns for
itself.

What must live here: deaths, and the verdict. What must not: how a death is detected, any I/O.

`RetryBudget` bounds how many requests are sent a second time: a share of the recent ones, and a few
more. Without a bound a failing fleet receives everything twice, and fails for longer. Requests that
a replica loses at the same time count as one loss: it died with sixty requests, or its pool's
objects are gone. Each of these is sent once more at most.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Final, NewType

from msgspec import Struct

from router.base.bounded import RecentSum

logger = logging.getLogger(__name__)

Body = NewType("Body", bytes)
"""The digest of a request; see `router.api.digests`."""

REFUSED_S: Final = 600.0
MEMORY_S: Final = 3600.0
NEAR_S: Final = 10.0
"""A broken connection and a death within this time are one event."""

_MAX_DEATHS: Final = 256
_MAX_BODIES: Final = 20_000  # of all deaths together
_MAX_BROKEN: Final = 10_000


class Refusal(Struct, frozen=True, kw_only=True):
    """Why a request is not sent any more."""

    replicas: tuple[str, ...]  # that went down, first one first
    until_s: float


class _Broken(Struct, frozen=True):
    """A request that failed, while it is not known whether its replica went down."""

    replica: str
    body: Body
    is_answered: bool
    begun_s: float
    at_s: float


class _Death(Struct, kw_only=True):
    """A replica that went down, and the requests that were there: whether each was answered."""

    replica: str
    at_s: float
    bodies: dict[Body, bool]
    culprit: Body | None = None


class Deaths:
    """The deaths of the last hour; their number is bounded, the oldest is dropped first."""

    def __init__(self) -> None:
        self._deaths: deque[_Death] = deque()
        self._broken: deque[_Broken] = deque(maxlen=_MAX_BROKEN)
        self.num_suspects = 0  # requests that may have ended a replica; if 0, no digest is needed

    # -- what happened -----------------------------------------------------------------------

    def broke(
        self, replica: str, body: Body, *, is_answered: bool, begun_s: float, now_s: float
    ) -> None:
        """Record that a request failed at a replica, which may be going down.

        Args:
            is_answered: Whether its client had received a part of the answer.
            begun_s: When it was sent there: a death before that is not its doing.
        """
        broken = _Broken(replica, body, is_answered, begun_s, now_s)
        for death in self._deaths:
            if death.replica == replica and begun_s <= death.at_s:
                self._add(death, broken)
                return
        self._broken.append(broken)

    def went_down(self, replica: str, now_s: float) -> None:
        """Record that a replica is dead or hangs; requests that fail there later were at it."""
        self._explain(self._begin(replica, now_s), now_s)

    def restarted(self, replica: str, now_s: float) -> None:
        """Record that another process answers for a replica that was never seen down."""
        if any(self._broken_at(replica, now_s)):
            self._explain(self._begin(replica, now_s), now_s)

    def clear(self, body: Body) -> None:
        """Suspect a request no more: it was answered."""
        for death in self._deaths:
            if death.bodies.pop(body, None) is not None:
                self.num_suspects -= 1
                death.culprit = None if death.culprit == body else death.culprit

    # -- the verdict -------------------------------------------------------------------------

    def num_deaths(self, body: Body) -> int:
        """Count the deaths that a request was at and that no other request is known to cause."""
        return len(self._deaths_of(body))

    def refusal(self, body: Body, now_s: float) -> Refusal | None:
        """Return why a request must not be sent; None: it may be."""
        self._drop_old(now_s)
        deaths = self._deaths_of(body)
        if len(deaths) < 2 or not _is_culprit(body, deaths):
            return None
        refusal = Refusal(
            replicas=tuple(dict.fromkeys(death.replica for death in deaths)),
            until_s=max(death.at_s for death in deaths) + REFUSED_S,
        )
        if now_s >= refusal.until_s:
            return None
        if any(death.culprit is None for death in deaths):
            for death in deaths:
                death.culprit = body
            logger.warning(
                "request refused from now on: replicas went down while they processed it",
                extra={
                    "body": body.hex(),
                    "replicas": ",".join(refusal.replicas),
                    "deaths": len(deaths),
                    "for_s": round(refusal.until_s - now_s),
                },
            )
        return refusal

    # -- private -----------------------------------------------------------------------------

    def _deaths_of(self, body: Body) -> list[_Death]:
        return [d for d in self._deaths if body in d.bodies and d.culprit in (None, body)]

    def _begin(self, replica: str, at_s: float) -> _Death:
        death = _Death(replica=replica, at_s=at_s, bodies={})
        self._deaths.append(death)
        return death

    def _broken_at(self, replica: str, now_s: float) -> Iterator[_Broken]:
        return (b for b in self._broken if b.replica == replica and now_s - b.at_s < NEAR_S)

    def _explain(self, death: _Death, now_s: float) -> None:
        """Add the requests that failed there a moment ago."""
        for broken in list(self._broken_at(death.replica, now_s)):
            self._broken.remove(broken)
            self._add(death, broken)
        self._drop_old(now_s)

    def _add(self, death: _Death, broken: _Broken) -> None:
        if broken.body not in death.bodies:
            self.num_suspects += 1
            death.bodies[broken.body] = broken.is_answered

    def _drop_old(self, now_s: float) -> None:
        while self._deaths and (
            now_s - self._deaths[0].at_s > MEMORY_S
            or len(self._deaths) > _MAX_DEATHS
            or (self.num_suspects > _MAX_BODIES and len(self._deaths) > 1)
        ):
            self.num_suspects -= len(self._deaths.popleft().bodies)
        while self._broken and now_s - self._broken[0].at_s > NEAR_S:
            self._broken.popleft()


def _is_culprit(body: Body, deaths: list[_Death]) -> bool:
    """Return whether a request is the one that explains all deaths it was at."""
    if any(death.culprit == body for death in deaths):
        return True
    common = set(deaths[0].bodies).intersection(*(death.bodies for death in deaths[1:]))
    unanswered = {each for each in common if not any(death.bodies[each] for death in deaths)}
    return common == {body} or unanswered == {body}


WINDOW_S: Final = 10.0
NUM_ALWAYS: Final = 10  # in a window: a share of little traffic is nothing
AT_ONCE_S: Final = 5.0


class RetryBudget:
    """Counts requests and retries.

    requests: How many came recently; each adds 1.

    Args:
        ratio: Share of recent requests that may be sent again.
    """

    __slots__ = ("_losses", "_ratio", "_retries", "requests")

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.requests = RecentSum(WINDOW_S)
        self._retries = RecentSum(WINDOW_S)
        self._losses: dict[str, float] = {}  # replica -> when its last loss began

    def can_take(self, replica: str, begun_s: float, now_s: float) -> bool:
        """Return whether a failed request, sent to `replica` at `begun_s`, may be sent again."""
        if self._is_same_loss(replica, begun_s, now_s):
            return True
        allowed = NUM_ALWAYS + self._ratio * self.requests.at(now_s)
        return self._retries.at(now_s) + 1.0 <= allowed

    def take(self, replica: str, begun_s: float, now_s: float) -> bool:
        """Count a request that is sent again; arguments as of `can_take`. False: it was counted."""
        if self._is_same_loss(replica, begun_s, now_s):
            return False
        self._losses[replica] = now_s
        self._retries.add(1.0, now_s)
        return True

    def give_back(self, replica: str, now_s: float) -> None:
        """Take back a request that counted, and is not sent again."""
        self._losses.pop(replica, None)
        self._retries.add(-1.0, now_s)

    def _is_same_loss(self, replica: str, begun_s: float, now_s: float) -> bool:
        lost_s = self._losses.get(replica)
        return lost_s is not None and begun_s <= lost_s and now_s < lost_s + AT_ONCE_S
