"""What is read at scrape time, as tables: name, labels, what it is, its value in a state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

S = TypeVar("S")
_KINDS: Final[dict[str, type[CounterMetricFamily] | type[GaugeMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class Family(NamedTuple, Generic[S]):
    """A row of a table; a name that ends with `_total` is a counter's, else it is a gauge's.

    The first label is the state's name, if it has one.
    """

    name: str
    labels: str  # separated by spaces
    text: str
    value: Callable[[S], float | Mapping[str, float] | None]  # by the last label; None: not known

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        return "counter" if self.name.endswith("_total") else "gauge"


State = dict[str, Any]

# fmt: off
CANDIDATE: Final[list[Family[State]]] = [  # of `router.discovery.status.Status.candidates`
    Family("warmroute_replica_state", "replica state",
        "1 for the current state of the router's knowledge of the replica's cache",
        lambda c: {state: c["cache"] == state for state in ("exact", "degraded", "blind")}),
    Family("warmroute_replica_healthy", "replica", "1 while the replica may be chosen",
        lambda c: c["may_be_chosen"]),
    Family("warmroute_replica_withheld", "replica why",
        "1 while the replica gets no new requests, by reason: draining, asleep, paused, stalled",
        lambda c: c["withheld"]),
    Family("warmroute_inflight_requests", "replica",
        "Requests in flight, of all routers together", lambda c: c["num_requests"]),
    Family("warmroute_inflight_requests_elsewhere", "replica",
        "Requests in flight that other routers sent", lambda c: c["num_elsewhere"]),
    Family("warmroute_inflight_uncached_tokens", "replica",
        "Uncached prompt tokens of requests without a first token yet",
        lambda c: c["num_queued_tokens"]),
    Family("warmroute_queue_seconds", "replica",
        "Predicted time until the prefills in flight are done", lambda c: c["queue_ms"] / 1000),
    Family("warmroute_index_blocks", "replica tier", "Blocks of the replica in the index",
        lambda c: {"gpu": c["num_gpu_blocks"], "cpu": c["num_cpu_blocks"]}),
    Family("warmroute_cost_model_error_seconds", "replica",
        "Mean absolute error of recent TTFT predictions", lambda c: c["cost"].error_ms / 1000),
    Family("warmroute_trust_ratio", "replica",
        "Share of recent audited predictions that were right", lambda c: c["trust"]),
    Family("warmroute_cpu_trust_ratio", "replica",
        "Share of recent right predictions for the replica's CPU tier; absent before the first. "
        "Below 0.6 the tier does not count until it is 0.9 again", lambda c: c["cpu_trust"]),
    Family("warmroute_last_block_dropped", "replica",
        "1 if its engine drops the last block of each hit (EAGLE, MTP)",
        lambda c: c["drops_last_block"]),
    Family("warmroute_live_sessions", "replica",
        "Live conversations at the replica", lambda c: c["num_sessions"]),
    Family("warmroute_footprint_ratio", "replica",
        "Size of the live conversations, waiting ones included, as a share of its cache; shared "
        "beginnings count once", lambda c: c["live_fill"]),
    Family("warmroute_kv_events_total", "replica kind",
        "KV events of the replica, by kind", lambda c: c["events"]),
]

MODEL: Final[list[Family[int]]] = [
    Family("warmroute_available_replicas", "model",
        "Replicas that take requests for a base model now, whatever keeps the others from it",
        lambda number: number),
]

POOL: Final[list[Family[State]]] = [  # of `router.pool.pools.PoolStatus`
    Family("warmroute_pool_up", "pool", "1 while the Mooncake master answers and its pool is used",
        lambda p: p["state"] == "up"),
    Family("warmroute_pool_blocks", "pool model", "Known blocks in the shared pool, by base model",
        lambda p: {name: model["num_blocks"] for name, model in p["models"].items()}),
    Family("warmroute_pool_knowledge_total", "pool kind", "Events of following the pool, by kind",
        lambda p: p["counts"]),
    Family("warmroute_pool_listing_age_seconds", "pool",
        "Time since the pool's keys were last listed", lambda p: p["listing_age_s"]),
    Family("warmroute_pool_allocated_bytes", "pool", "Size of the pool's objects",
        lambda p: p["allocated_bytes"]),
    Family("warmroute_pool_capacity_bytes", "pool", "Size of the pool's segments",
        lambda p: p["capacity_bytes"]),
    Family("warmroute_pool_bytes_per_token", "pool model", "Mean KV bytes of a token in the pool",
        lambda p: {name: model["bytes_per_token"] for name, model in p["models"].items()}),
    Family("warmroute_pool_fetch_bytes_per_second", "pool replica",
        "Speed of fetches, fitted from first-token times", lambda p: p["fetch_bytes_per_s"]),
]

SHARING: Final[list[Family[State]]] = [  # of `router.cluster.sharing.Sharing.state`
    Family("warmroute_redis_up", "", "1 while state is shared through Redis",
        lambda s: s["state"] == "shared"),
    Family("warmroute_routers", "", "Live routers of this namespace", lambda s: s["routers"]),
    Family("warmroute_feeds", "role",
        "Event streams that this router follows, by role: leading (it also writes them to Redis), "
        "direct", lambda s: s["num_streams"]),
    Family("warmroute_sharing_total", "kind", "What happened between this router and Redis",
        lambda s: s["counts"]),
]

SOURCE: Final[list[Family[State]]] = [  # of `router.discovery.sources.SourceState`
    Family("warmroute_discovery_failing", "source",
        "1 while a source of replicas gives no usable answer; its last good answer stays",
        lambda s: s["reason"] != ""),
    Family("warmroute_discovery_replicas", "source",
        "Replicas in the last usable answer of a source", lambda s: s["num_replicas"]),
]

# fmt: on

FAMILIES: Final[tuple[Family[Any], ...]] = (*CANDIDATE, *MODEL, *POOL, *SHARING, *SOURCE)


class Families(Collector, Generic[S]):
    """A table, read from states at every scrape; without one it is not shown.

    Args:
        describe: Returns the states by name; None: there is one, without a name.
    """

    def __init__(
        self,
        table: Sequence[Family[S]],
        describe: Callable[[], Iterable[tuple[str | None, S]]],
    ) -> None:
        self._table = table
        self._describe = describe

    def describe(self) -> list[Metric]:
        return []  # nothing to check for duplicates before the first scrape

    def collect(self) -> Iterator[Metric]:
        states = list(self._describe())
        for row in self._table if states else ():
            family = _KINDS[row.kind](row.name, row.text, labels=row.labels.split())
            for name, state in states:
                value, labels = row.value(state), () if name is None else (name,)
                values = value if isinstance(value, Mapping) else {None: value}
                for label, number in values.items():
                    if number is not None:
                        own = labels if label is None else (*labels, label)
                        family.add_metric(own, float(number))
            yield family
