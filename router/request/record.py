"""Record: count what became of a request, audit it, write its record and one log line."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from policies.naming import params_of
from policies.view import Holding
from router.api.sessions import engine_name
from router.api.usage import Usage
from router.experiments.runner import ExperimentRunner
from router.experiments.shadow import Shadows
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.metrics.looked_up import CandidateInstruments, StageInstruments
from router.records.outcome import Outcome
from router.records.record import DecisionRecord
from router.request.audit import TokenAudit
from router.request.bookkeeper import Bookkeeper, Entry
from router.request.plan import Placement, Plan
from router.request.results import Prompt, Read, Tries
from router.request.send import Sent
from router.request.verify import PoolVerifier

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 0.5  # events take 0.1 s


class Recorder:
    """Records finished requests; never fails one.

    Args:
        sinks: Take each record: the file of decisions, the live feed.
    """

    def __init__(
        self,
        *,
        metrics: Metrics,
        caches: CacheView,
        token_audit: TokenAudit,
        pool: PoolVerifier | None,
        sinks: Sequence[Callable[[DecisionRecord], None]],
        experiments: ExperimentRunner,
        shadows: Shadows | None,
        bookkeeper: Bookkeeper,
    ) -> None:
        self._metrics = metrics
        self._caches = caches
        self._token_audit = token_audit
        self._pool = pool
        self._sinks = sinks
        self._experiments = experiments
        self._shadows = shadows
        self._bookkeeper = bookkeeper
        self._late: deque[tuple[float, DecisionRecord, Entry]] = deque()
        self._stages = StageInstruments(metrics)
        self._by_candidate: dict[str, CandidateInstruments] = {}
        metrics.on_dropped.append(lambda candidate: self._by_candidate.pop(candidate, None))

    def finished(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        *,
        status: int,
        outcome: Outcome,
        sent: Sent | None = None,
        usage: Usage | None = None,
        first_s: float | None = None,
    ) -> None:
        """Record the end of a request that was placed; `first_s` None: no byte of an answer came.

        `sent` is None if it was never answered.
        """
        now_s, ttft_ms = time.monotonic(), None
        if first_s is not None and prompt.read.streams and status == 200:
            ttft_ms = (first_s - placement.placed_s) * 1000
        record = _record_of(
            prompt,
            tries,
            placement.plan,
            state=placement.state,
            status=status,
            outcome=outcome,
            predicted=placement.predicted,
            usage=usage,
            predicted_ttft_ms=placement.predicted_ttft_ms,
            ttft_ms=ttft_ms,
            placed_s=placement.placed_s,
            now_s=now_s,
        )
        self._count(prompt, tries, placement, record, first_s)
        _trace(prompt, record, usage)
        if prompt.assigned is not None:
            ttft_s = None
            if first_s is not None and record.ttft_ms is not None:
                ttft_s = first_s - prompt.read.inbound.arrived_s
            self._experiments.observe(prompt.assigned, record, ttft_s)
        if usage is not None:
            self._audit(prompt, tries, placement, sent or Sent(), usage)
        logger.info("routed", extra={"fields": _fields(prompt, tries, placement, record)})
        entry = None
        if first_s is not None and status == 200:
            entry = self._bookkeeper.begin(
                prompt, tries, placement, outcome=outcome, usage=usage, ttft_ms=ttft_ms
            )
        if entry is not None and entry.is_open:
            self._late.append((now_s + _PATIENCE_S, record, entry))
        else:
            self._end(record, entry, prompt)

    def _end(self, record: DecisionRecord, entry: Entry | None, prompt: Prompt) -> None:
        """Book a request, and write its record."""
        if entry is not None:
            record = replace(record, computed=self._bookkeeper.end(entry))
            _trace(prompt, record)
        if self._shadows is not None and prompt.read.request is not None:
            self._shadows.put(record, self._write)
        else:
            self._write(record)

    def left(self, prompt: Prompt, tries: Tries, plan: Plan, *, status: int) -> None:
        """Record a request whose client left while it waited; it was never sent."""
        now_s = time.monotonic()
        record = _record_of(
            prompt,
            tries,
            plan,
            state=self._caches.state(plan.candidate.id, prompt.extra),
            status=status,
            outcome=Outcome.CLIENT_GONE,
            predicted=plan.prediction,
            usage=None,
            predicted_ttft_ms=None,
            ttft_ms=None,
            placed_s=now_s,
            now_s=now_s,
        )
        waited_ms, tenant = tries.wait.waited_ms, prompt.read.tenant
        if tenant is not None:
            self._metrics.tenant_requests.labels(tenant.label, record.outcome).inc()
            self._metrics.tenant_waits.labels(tenant.label).inc(waited_ms / 1000)
        client = prompt.read.inbound.client
        logger.info(
            "client left the queue",
            extra={
                "request": prompt.read.request_id,
                "client": client.address if client is not None else None,
                "model": prompt.read.model,
                "tenant": record.tenant,
                "tokens": prompt.num_tokens,
                "waited_ms": round(waited_ms, 1),
            },
        )
        _trace(prompt, record)
        self._write(record)

    def sweep(self, now_s: float) -> None:
        """Look for block events of requests that were answered."""
        self._token_audit.sweep(now_s)
        while self._late and self._late[0][0] <= now_s:
            _, record, entry = self._late.popleft()
            self._end(record, entry, entry.prompt)

    def close(self) -> None:
        """End what still waits for events."""
        self.sweep(math.inf)

    def counted(self, read: Read, num_tokens: int) -> None:
        """Record a request that was answered with the number of its prompt's tokens."""
        self._metrics.counted.labels("router").inc()
        client, tenant = read.inbound.client, read.tenant
        logger.info(
            "counted",
            extra={
                "request": read.request_id,
                "client": client.address if client is not None else None,
                "model": read.model,
                "tenant": tenant.name if tenant is not None else None,
                "tokens": num_tokens,
            },
        )

    def _write(self, record: DecisionRecord) -> None:
        for sink in self._sinks:
            sink(record)

    def _count(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        record: DecisionRecord,
        first_s: float | None,
    ) -> None:
        name, arrived_s = placement.lease.candidate, prompt.read.inbound.arrived_s
        metrics, stages, waited_s = self._of(name), self._stages, tries.wait.waited_ms / 1000
        if prompt.read.tenant is not None:
            label = prompt.read.tenant.label
            self._metrics.tenant_requests.labels(label, record.outcome).inc()
            self._metrics.tenant_tokens.labels(label, "prompt").inc(prompt.num_tokens)
            if tries.charge is not None:
                self._metrics.tenant_tokens.labels(label, "uncached").inc(tries.charge.num_tokens)
            if waited_s:
                self._metrics.tenant_waits.labels(label).inc(waited_s)
        if prompt.read.inbound.api.counts:
            self._metrics.counted.labels("engine").inc()
        self._metrics.requests.labels(prompt.read.inbound.api.name, name, record.outcome).inc()
        if first_s is not None:
            metrics.ttft.observe(first_s - arrived_s)
        stages.tokenize.observe(prompt.tokenized_s - arrived_s)
        stages.place.observe(placement.placed_s - prompt.tokenized_s - waited_s)
        stages.total.observe(placement.placed_s - arrived_s - waited_s)
        metrics.prompt_tokens.inc(prompt.num_tokens)
        held = placement.predicted
        metrics.predicted_tokens.inc(record.num_predicted_cached_tokens)
        metrics.cpu_tokens.inc(held.num_cpu_only_tokens)
        metrics.pool_tokens.inc(held.num_fetched_tokens)
        if record.ttft_ms is not None:
            error_ms = abs(record.ttft_ms - placement.predicted_ttft_ms)
            metrics.ttft_error.observe(error_ms / 1000)

    def _of(self, candidate: str) -> CandidateInstruments:
        metrics = self._by_candidate.get(candidate)
        if metrics is None:
            metrics = self._by_candidate[candidate] = CandidateInstruments(self._metrics, candidate)
        return metrics

    def _audit(
        self, prompt: Prompt, tries: Tries, placement: Placement, sent: Sent, usage: Usage
    ) -> None:
        """Compare what was predicted with what the engine reports."""
        if prompt.read.num_prompts > 1:
            return  # usage sums the prompts; only the first was predicted
        self._token_audit.audit(prompt, placement, sent, usage.prompt_tokens)
        if tries.prefill is not None and tries.prefill.is_peer_to_peer:
            return  # all of it came from elsewhere
        reported = usage.num_cached_tokens
        if reported is None or not prompt.is_placed_at(placement.candidate):
            return
        name, predicted = placement.lease.candidate, placement.predicted.num_cached_tokens
        error = predicted - reported
        metrics = self._of(name)
        if prompt.tokens is None:
            return
        if placement.plan.is_guess:
            metrics.audit["partial"].inc()
            metrics.reported_tokens.inc(reported)
            return
        claim = placement.claim
        result = "exact" if error == 0 else "over" if error > 0 else "under"
        if result == "over" and claim is not None:
            if self._caches.audit.was_overtaken(claim, reported, predicted):
                result = "evicted"  # between decision and schedule: no fault of what we know
        contract = self._caches.contract(name)
        size = contract.block_size if contract is not None else 1
        is_partial = self._token_audit.is_partial(prompt, placement, reported, size)
        if is_partial or self._caches.is_unknown(name, prompt.extra):
            metrics.audit["partial"].inc()
            metrics.reported_tokens.inc(reported)
            return
        metrics.audit[result].inc()
        metrics.audit_error.observe(abs(error))
        metrics.reported_tokens.inc(reported)
        is_pooled = self._pool is not None and self._pool.audit(placement, reported)
        if result != "evicted" and (not is_pooled or error == 0):
            changed = self._caches.audit.record(
                name,
                predicted,
                reported,
                claim,
                num_cpu_tokens=placement.predicted.num_cpu_only_tokens,
                kinds=prompt.extra.kinds,
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


def _trace(prompt: Prompt, record: DecisionRecord, usage: Usage | None = None) -> None:
    """Give a request's trace its record."""
    trace = prompt.read.inbound.trace
    if trace is not None:
        trace.record, trace.streams, trace.usage = record, prompt.read.streams, usage or trace.usage


def _fields(
    prompt: Prompt, tries: Tries, placement: Placement, record: DecisionRecord
) -> dict[str, Any]:
    """Return the fields of a request's log line."""
    client, assigned = prompt.read.inbound.client, record.assignment
    trace = prompt.read.inbound.trace
    return {
        "request": prompt.read.request_id,
        "trace": f"{trace.trace_id:032x}" if trace is not None and trace.is_sampled else None,
        "client": client.address if client is not None else None,
        "model": prompt.read.model,
        "tenant": record.tenant,
        "replica": placement.lease.candidate,
        "arm": f"{assigned.experiment}/{assigned.arm}" if assigned else None,
        "why": record.decision.reason,
        "prefill": tries.prefill.where if tries.prefill is not None else None,
        "tokens": prompt.num_tokens,
        "cached": record.num_predicted_cached_tokens,
        "pool": placement.predicted.num_fetched_tokens,
        "reported": record.num_reported_cached_tokens,
        "state": placement.state,
        "tries": len(tries.records),
        "status": record.status,
        "outcome": record.outcome,
        "router_ms": round(record.router_ms, 2),
        "waited_ms": round(record.waited_ms, 1),
        "waited_for": record.waited_for,
        "released": record.released,
        "ttft_ms": None if record.ttft_ms is None else round(record.ttft_ms, 1),
        "total_ms": round(record.total_ms, 1),
    }


def _record_of(
    prompt: Prompt,
    tries: Tries,
    plan: Plan,
    *,
    state: str,
    status: int,
    outcome: Outcome,
    predicted: Holding,
    usage: Usage | None,
    predicted_ttft_ms: float | None,
    ttft_ms: float | None,
    placed_s: float,
    now_s: float,
) -> DecisionRecord:
    arrived_s, wait, whose = prompt.read.inbound.arrived_s, tries.wait, prompt.read.whose
    return DecisionRecord(
        request_id=prompt.read.request_id,
        at=time.time(),
        api=prompt.read.inbound.api.name,
        model=prompt.read.model or "",
        tenant=prompt.read.tenant.name if prompt.read.tenant is not None else None,
        session=engine_name(whose.conversation) if whose.conversation is not None else None,
        policy=plan.policy.name,
        policy_params=params_of(plan.policy),
        assignment=plan.assignment,
        state=state,
        snapshot=plan.snapshot,
        decision=plan.decision,
        prefill=tries.prefill,
        tries=tuple(tries.records),
        outcome=outcome.value,
        status=status,
        num_prompt_tokens=prompt.num_tokens,
        num_predicted_cached_tokens=predicted.num_cached_tokens,
        num_reported_cached_tokens=usage.num_cached_tokens if usage is not None else None,
        num_completion_tokens=usage.completion_tokens if usage is not None else None,
        router_ms=(placed_s - arrived_s) * 1000 - wait.waited_ms,
        service_class=prompt.service_class,
        deadline_ms=prompt.deadline_ms,
        expected_ttft_ms=wait.expected_ttft_ms,
        expected_tbt_ms=wait.expected_tbt_ms,
        waited_ms=wait.waited_ms,
        waited_for=wait.held_by,
        released=wait.released,
        predicted_ttft_ms=predicted_ttft_ms,
        ttft_ms=ttft_ms,
        total_ms=(now_s - arrived_s) * 1000,
    )
