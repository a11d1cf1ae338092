"""Every metric warmroute exports, its unit and its labels; nothing else names a metric.

Counters and histograms are pushed by the two ways (pipeline, ingest); gauges about replicas are
pulled at scrape time from a `StateSource`, so that they cannot go stale. Labels come from small
closed sets: replica names, states, tiers, reasons. `docs/metrics.md` is made from this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_STAGE_BUCKETS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_REGRET_BUCKETS = (-10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1, 10)
_TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class RankState(Struct, frozen=True, kw_only=True):
    """What one candidate looks like at scrape time."""

    replica: str  # candidate id: `r1`, `r1#2`
    state: str  # exact | degraded | blind
    healthy: bool
    num_requests: int
    num_elsewhere: int  # of these, sent by other routers
    num_queued_tokens: int
    queue_ms: float
    num_blocks: dict[str, int]  # tier -> blocks in the index
    events: dict[str, int]  # counter name -> value, since the router started
    cost_error_ms: float
    trust: float  # share of recent audited predictions that were right, 1.0 before the first


class SharingState(Struct, frozen=True, kw_only=True):
    """How this router stands to Redis and to other routers at scrape time."""

    is_up: bool
    num_routers: int  # that live, this one included
    num_feeds: dict[str, int]  # role -> candidates
    counts: dict[str, int]  # what happened -> how often, since the router started
    reason: str = ""  # why it is not up
    redis: str | None = None  # which server it is, or was last
    roles: dict[str, str] = {}  # candidate -> role


class PoolState(Struct, frozen=True, kw_only=True):
    """What the shared pool looks like at scrape time; None: not known (yet)."""

    is_up: bool
    num_blocks: dict[str, int]  # base model -> blocks in its directory
    counts: dict[str, int]  # counter name -> value, since the router started
    listing_age_s: float | None
    allocated_bytes: int | None
    capacity_bytes: int | None
    bytes_per_token: dict[str, float]  # base model -> of KV cache, mean
    fetch_bytes_per_s: dict[str, float]  # candidate -> fitted from first-token times


class ExperimentState(Struct, frozen=True, kw_only=True):
    """How an experiment stands at scrape time."""

    name: str
    design: str
    is_running: bool
    shares: dict[str, float]  # arm -> of the traffic in scope, 0.0 where it is stopped
    evidence: dict[tuple[str, str], float]  # arm, guardrail -> of what is needed to stop it


class StateSource(Protocol):
    """Whoever knows the replicas: the lifecycle."""

    def rank_states(self) -> Iterable[RankState]:
        """Describe every candidate now; called at scrape time, on the event loop."""
        ...

    def pool_state(self) -> PoolState | None:
        """Describe the shared pool; None: none is configured."""
        ...


class Metrics:
    """The router's instruments, on a registry of its own (several routers fit in one process)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "warmroute_requests",
            "Requests answered, by API, replica that answered and outcome",
            ["api", "replica", "outcome"],
            registry=r,
        )
        self.decisions = Counter(
            "warmroute_decisions",
            "Decisions, by policy and by how well the chosen replica's cache was known",
            ["policy", "state"],
            registry=r,
        )
        self.failovers = Counter(
            "warmroute_failovers",
            "Tries that failed before the first byte and were moved on, by replica and reason",
            ["replica", "reason"],
            registry=r,
        )
        self.first_event_errors = Counter(
            "warmroute_first_event_errors",
            "Streams that failed before anything was generated: 200, then an error; by its status",
            ["replica", "status"],
            registry=r,
        )
        self.not_retried = Counter(
            "warmroute_not_retried",
            "Failed tries that were not followed by another, by why: budget (forward.retry_ratio), "
            "sent_twice, side_effects, no_replica, max_tries",
            ["why"],
            registry=r,
        )
        self.overdue = Counter(
            "warmroute_overdue",
            "First tokens that were overdue against their prediction, by what came of it: left, "
            "or why the request waits on (late_elsewhere, or as in warmroute_not_retried_total)",
            ["result"],
            registry=r,
        )
        self.pool_suspected = Counter(
            "warmroute_pool_suspected",
            "Times that a candidate's reads from the pool were suspected: fetches there do not "
            "count for 10 s or more, or until one succeeds",
            ["replica"],
            registry=r,
        )
        self.pool_skipped = Counter(
            "warmroute_pool_skipped",
            "Requests sent once more under a salt of their own, since a read from the pool failed",
            registry=r,
        )
        self.absolved = Counter(
            "warmroute_failures_absolved",
            "Failures that did not count against a replica, by why: same_elsewhere (the request "
            "failed at two replicas in the same way), unproven (no budget to try another)",
            ["why"],
            registry=r,
        )
        self.continuations = Counter(
            "warmroute_continuations",
            "Streams whose engine broke off, by what became of them: continued at another replica "
            "or concluded here (reason: what had gone wrong), refused (reason: why the client got "
            "an error event)",
            ["result", "reason"],
            registry=r,
        )
        self.refused = Counter(
            "warmroute_refused",
            "Requests answered with an error by the router itself, by code",
            ["code"],
            registry=r,
        )
        self.tenant_requests = Counter(
            "warmroute_tenant_requests",
            "Requests of a tenant, by outcome, or by code where the router refused them; beyond "
            "100 tenants: other",
            ["tenant", "outcome"],
            registry=r,
        )
        self.tenant_tokens = Counter(
            "warmroute_tenant_tokens",
            "Prompt tokens of a tenant, by kind: prompt, of these uncached (as charged)",
            ["tenant", "kind"],
            registry=r,
        )
        self.tenants_read = Counter(
            "warmroute_tenants_file_reads",
            "Changes of the tenants' file, by result: ok, or bad: the last good one is in force",
            ["result"],
            registry=r,
        )
        self.connections = Gauge(
            "warmroute_connections", "Client connections that are open", registry=r
        )
        self.connections_ended = Counter(
            "warmroute_connections_ended",
            "Client connections refused or cut by the router, by reason",
            ["reason"],
            registry=r,
        )
        self.ttft = Histogram(
            "warmroute_ttft_seconds",
            "From a request's arrival to the first byte of its answer",
            ["replica"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.ttft_error = Histogram(
            "warmroute_ttft_prediction_error_seconds",
            "Absolute difference of predicted and observed time to first token",
            ["replica"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.stage = Histogram(
            "warmroute_stage_seconds",
            "Time spent in the router, by stage of a request",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=r,
        )
        self.tokens = Counter(
            "warmroute_tokens",
            "Prompt tokens, by replica and kind: prompt, predicted_cached, of these predicted_cpu "
            "(its own offload) and predicted_pool (to be fetched), reported_cached",
            ["replica", "kind"],
            registry=r,
        )
        self.audit = Counter(
            "warmroute_audited",
            "Predictions of cached tokens held against the engine's usage: exact, over, under; "
            "evicted: right when made, but blocks went before the engine came to the request",
            ["replica", "result"],
            registry=r,
        )
        self.audit_error = Histogram(
            "warmroute_audit_error_tokens",
            "Absolute difference of predicted and reported cached tokens",
            ["replica"],
            buckets=_TOKEN_BUCKETS,
            registry=r,
        )
        self.tokenized = Counter(
            "warmroute_tokenized_requests",
            "Prompts turned into tokens, by way: local, engine, unknown",
            ["way"],
            registry=r,
        )
        self.body_bytes = Gauge(
            "warmroute_body_bytes",
            "Bytes of the request bodies that are held now (bounded by limits.inflight_bytes)",
            registry=r,
        )
        self.token_mismatches = Counter(
            "warmroute_token_mismatches",
            "Prompts whose local tokens were not the engine's (usage, template) or a full encode's",
            ["model", "against"],
            registry=r,
        )
        self.peer_notes = Counter(
            "warmroute_peer_notes",
            "Heard from other routers, by kind: began, answered, ended, alive, doubted, "
            "registered; unknown_feed: about a replica we do not know, malformed: not understood",
            ["kind"],
            registry=r,
        )
        self.peers_forgotten = Counter(
            "warmroute_peers_forgotten",
            "Routers that fell silent: their leases and claims were dropped",
            registry=r,
        )
        self.notes_dropped = Counter(
            "warmroute_notes_dropped",
            "Notes to other routers dropped since nobody took them; told anew in one piece",
            registry=r,
        )
        self.lookups = Counter(
            "warmroute_redis_lookups",
            "Matches asked of Redis itself (index.mode redis), by result: ok, or why the local "
            "view counted",
            ["result"],
            registry=r,
        )
        self.lookup_seconds = Histogram(
            "warmroute_redis_lookup_seconds",
            "Round trip of such a look-up",
            buckets=_STAGE_BUCKETS,
            registry=r,
        )
        self.loop_lag = Histogram(
            "warmroute_loop_lag_seconds",
            "How late the event loop woke a timer: anything that blocked it",
            buckets=_STAGE_BUCKETS,
            registry=r,
        )
        self.pool_verified = Counter(
            "warmroute_pool_verifications",
            "Pool matches held against the master before they were used, by result: confirmed, "
            "less, more, late, failed, unnamed (the pool's keys are not known)",
            ["result"],
            registry=r,
        )
        self.pool_verify = Histogram(
            "warmroute_pool_verify_seconds",
            "Time a request waited for the Mooncake master to verify a pool match",
            buckets=_STAGE_BUCKETS,
            registry=r,
        )
        self.pool_listing = Histogram(
            "warmroute_pool_listing_seconds",
            "Time to read the keys of the whole pool",
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.pool_failures = Counter(
            "warmroute_pool_failures",
            "Questions the Mooncake master did not answer, by code: pool_gone, pool_late, "
            "pool_error; undecodable: messages of its event stream",
            ["code"],
            registry=r,
        )
        self.follower_failures = Counter(
            "warmroute_follower_failures",
            "Runs that ended in a way nobody expected, and were begun again, by what was followed: "
            "events, replica, pool, pool_events, redis, tenants, upkeep",
            ["follower"],
            registry=r,
        )
        self.records_dropped = Counter(
            "warmroute_decision_records_dropped",
            "Decision records lost because their writer was behind",
            registry=r,
        )

        self.shadow_decisions = Counter(
            "warmroute_shadow_decisions",
            "Decisions put to a shadow policy, by whether it agrees with the live one",
            ["shadow", "agrees"],
            registry=r,
        )
        self.shadow_ttft = Counter(
            "warmroute_shadow_ttft_seconds",
            "Predicted times to first token of the shadow's choice and of the live one, sums; live "
            "less shadow is the regret",
            ["shadow", "choice"],
            registry=r,
        )
        self.shadow_regret = Histogram(
            "warmroute_shadow_regret_seconds",
            "Predicted time to first token of the live choice less the shadow's: positive where "
            "the shadow would have been sooner",
            ["shadow"],
            buckets=_REGRET_BUCKETS,
            registry=r,
        )
        self.shadow_tokens = Counter(
            "warmroute_shadow_tokens",
            "Predicted tokens of the shadow's choice and of the live one: recomputed, fetched",
            ["shadow", "choice", "kind"],
            registry=r,
        )
        self.shadows_dropped = Counter(
            "warmroute_shadow_dropped",
            "Decisions that were to be put to the shadows and were not: they are behind",
            registry=r,
        )
        self.arm_requests = Counter(
            "warmroute_arm_requests",
            "Requests of an experiment's arm that count, by outcome",
            ["experiment", "arm", "outcome"],
            registry=r,
        )
        self.arm_not_counted = Counter(
            "warmroute_arm_not_counted",
            "Requests of an arm that do not count: wash_out, clock_step, stopped, beyond_partition",
            ["experiment", "arm", "reason"],
            registry=r,
        )
        self.arm_ttft = Histogram(
            "warmroute_arm_ttft_seconds",
            "From arrival to the first byte of a stream, by arm",
            ["experiment", "arm"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.arm_tokens = Counter(
            "warmroute_arm_tokens",
            "Prompt tokens by arm: prompt, of these recomputed (as reported, else predicted)",
            ["experiment", "arm", "kind"],
            registry=r,
        )
        self.experiment_stops = Counter(
            "warmroute_experiment_stops",
            "Arms that a guardrail stopped at this router: errors, ttft, ttft_ratio",
            ["experiment", "arm", "guardrail"],
            registry=r,
        )

    def forget_experiment(self, name: str) -> None:
        """Drop the series of an experiment that is removed."""
        for instrument in (
            self.arm_requests,
            self.arm_not_counted,
            self.arm_ttft,
            self.arm_tokens,
            self.experiment_stops,
        ):
            names = instrument._labelnames
            for family in list(instrument.collect()):
                for labels in {
                    tuple(sample.labels[each] for each in names)
                    for sample in family.samples
                    if sample.labels["experiment"] == name
                }:
                    instrument.remove(*labels)

    def watch(self, source: StateSource) -> None:
        """Pull replica gauges from `source` at every scrape."""
        self.registry.register(_StateCollector(source))

    def watch_sharing(self, describe: Callable[[], SharingState]) -> None:
        """Pull what is known of Redis and of other routers at every scrape."""
        self.registry.register(_SharingCollector(describe))

    def watch_experiments(self, describe: Callable[[], Iterable[ExperimentState]]) -> None:
        """Pull how experiments stand at every scrape."""
        self.registry.register(_ExperimentCollector(describe))

    def render(self) -> bytes:
        """Render the text exposition format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    def __init__(self, source: StateSource) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return []  # nothing to check for duplicates before the first scrape

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"warmroute_{name}", text, labels=["replica", *labels])

        state = gauge("replica_state", "1 for the state the replica's cache view is in", "state")
        healthy = gauge("replica_healthy", "1 while the replica may be chosen")
        requests = gauge("inflight_requests", "Requests in flight, of all routers that tell")
        elsewhere = gauge("inflight_requests_elsewhere", "Of these, sent by other routers")
        queued = gauge("inflight_uncached_tokens", "Uncached tokens before their first token")
        queue = gauge("queue_seconds", "Predicted time until the prefills in flight are done")
        blocks = gauge("index_blocks", "Blocks the index credits to the replica", "tier")
        error = gauge("cost_model_error_seconds", "Mean absolute error of recent TTFT predictions")
        trust = gauge("trust_ratio", "Share of recent audited predictions that were right")
        events = CounterMetricFamily(
            "warmroute_kv_events",
            "KV events of the replica by what became of them",
            labels=["replica", "kind"],
        )
        for rank in self._source.rank_states():
            for name in ("exact", "degraded", "blind"):
                state.add_metric([rank.replica, name], float(rank.state == name))
            healthy.add_metric([rank.replica], float(rank.healthy))
            requests.add_metric([rank.replica], rank.num_requests)
            elsewhere.add_metric([rank.replica], rank.num_elsewhere)
            queued.add_metric([rank.replica], rank.num_queued_tokens)
            queue.add_metric([rank.replica], rank.queue_ms / 1000)
            error.add_metric([rank.replica], rank.cost_error_ms / 1000)
            trust.add_metric([rank.replica], rank.trust)
            for tier, count in rank.num_blocks.items():
                blocks.add_metric([rank.replica, tier], count)
            for kind, count in rank.events.items():
                events.add_metric([rank.replica, kind], count)
        yield from (state, healthy, requests, elsewhere, queued, queue)
        yield from (blocks, error, trust)
        yield events
        pool = self._source.pool_state()
        if pool is not None:
            yield from _pool_metrics(pool)


def _pool_metrics(pool: PoolState) -> Iterator[Metric]:
    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"warmroute_pool_{name}", text, labels=labels)

    up = gauge("up", "1 while the Mooncake master answers and its pool is counted on")
    up.add_metric([], float(pool.is_up))
    yield up
    blocks = gauge("blocks", "Blocks known to be in the shared pool, by base model", "model")
    for model, count in pool.num_blocks.items():
        blocks.add_metric([model], count)
    yield blocks
    counts = CounterMetricFamily(
        "warmroute_pool_knowledge", "What was learned of the pool, by kind", labels=["kind"]
    )
    for kind, count in pool.counts.items():
        counts.add_metric([kind], count)
    yield counts
    for name, text, value in (
        ("listing_age_seconds", "Time since the pool's keys were last listed", pool.listing_age_s),
        ("allocated_bytes", "What the pool's objects take", pool.allocated_bytes),
        ("capacity_bytes", "What the pool's segments have", pool.capacity_bytes),
    ):
        if value is not None:
            single = gauge(name, text)
            single.add_metric([], value)
            yield single
    size = gauge("bytes_per_token", "KV cache of a token in the pool, mean", "model")
    for model, number in pool.bytes_per_token.items():
        size.add_metric([model], number)
    yield size
    speed = gauge(
        "fetch_bytes_per_second", "Speed of fetches, fitted from first-token times", "replica"
    )
    for candidate, number in pool.fetch_bytes_per_s.items():
        speed.add_metric([candidate], number)
    yield speed


class _SharingCollector(Collector):
    def __init__(self, describe: Callable[[], SharingState]) -> None:
        self._describe = describe

    def describe(self) -> list[Metric]:
        return []  # as above

    def collect(self) -> Iterator[Metric]:
        state = self._describe()
        yield GaugeMetricFamily(
            "warmroute_redis_up", "1 while state is shared through Redis", float(state.is_up)
        )
        yield GaugeMetricFamily(
            "warmroute_routers", "Routers of this namespace that live", state.num_routers
        )
        feeds = GaugeMetricFamily(
            "warmroute_feeds",
            "Candidates by whom this router hears of their blocks from: leading (the engine, for "
            "all routers), direct (the engine, for itself), following (another router)",
            labels=["role"],
        )
        for role, num in state.num_feeds.items():
            feeds.add_metric([role], num)
        counts = CounterMetricFamily(
            "warmroute_sharing", "What happened between this router and Redis", labels=["kind"]
        )
        for kind, num in state.counts.items():
            counts.add_metric([kind], num)
        yield from (feeds, counts)


class _ExperimentCollector(Collector):
    def __init__(self, describe: Callable[[], Iterable[ExperimentState]]) -> None:
        self._describe = describe

    def describe(self) -> list[Metric]:
        return []  # as above

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "warmroute_experiment_running",
            "1 while an experiment takes requests",
            labels=["experiment", "design"],
        )
        share = GaugeMetricFamily(
            "warmroute_experiment_share_ratio",
            "Share of its traffic that an arm is to get now",
            labels=["experiment", "arm"],
        )
        evidence = GaugeMetricFamily(
            "warmroute_experiment_evidence_ratio",
            "What speaks against an arm, of what is needed to stop it (logarithms): stopped at 1",
            labels=["experiment", "arm", "guardrail"],
        )
        for state in self._describe():
            running.add_metric([state.name, state.design], float(state.is_running))
            for arm, number in state.shares.items():
                share.add_metric([state.name, arm], number)
            for (arm, guardrail), number in state.evidence.items():
                evidence.add_metric([state.name, arm, guardrail], number)
        yield from (running, share, evidence)
