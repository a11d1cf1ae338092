"""Prefill: have a prompt computed elsewhere, then have its answer given where it is decoded.

Only of a request that a replica of role decode answers. A prefill replica that fails is left for
another one, once; whatever goes wrong then, or in another way, the decode replica computes the
prompt itself: a failed prefill is no client's error. What is held at either
replica is given back however it ends, and a client that leaves ends both at once.

    store     the prompt, then, when the pool has it, the request as it came
    nixl      the prompt; its answer's `kv_transfer_params` go with the request. In push mode
              engines match the two by request id: both get one that no other request has, and what
              has no id of ours (a response), or several (n > 1), is not sent on
    mooncake  both at once, with one `transfer_id`: the decode replica waits for the other. If that
              fails, or ends its prompt early, it would wait for 480 s: its try is cut, and it
              computes the prompt

Source: vLLM 0.32.0, distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py
(`update_state_after_alloc`, `request_finished`), nixl/pull_scheduler.py, nixl/push_worker.py
(`_pop_matching_registration`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from policies.naming import params_of
from router.api.prefill_body import decode_body, is_capped, prefill_body, transfer_params
from router.config import PrefillConfig
from router.errors import (
    BadRequest,
    ConnectTimeout,
    OutOfConnections,
    UpstreamBroken,
    UpstreamError,
    UpstreamUnreachable,
)
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.records.record import PrefillRecord
from router.replicas.fleet import Fleet
from router.request.admit import Admission
from router.request.bootstraps import Bootstraps
from router.request.decide import Decider
from router.request.forward import Attempt, Forwarder
from router.request.headers import RequestHeaders
from router.request.job import Choice, Job, Placement
from router.request.retry import Retries
from router.request.verify import PoolVerifier
from router.upstream import Upstream

_MOST_BYTES: Final = 1024 * 1024  # of the answer to a prompt: one token
_LOOK_S: Final = 0.005
_ASK_EVERY: Final = 4  # looks: the master is asked; in between events may say so


_LEFT: Final = frozenset(
    {UpstreamUnreachable.code, ConnectTimeout.code, UpstreamBroken.code, "bootstrap"}
)
"""How a prefill replica fails, besides 5xx, that another one would not: that is asked instead.
Where it took too long, the decode replica has waited enough."""

_UNREAD: Final = ("status_", "event_")
"""How a decode replica fails that could not read what another one has computed, and others too: it
is asked to compute it."""

_MOONCAKE_ASK: Final[Mapping[str, Any]] = {"do_remote_decode": True, "do_remote_prefill": False}
_NIXL_ASK: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Done(Struct, frozen=True, kw_only=True):
    """How a prompt's request ended."""

    failure: str | None = None  # None: it was computed
    num_cached_tokens: int | None = None
    is_capped: bool = False  # it ended for its length
    params: dict[str, Any] | None = None  # for the replica that decodes it


