"""The router's counters and histograms, as a table: name, labels, what it is, buckets.

Instruments with their labels set: each request counts with them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from time import perf_counter
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric

from router.metrics.counting import Counter, Histogram
from router.metrics.families import Families, Family, S

_SLICE_S: Final = 0.002
_NUM_SAMPLES: Final = 200  # written in one piece: 1 ms

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_STAGE_BUCKETS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class _One(NamedTuple):
    """A registry of one metric."""

    metric: Metric

    def collect(self) -> tuple[Metric]:
        return (self.metric,)


class Spec(NamedTuple):
    """A row of the table; the annotated type is the instrument's kind."""

    name: str
    labels: str  # separated by spaces
    text: str
    buckets: tuple[float, ...] | None = None  # of a histogram


class Instruments:
    """Instruments on a registry; a subclass has an annotation for each, as `Metrics`.

    rows: Attribute and kind of each, and the rest.

    Args:
        registry: None: one of their own.
    """

    rows: ClassVar[Sequence[tuple[str, Any, Spec]]] = ()

    def __init_subclass__(cls) -> None:
        hints = inspect.get_annotations(cls, eval_str=True)
        cls.rows = [(name, hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()]

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        for attribute, kind, spec in self.rows:
            options = {"buckets": spec.buckets} if spec.buckets is not None else {}
            labels = spec.labels.split()
            instrument = kind(spec.name, spec.text, labels, registry=registry, **options)
            setattr(self, attribute, instrument)

    def drop(self, label: str, value: str) -> None:
        """Drop all series with a value of a label."""
        for attribute, _, spec in self.rows:
            if label in spec.labels.split():
                getattr(self, attribute).remove_where({label: value})


class Metrics(Instruments):
    """The router's instruments, on a registry of its own (several routers fit in one process).

    What only one observer counts is in that observer's folder.
    """

    # fmt: off
    requests: Annotated[Counter, Spec("warmroute_requests", "api replica outcome",
        "Requests answered, by API, replica that answered, and outcome")]
    decisions: Annotated[Counter, Spec("warmroute_decisions", "policy state",
        "Decisions, by policy and by knowledge of the chosen replica's cache")]
    failovers: Annotated[Counter, Spec("warmroute_failovers", "replica reason",
        "Tries that failed before the first byte and were repeated at another replica, by replica "
        "and reason")]
    first_event_errors: Annotated[Counter, Spec("warmroute_first_event_errors", "replica status",
        "Streams that failed before the first token: status 200, then an error event, by the "
        "status in it")]
    not_retried: Annotated[Counter, Spec("warmroute_not_retried", "why",
        "Failed tries that were not repeated, by reason: budget (forward.retry_ratio), sent_twice, "
        "side_effects, no_replica, max_tries, too_many (429), kills (replicas went down with it), "
        "unreadable (its answer has too large headers)")]
    prefills: Annotated[Counter, Spec("warmroute_prefills", "result why",
        "Prompts of requests for decode replicas, by result: remote (computed by a prefill "
        "replica), local, failed (at the prefill replica, then local). why: cheaper, no_replica, "
        "done by an earlier try, or the reason")]
    prefill_seconds: Annotated[Histogram, Spec("warmroute_prefill_seconds", "replica",
        "Time from sending a prompt to a prefill replica until its answer or failure",
        TTFT_BUCKETS)]
    overdue: Annotated[Counter, Spec("warmroute_overdue", "result",
        "First tokens that were overdue against their prediction, by result: left, or why the "
        "request still waits (late_elsewhere, or a reason of warmroute_not_retried_total)")]
    pool_suspected: Annotated[Counter, Spec("warmroute_pool_suspected", "replica",
        "Times that pool reads of a replica became suspect; its fetches do not count for 10 s or "
        "more, or until one succeeds")]
    pool_skipped: Annotated[Counter, Spec("warmroute_pool_skipped", "",
        "Requests sent again with their own salt because a read from the pool failed")]
    absolved: Annotated[Counter, Spec("warmroute_failures_absolved", "why",
        "Failures that did not count against a replica, by reason: same_elsewhere (the request "
        "failed at two replicas in the same way), unproven (no other try was possible)")]
    observer_failures: Annotated[Counter, Spec("warmroute_observer_failures", "observer",
        "Exceptions of observers, by the name of the class; requests go on")]
    strays: Annotated[Counter, Spec("warmroute_stray_answers", "server",
        "Kept connections that were closed because bytes came that no request had asked for, by "
        "replica, or by the name of the pool's master")]
    broken_streams: Annotated[Counter, Spec("warmroute_broken_streams", "reason",
        "Streams that failed after their first byte, by reason: what broke the connection (the "
        "client got an error event), event_500 (the engine's own), abort, no_end")]
    responses_found: Annotated[Counter, Spec("warmroute_responses_found", "result",
        "Requests about an earlier response, by what knew its replica: here (this router), redis, "
        "unknown, gone (the replica is removed)")]
    refused: Annotated[Counter, Spec("warmroute_refused", "code",
        "Requests answered with an error by the router itself, by code")]
    tenant_requests: Annotated[Counter, Spec("warmroute_tenant_requests", "tenant outcome",
        "Requests of a tenant, by outcome, or by code if the router refused them; tenants after "
        "the first 100: other")]
    tenant_tokens: Annotated[Counter, Spec("warmroute_tenant_tokens", "tenant kind",
        "Prompt tokens of a tenant, by kind: prompt, of these uncached")]
    tenant_waits: Annotated[Counter, Spec("warmroute_tenant_waited_seconds", "tenant",
        "Time that a tenant's prompts waited in the queue, until they were sent or the client "
        "left; divide by its requests for the mean")]
    tenants_read: Annotated[Counter, Spec("warmroute_tenants_file_reads", "result",
        "Reads of a changed tenants file, by result: ok, or bad (the last good file stays)")]
    finished_sessions: Annotated[Counter, Spec("warmroute_finished_sessions", "result",
        "Clients' calls of /finish_session, by result: ended, unknown (no such session)")]
    config_reads: Annotated[Counter, Spec("warmroute_config_reads", "result",
        "Reads of a changed configuration, by result: ok, or bad (it is invalid or needs a "
        "restart; the old one stays)")]
    connections: Annotated[Gauge, Spec("warmroute_connections", "",
        "Open client connections")]
    unresolved_names: Annotated[Gauge, Spec("warmroute_unresolved_names", "",
        "Host names that do not resolve now")]
    connections_ended: Annotated[Counter, Spec("warmroute_connections_ended", "reason",
        "Client connections refused or cut by the router, by reason")]
    prompt_tokens: Annotated[Counter, Spec("warmroute_prompt_tokens", "cause",
        "Prompt tokens of sessions, as engines report them: cached, or why they were computed "
        "(new, changed, evicted, moved, cleared, pool_lost, fetch_failed, salt_or_model, "
        "last_block, unknown)")]
    ttft: Annotated[Histogram, Spec("warmroute_ttft_seconds", "replica",
        "Time from a request's arrival to the first byte of its answer; for streams of "
        "/v1/messages and /v1/responses to the first generated event", TTFT_BUCKETS)]
    ttft_error: Annotated[Histogram, Spec("warmroute_ttft_prediction_error_seconds", "replica",
        "Absolute difference between predicted and observed time to first token", TTFT_BUCKETS)]
    stage: Annotated[Histogram, Spec("warmroute_stage_seconds", "stage",
        "Time spent in the router, by stage of a request", _STAGE_BUCKETS)]
    waiting: Annotated[Gauge, Spec("warmroute_waiting_requests", "",
        "Prompts that wait in the router's queue")]
    waits: Annotated[Histogram, Spec("warmroute_wait_seconds", "end",
        "Time that a prompt waited in the router's queue, by end: released, client_gone, refused "
        "(the queue is full, or no replica can take it)", TTFT_BUCKETS)]
    class_waits: Annotated[Histogram, Spec("warmroute_class_wait_seconds", "class end",
        "Time that a prompt waited in the router's queue, by class (interactive, batch) and "
        "end", TTFT_BUCKETS)]
    class_waiting: Annotated[Gauge, Spec("warmroute_class_waiting_requests", "class",
        "Prompts that wait in the router's queue, by class")]
    queue_refused: Annotated[Counter, Spec("warmroute_queue_refused", "class reason",
        "Prompts that the queue refused, by class and reason: full, displaced (by a higher class "
        "or priority), deadline (the first token would be late), tbt (inter-token latency would "
        "exceed queue.tbt_ms)")]
    released: Annotated[Counter, Spec("warmroute_released", "why",
        "Prompts released from the queue, by reason: room, idle (the engine had nothing to "
        "compute), seldom (its conversation comes for single turns), waited_out "
        "(queue.max_wait_s)")]
    tokens: Annotated[Counter, Spec("warmroute_tokens", "replica kind",
        "Prompt tokens, by replica and kind: prompt, predicted_cached (of these predicted_cpu in "
        "its own offload, predicted_pool to be fetched), reported_cached")]
    audit: Annotated[Counter, Spec("warmroute_audited", "replica result",
        "Predictions of cached tokens compared with the engine's usage: exact, over, under; "
        "evicted (right when made, but evicted before the request ran); partial (more was reused, "
        "behind unknown tokens)")]
    audit_error: Annotated[Histogram, Spec("warmroute_audit_error_tokens", "replica",
        "Absolute difference between predicted and reported cached tokens", _TOKEN_BUCKETS)]
    tokenized: Annotated[Counter, Spec("warmroute_tokenized_requests", "way",
        "Tokenized prompts, by way: local, media (with images), prefix (up to an unknown "
        "item), engine, unknown")]
    needs_engine: Annotated[Counter, Spec("warmroute_needs_engine", "api why",
        "Prompts that the router could not tokenize to the end, by API and reason; an engine "
        "tokenized them, or the rest stays unknown")]
    counted: Annotated[Counter, Spec("warmroute_counted_requests", "by",
        "Requests that count a prompt's tokens, by what counted them: router, engine")]
    body_bytes: Annotated[Gauge, Spec("warmroute_body_bytes", "",
        "Bytes of request bodies in memory (limits.inflight_bytes)")]
    token_mismatches: Annotated[Counter, Spec("warmroute_token_mismatches", "model against",
        "Prompts whose local tokens differed from the engine's (usage, template; media: with "
        "items) or from a full encoding")]
    handed_over: Annotated[Counter, Spec("warmroute_handed_over_requests", "model",
        "Prompts sent to engines together with their token ids (tokens.hand_over)")]
    hand_over_ended: Annotated[Counter, Spec("warmroute_hand_over_ended", "model reason",
        "Models whose prompts are no longer sent with token ids, by reason: count and tokens (the "
        "engine's differ), refused, failed (three in a row)")]
    encoder_fallbacks: Annotated[Counter, Spec("warmroute_encoder_fallbacks", "model reason",
        "Models that went from fastokens to tokenizers, by reason: sample (other ids for a "
        "prompt), failed (it crashed)")]
    peer_notes: Annotated[Counter, Spec("warmroute_peer_notes", "kind",
        "Notes received from other routers, by kind: began, answered, ended, alive, left, "
        "registered, pool, ordered, idle, turn_waits, waits, prompt, turn, over; "
        "unknown_feed (about an unknown replica), malformed")]
    peers_forgotten: Annotated[Counter, Spec("warmroute_peers_forgotten", "",
        "Routers that went silent and whose leases and claims were dropped")]
    notes_dropped: Annotated[Counter, Spec("warmroute_notes_dropped", "",
        "Notes to other routers that Redis did not accept; sent again as a summary, unless they "
        "are about sessions")]
    lookups: Annotated[Counter, Spec("warmroute_redis_lookups", "result",
        "Matches looked up in Redis (index.mode redis), by result: ok, or why the local index was "
        "used")]
    lookup_seconds: Annotated[Histogram, Spec("warmroute_redis_lookup_seconds", "",
        "Round trip of a look-up in Redis", _STAGE_BUCKETS)]
    loop_lag: Annotated[Histogram, Spec("warmroute_loop_lag_seconds", "",
        "Delay of the event loop's timers: something blocked the loop", _STAGE_BUCKETS)]
    pool_verified: Annotated[Counter, Spec("warmroute_pool_verifications", "pool result",
        "Pool matches verified at the master before use, by result: confirmed, less, more, late, "
        "failed, unnamed (the pool's keys are unknown)")]
    pool_verify: Annotated[Histogram, Spec("warmroute_pool_verify_seconds", "",
        "Time a request waited for the Mooncake master to verify a pool match", _STAGE_BUCKETS)]
    pool_listing: Annotated[Histogram, Spec("warmroute_pool_listing_seconds", "",
        "Time to read the keys of the whole pool", TTFT_BUCKETS)]
    pool_failures: Annotated[Counter, Spec("warmroute_pool_failures", "pool code",
        "Requests that the Mooncake master did not answer, by code: pool_gone, pool_late, "
        "pool_error")]
    follower_failures: Annotated[Counter, Spec("warmroute_follower_failures", "follower",
        "Background tasks that ended unexpectedly and were restarted, by what they follow: "
        "configuration, discovery, events, replica, pool, pool_events, pool_questions, redis, "
        "tenants, upkeep")]
    discovery: Annotated[Counter, Spec("warmroute_discovery_answers", "source result",
        "Answers of a source of replicas, by result: ok, empty (ignored for 60 s), "
        "failed (the last good answer stays)")]
    log_lines_lost: Annotated[Counter, Spec("warmroute_log_lines_lost", "",
        "Log lines that were lost because nobody read stderr, or too slowly")]
    records_dropped: Annotated[Counter, Spec("warmroute_decision_records_dropped", "",
        "Decision records lost because the writer was too slow")]
    spans: Annotated[Counter, Spec("warmroute_spans", "result",
        "OpenTelemetry spans, by result: sent, failed (the collector did not take them), dropped "
        "(the queue was full)")]
    # fmt: on

    def __init__(self) -> None:
        super().__init__()
        self.on_dropped: list[Callable[[str], object]] = []
        """Called with a candidate whose series are dropped: what is kept of them counts no more."""

    def drop_replica(self, candidates: Iterable[str]) -> None:
        """Drop the series of a replica that has been gone for long: a replica and its ranks."""
        for candidate in candidates:
            self.drop("replica", candidate)
            for forget in self.on_dropped:
                forget(candidate)

    def count_failure(self, follower: str) -> None:
        """Count a follower that failed and starts again."""
        self.follower_failures.labels(follower).inc()

    def watch(
        self, table: Sequence[Family[S]], describe: Callable[[], Iterable[tuple[str | None, S]]]
    ) -> None:
        """Read a table from the named states that `describe` returns at every scrape."""
        self.registry.register(Families(table, describe))

    def render(self) -> bytes:
        """Render the text exposition format."""
        return generate_latest(self.registry)

    async def render_in_turns(self) -> bytes:
        """Render the same, and let streams go on meanwhile: 150 replicas take 50 ms and more."""
        parts, until_s = [], perf_counter() + _SLICE_S
        for metric in self.registry.collect():
            for part in _parts(metric):
                parts.append(part)
                if perf_counter() >= until_s:
                    await asyncio.sleep(0)
                    until_s = perf_counter() + _SLICE_S
        return b"".join(parts)


def _parts(metric: Metric) -> Iterator[bytes]:
    """Write a metric in parts: a histogram of 150 replicas has thousands of samples."""
    part = copy(metric)
    for start in range(0, max(1, len(metric.samples)), _NUM_SAMPLES):
        part.samples = metric.samples[start : start + _NUM_SAMPLES]
        one: Any = _One(part)
        text = generate_latest(one)
        yield text.split(b"\n", 2)[2] if start else text  # the head comes once


class StageInstruments:
    """The stages' histograms, looked up once."""

    __slots__ = ("place", "tokenize", "total")

    def __init__(self, metrics: Metrics) -> None:
        self.tokenize = metrics.stage.labels("tokenize")
        self.place = metrics.stage.labels("place")
        self.total = metrics.stage.labels("total")


class CandidateInstruments:
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


class CandidateTable(dict[str, CandidateInstruments]):
    """The instruments of all candidates by name, each made when it is first asked for."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics
        metrics.on_dropped.append(lambda name: self.pop(name, None))

    def __missing__(self, name: str) -> CandidateInstruments:
        found = self[name] = CandidateInstruments(self._metrics, name)
        return found
