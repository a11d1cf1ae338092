"""Witness: a request that failed is asked about its replica: is that still there?

    check      a request that comes: is it known to end replicas?
    lost       a try failed: it is a suspect if its replica turns out to be dead or hung
    left       the same, but its client did not wait for that
    answered   it was answered: it is no suspect

A replica that died answers to no probe the moment after, so its watch probes it at once: the
client's own retry comes within half a second. No request waits for that probe. Until its result is
known, a request may be sent to one more replica (`sent_twice` in `retry`). What one that hangs has
cost is learned from the usual probes. Requests without a body are not watched. See
`router.replicas.deaths`.
"""

from __future__ import annotations

import asyncio
import math
from time import monotonic
from typing import Final

from router.api.body_digest import LARGE_BYTES, body_digest
from router.base.errors import Overdue, RequestKills, RouterError, UpstreamTimeout
from router.records.outcome import Outcome
from router.replicas.deaths import Body, Deaths
from router.replicas.fleet import Fleet
from router.request.plan import Placement
from router.request.results import Inbound, Prompt, Tries

_LATE: Final = frozenset({UpstreamTimeout.code, Overdue.code})
"""Failures of a replica that may hang: its probes say so, one more would wait, too."""


class Witness:
    """Tells `Deaths` what happens to requests."""

    def __init__(self, deaths: Deaths, fleet: Fleet) -> None:
        self._deaths = deaths
        self._fleet = fleet

    async def check(self, inbound: Inbound) -> Body | None:
        """Return a request's digest, if any request is suspect.

        Raises:
            RequestKills: it is known to end replicas.
        """
        if not self._deaths.num_suspects or not inbound.body:
            return None
        body = await _digest(inbound)
        refused = self._refusal(body)
        if refused is not None:
            raise refused
        return body

    def refusal(self, tries: Tries) -> RouterError | None:
        """Return why a request must not be sent once more; None: it may be."""
        return self._refusal(tries.digest) if tries.digest is not None else None

    def may_kill(self, tries: Tries) -> bool:
        """Return whether two replicas went down with a request, which may be at fault."""
        return tries.digest is not None and self._deaths.num_deaths(tries.digest) > 1

    async def lost(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        failure: str,
        *,
        is_answered: bool = False,
    ) -> None:
        """Record that a try failed, and have its replica probed.

        Args:
            prompt: The request.
            tries: Its tries.
            placement: The try that failed.
            failure: How it failed.
            is_answered: Whether its client had got a part of the answer.
        """
        received = prompt.read.received
        if not received.body:
            return
        if tries.digest is None:
            tries.digest = await _digest(received)
        tries.lost_lease = placement.lease.number
        self._broke(tries.digest, placement, is_answered=is_answered)
        name = placement.replica
        if failure not in _LATE and not self._fleet.members.is_down(name):
            self._fleet.members.signs(name).broke()

    def left(self, prompt: Prompt, tries: Tries, placement: Placement) -> None:
        """Record that a client left; a suspect if its replica is down, as one that hangs."""
        received = prompt.read.received
        if received.body and self._fleet.members.is_down(placement.replica):
            tries.digest = tries.digest or _digest_now(received)
            self._broke(tries.digest, placement, is_answered=False)

    def answered(self, tries: Tries, placement: Placement, outcome: Outcome) -> None:
        """Record how an answer ended: a request that was answered is no suspect."""
        is_answered = outcome in (Outcome.OK, Outcome.CLIENT_ERROR)
        if is_answered and tries.digest is not None and tries.lost_lease != placement.lease.number:
            self._deaths.clear(tries.digest)

    def _broke(self, body: Body, placement: Placement, *, is_answered: bool) -> None:
        self._deaths.broke(
            placement.replica,
            body,
            is_answered=is_answered,
            begun_s=placement.lease.begun_s,
            now_s=monotonic(),
        )

    def _refusal(self, body: Body) -> RouterError | None:
        now_s = monotonic()
        refusal = self._deaths.refusal(body, now_s)
        if refusal is None:
            return None
        num_replicas = len(refusal.replicas)
        is_one = num_replicas == 1
        which = "A replica went down twice" if is_one else f"{num_replicas} replicas went down"
        return RequestKills(
            f"{which} while processing this request, so it is refused for another "
            f"{math.ceil(refusal.until_s - now_s)} s. Change the request."
        )


async def _digest(inbound: Inbound) -> Body:
    if len(inbound.body or b"") > LARGE_BYTES:
        return await asyncio.to_thread(_digest_now, inbound)
    return _digest_now(inbound)


def _digest_now(inbound: Inbound) -> Body:
    owner = inbound.caller.name or ""
    content_type = inbound.headers.get("Content-Type", "")
    return Body(body_digest(inbound.body or b"", content_type, path=inbound.path, owner=owner))