class Prefill:
    """Sends requests whose prompt may be computed elsewhere.

    Args:
        pool: None: nothing is known of the pool, so nothing of it is awaited.
    """

    def __init__(
        self,
        config: PrefillConfig,
        *,
        upstream: Upstream,
        headers: RequestHeaders,
        decider: Decider,
        admission: Admission,
        forwarder: Forwarder,
        retries: Retries,
        fleet: Fleet,
        bootstraps: Bootstraps,
        pool: PoolVerifier | None,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._headers = headers
        self._decider = decider
        self._admission = admission
        self._forwarder = forwarder
        self._retries = retries
        self._fleet = fleet
        self._bootstraps = bootstraps
        self._pool = pool
        self._metrics = metrics

    async def send(self, job: Job, placement: Placement) -> Attempt:
        """Send one try: its prompt where that is planned, and the request itself.

        Raises:
            OutOfConnections: as `Upstream.open`.
        """
        job.transfer = None
        record, prefill = _planned(placement), placement.prefill
        attempt: Attempt | None = None
        try:
            if prefill is not None:
                record, attempt = await self._try(job, placement, prefill, record)
                if attempt is None and self._retries.witness.refusal(job) is not None:
                    return _gone(prefill)
                again = self._again(job, placement, prefill, record) if attempt is None else None
                if again is not None:
                    self._note(job, record)
                    prefill, record = again, _planned(placement)
                    record, attempt = await self._try(job, placement, prefill, record)
            if attempt is None and self._retries.witness.refusal(job) is not None:
                assert prefill is not None  # it has died just now
                return _gone(prefill)
            if attempt is None:
                attempt = await self._decode(job, placement, record)
            if prefill is None or record.transfer == "store":
                return attempt
            if (attempt.failure or "").startswith(_UNREAD):
                if attempt.answer is not None:
                    attempt.answer.close()
                self._forget(job, prefill)
                record = replace(record, result="failed", why=attempt.failure or "")
                attempt = await self._decode(job, placement, record)
            return attempt
        finally:
            job.transfer = job.engine_id = None  # an answer takes minutes
            if prefill is None or record.result != "local":  # else its client left before
                self._note(job, record)

    async def _try(
        self, job: Job, placement: Placement, prefill: Placement, record: PrefillRecord
    ) -> tuple[PrefillRecord, Attempt | None]:
        """Have a prompt computed elsewhere, and write down what came of it; as `_elsewhere`."""
        begun_s = monotonic()
        done, attempt = await self._elsewhere(job, placement, prefill)
        if done.failure:
            self._forget(job, prefill)
            if done.failure == UpstreamBroken.code or done.failure.startswith("status_5"):
                await self._retries.witness.lost(job, prefill, done.failure)
        record = replace(
            record,
            result="failed" if done.failure else "remote",
            why=done.failure or record.why,
            ms=(monotonic() - begun_s) * 1000.0,
            num_reported_cached_tokens=done.num_cached_tokens,
        )
        return record, attempt

    def _again(
        self, job: Job, placement: Placement, prefill: Placement, record: PrefillRecord
    ) -> Placement | None:
        """Book a prompt at another prefill replica than the one that failed; None: none may."""
        may_help = record.why in _LEFT or record.why.startswith("status_5")
        if record.result != "failed" or not may_help:
            return None
        if not self._retries.may_prefill_again(prefill, record.why):
            return None
        choice = self._decider.prefill_again(job, placement, prefill)
        if choice is None:
            return None
        return self._admission.prefill_again(job, placement, choice)

    def _note(self, job: Job, record: PrefillRecord) -> None:
        """Note where a prompt was computed; of several tries, the last that went elsewhere."""
        self._metrics.prefills.labels(record.result, record.why).inc()
        if record.ms is not None:
            self._metrics.prefill_seconds.labels(record.candidate).observe(record.ms / 1000.0)
        if job.prefill is None or record.candidate is not None:
            job.prefill = record

    def _forget(self, job: Job, prefill: Placement) -> None:
        """Forget a transfer that failed: the engine there may be another process."""
        job.transfer = job.engine_id = None
        self._bootstraps.forget(prefill.candidate.replica.name)

    async def _decode(self, job: Job, placement: Placement, record: PrefillRecord) -> Attempt:
        """Send a request whose prompt is computed, or is to be where it is decoded."""
        if placement.prefill is not None and not await self._go_on(job, placement, record):
            name = placement.candidate.replica.name
            error = UpstreamUnreachable(name, f"replica {name} was removed")
            return Attempt(error=error, failure=error.code)
        return await self._forwarder.send(job, placement)

    async def _elsewhere(
        self, job: Job, placement: Placement, prefill: Placement
    ) -> tuple[_Done, Attempt | None]:
        """Have a prompt computed elsewhere; with what came of the request, if that was sent, too.

        What the prefill replica holds of it is given back.
        """
        is_begun = False
        try:
            match placement.candidate.replica.transfer:
                case "store":
                    params, engine_id = None, None
                case "nixl":
                    params, engine_id = _NIXL_ASK, None
                    job.engine_id = f"{job.request_id}-{secrets.token_hex(8)}"
                case "mooncake":
                    try:
                        engine_id = await self._bootstraps.engine_id(prefill.candidate)
                    except UpstreamError:
                        return _Done(failure="bootstrap"), None
                    params = {**_MOONCAKE_ASK, "transfer_id": secrets.token_hex(16)}
            try:
                body = prefill_body(job.inbound.api.name, job.inbound.body or b"", params)
                if engine_id is not None:
                    assert params is not None
                    job.transfer = decode_body(
                        job.inbound.body or b"", _mooncake_params(prefill, engine_id, params)
                    )
            except BadRequest:
                return _Done(failure="body"), None
            is_begun = True
        finally:
            if not is_begun:
                self._admission.release(prefill, Outcome.CLIENT_GONE)
        if engine_id is not None:
            return await self._at_once(job, placement, prefill, body)
        done = await self._compute(job, prefill, body)
        if done.failure is None and params is not None:
            if done.params is None:
                return replace(done, failure="no_transfer"), None
            if done.params.get("transfer_mode") != "push":
                job.engine_id = None
            elif not _can_push(job):
                return replace(done, failure="push"), None
            try:
                job.transfer = decode_body(job.inbound.body or b"", done.params)
            except BadRequest:
                return replace(done, failure="body"), None
        return done, None

    async def _at_once(
        self, job: Job, placement: Placement, prefill: Placement, body: bytes
    ) -> tuple[_Done, Attempt | None]:
        """Send a prompt and its request at once; a failure of either cuts the other."""
        done: _Done | None = None
        attempt: Attempt | None = None
        shortage: OutOfConnections | None = None

        async def compute() -> None:
            nonlocal done
            done = await self._compute(job, prefill, body)
            if done.failure is None and not done.is_capped:
                done = replace(done, failure="ended")
            if done.failure is not None:
                decoding.cancel()

        async def decode() -> None:
            nonlocal attempt, shortage
            try:
                attempt = await self._forwarder.send(job, placement)
            except OutOfConnections as exc:
                shortage = exc
            if attempt is None or attempt.answer is None or attempt.answer.outcome_status != 200:
                computing.cancel()

        try:
            async with asyncio.TaskGroup() as tg:
                computing = tg.create_task(compute(), name="prefill")
                decoding = tg.create_task(decode(), name="decode")
        except BaseException:
            if attempt is not None and attempt.answer is not None:
                attempt.answer.close()
            raise
        finally:
            if done is None:  # cut, perhaps before it began
                self._admission.release(prefill, Outcome.CLIENT_GONE)
        if shortage is not None:
            raise shortage
        if done is None:
            done = _Done(failure="cut")
        elif done.failure is not None and attempt is not None:
            if attempt.answer is not None:
                attempt.answer.close()
            attempt = None
        return done, attempt

    async def _go_on(self, job: Job, placement: Placement, record: PrefillRecord) -> bool:
        """Book a request anew where it is decoded; False: that is gone."""
        if not self._fleet.has(placement.candidate.id):
            return False
        choice = self._decider.look(job, placement)
        if record.result == "remote" and record.transfer == "store":
            choice = await self._stored(job, placement, choice)
        if not self._fleet.has(placement.candidate.id):
            return False
        is_sent = record.result == "remote" and record.transfer != "store"
        self._admission.rebook(job, placement, choice, is_sent=is_sent)
        return True

    async def _compute(self, job: Job, placement: Placement, body: bytes) -> _Done:
        """Have a prompt computed, and give back what it holds there."""
        replica = placement.candidate.replica
        outcome = Outcome.CLIENT_GONE  # unless it gets to the end
        try:
            headers = self._headers.of(job, placement)
            headers.popall("Content-Encoding", None)
            async with asyncio.timeout(self._config.timeout_s):
                answer = await self._upstream.open(
                    replica.name,
                    replica.url + job.inbound.target,
                    method=job.inbound.method,
                    headers=headers,
                    body=body,
                )
                try:
                    await answer.gather(_MOST_BYTES)
                finally:
                    answer.close()
        except TimeoutError:
            outcome = Outcome.OVERDUE
            return _Done(failure="timeout")
        except UpstreamUnreachable as exc:
            outcome = Outcome.REPLICA_UNREACHABLE
            return _Done(failure=exc.code)
        except UpstreamError as exc:
            outcome = Outcome.REPLICA_FAILED
            return _Done(failure=exc.code)
        else:
            outcome = Outcome.of_status(answer.status)
            if answer.status != 200:
                return _Done(failure=f"status_{answer.status}")
            self._admission.prefilled(placement)
            body = answer.readable
            usage = job.inbound.api.usage_of_body(body)
            return _Done(
                num_cached_tokens=usage.num_cached_tokens if usage is not None else None,
                is_capped=is_capped(body),
                params=transfer_params(body),
            )
        finally:
            self._admission.release(placement, outcome)

    async def _stored(self, job: Job, placement: Placement, choice: Choice) -> Choice:
        """Wait until a prompt that was computed is in the pool, but not for long.

        An engine answers before it has stored all of it.
        """
        if self._pool is None:
            return choice
        until_s = monotonic() + self._config.store_wait_s
        num_looks = 0
        while choice.pool is not None and choice.pool.num_blocks < len(choice.pool.chain):
            num_looks += 1
            if num_looks % _ASK_EVERY == 0:
                await self._pool.ask_for_all(job, choice)
            else:
                await asyncio.sleep(_LOOK_S)
            choice = self._decider.look(job, placement)
            if monotonic() >= until_s:
                break
        return choice


def _can_push(job: Job) -> bool:
    """Return whether both halves of a request have one id at their engines, and the same.

    The Responses route makes ids of its own; of several answers each has another.
    """
    return job.inbound.api.name != "responses" and job.prompt is not None and job.prompt.n == 1


def _mooncake_params(
    prefill: Placement, engine_id: str, params: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": prefill.candidate.replica.bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": params["transfer_id"],
    }


def _gone(prefill: Placement) -> Attempt:
    """Return how a request ends whose prompt has ended a replica again."""
    name = prefill.candidate.replica.name
    error = UpstreamBroken(name, f"replica {name} went down")
    return Attempt(error=error, failure=error.code)


def _planned(placement: Placement) -> PrefillRecord:
    """Write down a plan, before anything of it has happened."""
    plan, prefill = placement.plan, placement.prefill
    assert plan is not None
    record = PrefillRecord(
        result="local",
        why=plan.why,
        here_ms=plan.here_ms,
        there_ms=plan.there_ms,
        transfer=placement.candidate.replica.transfer,
    )
    if prefill is None or plan.choice is None:
        return record
    [cost] = [cost for cost in plan.choice.costs() if cost.id == prefill.candidate.id]
    return replace(
        record,
        candidate=prefill.candidate.id,
        cost=cost,
        predicted_ms=prefill.lease.predicted_ms,
        num_predicted_cached_tokens=prefill.num_cached_tokens,
        policy=plan.choice.policy.name,
        policy_params=params_of(plan.choice.policy),
        snapshot=plan.choice.snapshot,
        decision=plan.choice.decision,
    )
