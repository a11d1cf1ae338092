"""Observe: what became of a request: counted, audited, recorded, said in one log line."""

from __future__ import annotations

import logging
import time

from policies.naming import params_of
from router.api.usage import Usage
from router.experiments.runner import ExperimentRunner
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.records.log import DecisionLog
from router.records.outcome import Outcome
from router.records.record import DecisionRecord
from router.request.job import Choice, Job, Placement
from router.request.shadow import Shadows
from router.request.token_audit import TokenAudit
from router.request.verify import PoolVerifier

logger = logging.getLogger(__name__)


class Observer:
    """Takes note of finished requests; never fails one."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        caches: CacheView,
        token_audit: TokenAudit,
        pool: PoolVerifier | None,
        decision_log: DecisionLog | None,
        experiments: ExperimentRunner,
        shadows: Shadows,
    ) -> None:
        self._metrics = metrics
        self._caches = caches
        self._token_audit = token_audit
        self._pool = pool
        self._decision_log = decision_log
        self._experiments = experiments
        self._shadows = shadows
        self._stages = _StageMetrics(metrics)
        self._by_candidate: dict[str, _CandidateMetrics] = {}
        metrics.on_dropped.append(lambda candidate: self._by_candidate.pop(candidate, None))

    def finished(
        self,
        job: Job,
        placement: Placement,
        *,
        status: int,
        outcome: Outcome,
        usage: Usage | None,
        first_s: float | None,
        now_s: float,
    ) -> None:
        """Note the end of a request that was placed; `first_s` None: no byte of an answer came."""
        ttft_ms = None
        if first_s is not None and job.streams and status == 200:
            ttft_ms = (first_s - job.placed_s) * 1000
        record = _record_of(
            job,
            placement,
            state=placement.state,
            status=status,
            outcome=outcome,
            num_cached_tokens=placement.num_cached_tokens,
            usage=usage,
            predicted_ttft_ms=placement.predicted_ttft_ms,
            ttft_ms=ttft_ms,
            router_s=job.placed_s - job.inbound.arrived_s,
            now_s=now_s,
        )
        self._count(job, placement, record, first_s)
        if job.assigned is not None:
            ttft_s = None
            if first_s is not None and record.ttft_ms is not None:
                ttft_s = first_s - job.inbound.arrived_s
            self._experiments.observe(job.assigned, record, ttft_s)
        if usage is not None:
            self._audit(job, placement, usage)
        assigned = record.assignment
        logger.info(
            "routed",
            extra={
                "fields": {
                    "request": job.request_id,
                    "client": job.inbound.client.address if job.inbound.client else None,
                    "model": job.model,
                    "tenant": record.tenant,
                    "replica": placement.candidate.id,
                    "arm": f"{assigned.experiment}/{assigned.arm}" if assigned else None,
                    "why": placement.decision.reason,
                    "prefill": job.prefill.where if job.prefill is not None else None,
                    "tokens": job.num_tokens,
                    "cached": placement.num_cached_tokens,
                    "pool": placement.num_pool_tokens,
                    "reported": record.num_reported_cached_tokens,
                    "state": placement.state,
                    "tries": len(job.tries),
                    "status": status,
                    "outcome": outcome.value,
                    "router_ms": round(record.router_ms, 2),
                    "waited_ms": round(record.waited_ms, 1),
                    "waited_for": record.waited_for,
                    "released": record.released,
                    "ttft_ms": None if record.ttft_ms is None else round(record.ttft_ms, 1),
                    "total_ms": round(record.total_ms, 1),
                }
            },
        )
        if job.prompt is not None:
            self._shadows.put(record, self._write)
        else:
            self._write(record)

    def left(self, job: Job, choice: Choice, *, status: int, now_s: float) -> None:
        """Note a request whose client left while it waited; it was never sent to `choice`."""
        record = _record_of_waiting(job, choice, self._caches, status=status, now_s=now_s)
        if job.tenant is not None:
            self._metrics.tenant_requests.labels(job.tenant.label, record.outcome).inc()
            self._metrics.tenant_waits.labels(job.tenant.label).inc(job.waited_ms / 1000)
        logger.info(
            "client left the queue",
            extra={
                "request": job.request_id,
                "client": job.inbound.client.address if job.inbound.client else None,
                "model": job.model,
                "tenant": record.tenant,
                "tokens": job.num_tokens,
                "waited_ms": round(job.waited_ms, 1),
            },
        )
        self._write(record)

    def sweep(self, now_s: float) -> None:
        """Look for what is still to come of requests that were answered."""
        self._token_audit.sweep(now_s)

    def counted(self, job: Job) -> None:
        """Note a request that was answered with the number of its prompt's tokens."""
        self._metrics.counted.labels("router").inc()
        client, tenant = job.inbound.client, job.tenant
        logger.info(
            "counted",
            extra={
                "request": job.request_id,
                "client": client.address if client is not None else None,
                "model": job.model,
                "tenant": tenant.name if tenant is not None else None,
                "tokens": job.num_counted_tokens,
            },
        )

    def _write(self, record: DecisionRecord) -> None:
        if self._decision_log is not None:
            self._decision_log.add(record)

    def _count(
        self, job: Job, placement: Placement, record: DecisionRecord, first_s: float | None
    ) -> None:
        name, arrived_s = placement.candidate.id, job.inbound.arrived_s
        metrics, stages = self._of(name), self._stages
        if job.tenant is not None:
            label = job.tenant.label
            self._metrics.tenant_requests.labels(label, record.outcome).inc()
            self._metrics.tenant_tokens.labels(label, "prompt").inc(job.num_tokens)
            if job.charge is not None:
                self._metrics.tenant_tokens.labels(label, "uncached").inc(job.charge.num_tokens)
            if job.waited_ms:
                self._metrics.tenant_waits.labels(label).inc(job.waited_ms / 1000)
        if job.inbound.api.counts:
            self._metrics.counted.labels("engine").inc()
        self._metrics.requests.labels(job.inbound.api.name, name, record.outcome).inc()
        if first_s is not None:
            metrics.ttft.observe(first_s - arrived_s)
        stages.tokenize.observe(job.tokenized_s - arrived_s)
        waited_s = job.waited_ms / 1000
        stages.place.observe(job.placed_s - job.tokenized_s - waited_s)
        stages.total.observe(job.placed_s - arrived_s - waited_s)
        metrics.prompt_tokens.inc(job.num_tokens)
        metrics.predicted_tokens.inc(placement.num_cached_tokens)
        metrics.cpu_tokens.inc(placement.num_cpu_tokens)
        metrics.pool_tokens.inc(placement.num_pool_tokens)
        if record.ttft_ms is not None:
            error_ms = abs(record.ttft_ms - placement.predicted_ttft_ms)
            metrics.ttft_error.observe(error_ms / 1000)

    def _of(self, candidate: str) -> _CandidateMetrics:
        metrics = self._by_candidate.get(candidate)
        if metrics is None:
            metrics = self._by_candidate[candidate] = _CandidateMetrics(self._metrics, candidate)
        return metrics

    def _audit(self, job: Job, placement: Placement, usage: Usage) -> None:
        """Compare what was predicted with what the engine reports."""
        if job.completion is not None and len(job.completion.prompts) > 1:
            return  # usage sums the prompts; only the first was predicted
        self._token_audit.audit(job, placement, usage.prompt_tokens)
        if job.prefill is not None and job.prefill.is_peer_to_peer:
            return  # all of it came from elsewhere
        reported = usage.num_cached_tokens
        if reported is None or not job.is_placed_at(placement.candidate):
            return
        name, error = placement.candidate.id, placement.num_cached_tokens - reported
        metrics = self._of(name)
        if job.tokens is None:
            return
        if placement.is_guess:
            metrics.audit["partial"].inc()
            metrics.reported_tokens.inc(reported)
            return
        claim = placement.claim
        result = "exact" if error == 0 else "over" if error > 0 else "under"
        if result == "over" and claim is not None:
            predicted = placement.num_cached_tokens
            if self._caches.was_overtaken(claim, reported, predicted):
                result = "evicted"  # between decision and schedule: no fault of what we know
        contract = self._caches.contract(name)
        size = contract.block_size if contract is not None else 1
        is_partial = self._token_audit.is_partial(job, placement, reported, size)
        if is_partial or self._caches.is_unknown(name, job.extra):
            metrics.audit["partial"].inc()
            metrics.reported_tokens.inc(reported)
            return
        metrics.audit[result].inc()
        metrics.audit_error.observe(abs(error))
        metrics.reported_tokens.inc(reported)
        is_pooled = self._pool is not None and self._pool.audit(placement, reported)
        if result != "evicted" and (not is_pooled or error == 0):
            changed = self._caches.audit(
                name,
                placement.num_cached_tokens,
                reported,
                claim,
                num_cpu_tokens=placement.num_cpu_tokens,
            )
            if changed is not None:
                self._metrics.last_block_changes.labels(name).inc()
                text = "its answers show whether it drops the last block of a hit (EAGLE, MTP)"
                logger.warning(
                    text + (": set replicas[].eagle" if changed.is_open else ""),
                    extra={
                        "candidate": name,
                        "eagle": changed.is_dropped,
                        "dropped": changed.drop.name.lower(),
                    },
                )


