"""Forward: one try, from its headers to as much of the answer as may still be replaced.

That is an answer that is no stream, and the beginning of one that is: until something was
generated, another replica can answer instead.
"""

from __future__ import annotations

import logging
from functools import partial
from time import monotonic
from typing import Final

from msgspec import Struct

from router.api.opening import MAX_BYTES as MAX_OPENING_BYTES
from router.api.opening import Begun, Opening
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.errors import Overdue, UpstreamError, UpstreamUnreachable
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.request.handing import Handing
from router.request.headers import RequestHeaders
from router.request.job import Job, Placement
from router.request.overdue import Patience
from router.request.retry import SET_ASIDE, UNLOADED, Retries
from router.upstream import Answer, Upstream

logger = logging.getLogger(__name__)

RETRYABLE: Final = frozenset({500, 502, 503, 504})
"""An engine's own failures, worth one more replica. 500: Mooncake's connector answers it when a
pool object vanished between look-up and fetch (kv_load_failure_policy `fail`)."""

_SET_ASIDE: Final = (
    b"Generation is paused.",
    b"The model is currently scaling.",
    b"This data-parallel rank has been retired",
)
"""What a 503 says of a replica that is well, and computes nothing for now: paused, or changed by
elastic EP, which leaves /health at 200. Source: `_reject_add_while_paused` in v1/engine/core.py and
entrypoints/serve/elastic_ep/middleware.py of vLLM 0.33.0."""

_SMALL_ANSWER: Final = 1024 * 1024
_MAX_HELD_BYTES: Final = 4 * 1024 * 1024


class Attempt(Struct, frozen=True, kw_only=True):
    """How one try ended: an answer, or an error. A failure may be either."""

    answer: Answer | None = None
    error: UpstreamError | None = None
    failure: str | None = None  # None: it did not fail

    def outcome(self, placement: Placement) -> Outcome:
        """Return how a failed try ended, seen from its replica."""
        if self.failure in (UNLOADED, SET_ASIDE):
            return Outcome.CLIENT_ERROR
        if isinstance(self.error, Overdue):
            return Outcome.POOL_OVERDUE if placement.may_fetch else Outcome.OVERDUE
        is_refused = isinstance(self.error, UpstreamUnreachable)
        return Outcome.REPLICA_UNREACHABLE if is_refused else Outcome.REPLICA_FAILED


class Forwarder:
    """Sends requests to replicas."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        models: ServedModels,
        sleepers: Sleepers,
        headers: RequestHeaders,
        retries: Retries,
        patience: Patience,
        handing: Handing,
        metrics: Metrics,
    ) -> None:
        self._upstream = upstream
        self._models = models
        self._sleepers = sleepers
        self._headers = headers
        self._retries = retries
        self._patience = patience
        self._handing = handing
        self._metrics = metrics
        self._compress: set[str] = set()  # replicas that answered compressed

    async def send(self, job: Job, placement: Placement) -> Attempt:
        """Send one try.

        Raises:
            OutOfConnections: as `Upstream.open`.
        """
        await self._handing.hand_over(job, placement)
        try:
            answer = await self._ask(job, placement)
            if self._handing.is_refused(job, answer):
                answer.close()
                answer = await self._ask(job, placement)
        except UpstreamError as exc:
            return Attempt(error=exc, failure=exc.code)
        if answer.status == 404 and await self._is_unloaded(job, placement):
            return Attempt(answer=answer, failure=UNLOADED)
        if answer.outcome_status not in RETRYABLE:
            return Attempt(answer=answer)
        if answer.outcome_status == 503 and any(text in answer.first for text in _SET_ASIDE):
            self._sleepers.set_aside(placement.candidate.replica.name, monotonic())
            return Attempt(answer=answer, failure=SET_ASIDE)
        where = "status" if answer.error_status is None else "event"
        return Attempt(answer=answer, failure=f"{where}_{answer.outcome_status}")

    async def _is_unloaded(self, job: Job, placement: Placement) -> bool:
        """Return whether a replica has unloaded the adapter that it was asked for."""
        name, model = placement.candidate.replica.name, job.model
        if model is None or placement.candidate.replica.adapter_path(model) is None:
            return False
        return not await self._models.has(name, model)

    async def _ask(self, job: Job, placement: Placement) -> Answer:
        overdue_s = self._patience.overdue_s(placement)
        answer = await self._upstream.open(
            placement.candidate.replica.name,
            placement.candidate.replica.url + job.inbound.target,
            method=job.inbound.method,
            headers=self._headers.of(job, placement),
            body=job.forwarded[0],
            may_move_on=partial(self._retries.may_move_on, job, placement),
            may_resend=not job.has_side_effects,
            patience=partial(self._patience.wait_s, job, placement) if overdue_s else None,
            patience_s=overdue_s or 0.0,
            hold=partial(self._hold, job),
        )
        job.handed = None  # an answer takes minutes
        if answer.error_status is not None:
            name, status = placement.candidate.replica.name, str(answer.error_status)
            self._metrics.first_event_errors.labels(name, status).inc()
        if answer.is_encoded:
            self._note_encoded(placement.candidate.replica.name)
        try:
            if answer.is_encoded and answer.streams:  # not read, so not held either
                answer.first_s = None if job.inbound.api.starts_early else monotonic()
            elif not answer.is_event_stream:
                await answer.gather(_SMALL_ANSWER)
                answer.first_s = monotonic()
        except BaseException:
            answer.close()
            raise
        return answer

    def _note_encoded(self, replica: str) -> None:
        """Log, once for each replica, that what answers there compresses without being asked."""
        if replica not in self._compress:
            self._compress.add(replica)
            hint = "streams are not read: no usage, and no other replica after the first byte"
            logger.warning("answers come compressed", extra={"replica": replica, "hint": hint})

    async def _hold(self, job: Job, answer: Answer) -> None:
        """Keep a stream's beginning here until something was generated, or generating failed."""
        if not answer.is_event_stream:
            return
        answer.first_s = begun_s = monotonic()
        if answer.status != 200:
            return
        api = job.inbound.api
        # A client that gets our comments meanwhile can wait for the first token.
        is_patient = api.starts_early and job.keepalive_s is not None and not job.has_side_effects
        until_s = None if is_patient else begun_s + api.hold_s
        opening, most = Opening(), MAX_OPENING_BYTES + api.repeats * len(job.inbound.body or b"")
        while (said := opening.read(answer.first)) is Begun.NOT_YET:
            if answer.complete or len(answer.first) >= min(most, _MAX_HELD_BYTES):
                break
            if not await answer.read_on(None if until_s is None else until_s - monotonic()):
                break
        if api.starts_early:
            answer.first_s = None if said is Begun.NOT_YET else monotonic()
        if isinstance(said, int):
            answer.error_status = said