class _StageMetrics:
    """The stages' histograms, looked up once."""

    __slots__ = ("place", "tokenize", "total")

    def __init__(self, metrics: Metrics) -> None:
        self.tokenize = metrics.stage.labels("tokenize")
        self.place = metrics.stage.labels("place")
        self.total = metrics.stage.labels("total")


class _CandidateMetrics:
    """One candidate's instruments, looked up once."""

    __slots__ = (
        "audit",
        "audit_error",
        "cpu_tokens",
        "pool_tokens",
        "predicted_tokens",
        "prompt_tokens",
        "reported_tokens",
        "ttft",
        "ttft_error",
    )

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.ttft = metrics.ttft.labels(name)
        self.ttft_error = metrics.ttft_error.labels(name)
        self.prompt_tokens = metrics.tokens.labels(name, "prompt")
        self.predicted_tokens = metrics.tokens.labels(name, "predicted_cached")
        self.cpu_tokens = metrics.tokens.labels(name, "predicted_cpu")
        self.pool_tokens = metrics.tokens.labels(name, "predicted_pool")
        self.reported_tokens = metrics.tokens.labels(name, "reported_cached")
        self.audit_error = metrics.audit_error.labels(name)
        self.audit = {
            result: metrics.audit.labels(name, result)
            for result in ("exact", "over", "under", "evicted", "partial")
        }


def _record_of_waiting(
    job: Job, choice: Choice, caches: CacheView, *, status: int, now_s: float
) -> DecisionRecord:
    view = choice.view
    num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
    return _record_of(
        job,
        choice,
        state=caches.state(choice.candidate.id),
        status=status,
        outcome=Outcome.CLIENT_GONE,
        num_cached_tokens=0 if choice.is_guess else num_own + choice.num_pool_tokens,
        usage=None,
        predicted_ttft_ms=None,
        ttft_ms=None,
        router_s=now_s - job.inbound.arrived_s,
        now_s=now_s,
    )


def _record_of(
    job: Job,
    chosen: Placement | Choice,
    *,
    state: str,
    status: int,
    outcome: Outcome,
    num_cached_tokens: int,
    usage: Usage | None,
    predicted_ttft_ms: float | None,
    ttft_ms: float | None,
    router_s: float,
    now_s: float,
) -> DecisionRecord:
    arrived_s = job.inbound.arrived_s
    return DecisionRecord(
        request_id=job.request_id,
        at=time.time(),
        api=job.inbound.api.name,
        model=job.model or "",
        tenant=job.tenant.name if job.tenant is not None else None,
        policy=chosen.policy.name,
        policy_params=params_of(chosen.policy),
        assignment=chosen.assignment,
        state=state,
        snapshot=chosen.snapshot,
        decision=chosen.decision,
        prefill=job.prefill,
        tries=tuple(job.tries),
        outcome=outcome.value,
        status=status,
        num_prompt_tokens=job.num_tokens,
        num_predicted_cached_tokens=num_cached_tokens,
        num_reported_cached_tokens=usage.num_cached_tokens if usage is not None else None,
        num_completion_tokens=usage.completion_tokens if usage is not None else None,
        router_ms=router_s * 1000 - job.waited_ms,
        service_class=job.service_class,
        deadline_ms=job.deadline_ms,
        expected_ttft_ms=job.expected_ttft_ms,
        expected_tbt_ms=job.expected_tbt_ms,
        waited_ms=job.waited_ms,
        waited_for=job.waited_for,
        released=job.released,
        predicted_ttft_ms=predicted_ttft_ms,
        ttft_ms=ttft_ms,
        total_ms=(now_s - arrived_s) * 1000,
    )
