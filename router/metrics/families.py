"""What is read at scrape time, as tables: name, labels, what it is, its samples of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from router.replicas.state import RankState


class SharingState(Struct, frozen=True, kw_only=True):
    """How this router stands to Redis and to other routers at scrape time."""

    is_up: bool
    num_routers: int  # that live, this one included
    num_streams: dict[str, int]  # role -> candidates
    counts: dict[str, int]  # what happened -> how often, since the router started
    reason: str = ""  # why it is not up
    redis: str | None = None  # which server it is, or was last
    roles: dict[str, str] = {}  # candidate -> role


class PoolState(Struct, frozen=True, kw_only=True):
    """What a shared pool looks like at scrape time; None: not known (yet)."""

    name: str = ""  # "": the only one
    is_up: bool
    num_blocks: dict[str, int]  # base model -> blocks in its directory
    counts: dict[str, int]  # counter name -> value, since the router started
    listing_age_s: float | None
    allocated_bytes: int | None
    capacity_bytes: int | None
    bytes_per_token: dict[str, float]  # base model -> of KV cache, mean
    fetch_bytes_per_s: dict[str, float]  # candidate -> fitted from first-token times


class SourceState(Struct, frozen=True, kw_only=True):
    """How a source of replicas stands."""

    name: str
    num_replicas: int  # of its last good answer
    reason: str  # why its last answer was not followed; empty: it was
    age_s: float | None  # of its last good answer; None: there was none
    not_followed: dict[str, str]  # address -> why


class StateSource(Protocol):
    """What describes the replicas and the pool."""

    def rank_states(self) -> Iterable[RankState]:
        """Describe every candidate now."""
        ...

    def pool_states(self) -> Sequence[PoolState]:
        """Describe the shared pools that are configured."""
        ...


S = TypeVar("S")
Samples = Iterable[tuple[Sequence[str], float]]  # values of the labels, value
_KINDS: Final[dict[str, type[CounterMetricFamily] | type[GaugeMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class Family(NamedTuple, Generic[S]):
    """A row of a table; a name that ends with `_total` is a counter's, else it is a gauge's."""

    name: str
    labels: str  # separated by spaces
    text: str
    samples: Callable[[S], Samples | None]  # None: not known, so it is not shown

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        return "counter" if self.name.endswith("_total") else "gauge"


def _each(values: Mapping[str, float], *labels: str) -> Samples:
    """Label each of some values by its key, after `labels`."""
    return [((*labels, key), value) for key, value in values.items()]


def _single(value: float | None, *labels: str) -> Samples | None:
    """Show one value; None: not known."""
    return None if value is None else [(labels, value)]


# fmt: off
REPLICA: Final[list[Family[RankState]]] = [
    Family("warmroute_replica_state", "replica state",
        "1 for the current state of the router's knowledge of the replica's cache",
        lambda r: [((r.status.id, s), r.cache == s) for s in ("exact", "degraded", "blind")]),
    Family("warmroute_replica_healthy", "replica", "1 while the replica may be chosen",
        lambda r: [((r.status.id,), r.may_be_chosen)]),
    Family("warmroute_replica_withheld", "replica why",
        "1 while the replica gets no new requests, by reason: draining, asleep, paused, stalled",
        lambda r: _each(r.withheld, r.status.id)),
    Family("warmroute_inflight_requests", "replica",
        "Requests in flight, of all routers together",
        lambda r: [((r.status.id,), r.status.num_requests)]),
    Family("warmroute_inflight_requests_elsewhere", "replica",
        "Requests in flight that other routers sent",
        lambda r: [((r.status.id,), r.status.num_elsewhere)]),
    Family("warmroute_inflight_uncached_tokens", "replica",
        "Uncached prompt tokens of requests without a first token yet",
        lambda r: [((r.status.id,), r.status.num_queued_tokens)]),
    Family("warmroute_queue_seconds", "replica",
        "Predicted time until the prefills in flight are done",
        lambda r: [((r.status.id,), r.status.queue_ms / 1000)]),
    Family("warmroute_index_blocks", "replica tier",
        "Blocks of the replica in the index",
        lambda r: _each({"gpu": r.num_gpu_blocks, "cpu": r.num_cpu_blocks}, r.status.id)),
    Family("warmroute_cost_model_error_seconds", "replica",
        "Mean absolute error of recent TTFT predictions",
        lambda r: [((r.status.id,), r.status.cost.error_ms / 1000)]),
    Family("warmroute_trust_ratio", "replica",
        "Share of recent audited predictions that were right",
        lambda r: [((r.status.id,), r.trust)]),
    Family("warmroute_cpu_trust_ratio", "replica",
        "Share of recent right predictions for the replica's CPU tier; absent before the first. "
        "Below 0.6 the tier does not count until it is 0.9 again",
        lambda r: [] if r.cpu_trust is None else [((r.status.id,), r.cpu_trust)]),
    Family("warmroute_last_block_dropped", "replica",
        "1 if its engine drops the last block of each hit (EAGLE, MTP)",
        lambda r: [((r.status.id,), r.drops_last_block)]),
    Family("warmroute_live_sessions", "replica",
        "Live conversations at the replica",
        lambda r: [((r.status.id,), r.num_sessions)]),
    Family("warmroute_footprint_ratio", "replica",
        "Size of the live conversations, waiting ones included, as a share of its cache; shared "
        "beginnings count once",
        lambda r: [] if r.footprint_ratio is None else [((r.status.id,), r.footprint_ratio)]),
    Family("warmroute_kv_events_total", "replica kind",
        "KV events of the replica, by kind",
        lambda r: _each(r.events, r.status.id)),
]

MODEL: Final[list[Family[tuple[str, int]]]] = [
    Family("warmroute_available_replicas", "model",
        "Replicas that take requests for a base model now, whatever keeps the others from it",
        lambda m: [((m[0],), m[1])]),
]

POOL: Final[list[Family[PoolState]]] = [
    Family("warmroute_pool_up", "pool",
        "1 while the Mooncake master answers and its pool is used",
        lambda p: _single(p.is_up, p.name)),
    Family("warmroute_pool_blocks", "pool model",
        "Known blocks in the shared pool, by base model",
        lambda p: _each(p.num_blocks, p.name)),
    Family("warmroute_pool_knowledge_total", "pool kind", "Events of following the pool, by kind",
        lambda p: _each(p.counts, p.name)),
    Family("warmroute_pool_listing_age_seconds", "pool",
        "Time since the pool's keys were last listed",
        lambda p: _single(p.listing_age_s, p.name)),
    Family("warmroute_pool_allocated_bytes", "pool", "Size of the pool's objects",
        lambda p: _single(p.allocated_bytes, p.name)),
    Family("warmroute_pool_capacity_bytes", "pool", "Size of the pool's segments",
        lambda p: _single(p.capacity_bytes, p.name)),
    Family("warmroute_pool_bytes_per_token", "pool model", "Mean KV bytes of a token in the pool",
        lambda p: _each(p.bytes_per_token, p.name)),
    Family("warmroute_pool_fetch_bytes_per_second", "pool replica",
        "Speed of fetches, fitted from first-token times",
        lambda p: _each(p.fetch_bytes_per_s, p.name)),
]

SHARING: Final[list[Family[SharingState]]] = [
    Family("warmroute_redis_up", "", "1 while state is shared through Redis",
        lambda s: _single(s.is_up)),
    Family("warmroute_routers", "", "Live routers of this namespace",
        lambda s: _single(s.num_routers)),
    Family("warmroute_feeds", "role",
        "Event streams that this router follows, by role: leading (it also writes them to Redis), "
        "direct",
        lambda s: _each(s.num_streams)),
    Family("warmroute_sharing_total", "kind", "What happened between this router and Redis",
        lambda s: _each(s.counts)),
]

SOURCE: Final[list[Family[SourceState]]] = [
    Family("warmroute_discovery_failing", "source",
        "1 while a source of replicas gives no usable answer; its last good answer stays",
        lambda s: [((s.name,), s.reason != "")]),
    Family("warmroute_discovery_replicas", "source",
        "Replicas in the last usable answer of a source",
        lambda s: [((s.name,), s.num_replicas)]),
]

# fmt: on

FAMILIES: Final[tuple[Family[Any], ...]] = (
    *REPLICA,
    *MODEL,
    *POOL,
    *SHARING,
    *SOURCE,
)


class Families(Collector, Generic[S]):
    """A table, read from states at every scrape.

    Args:
        describe: Returns the states; None: the table is not shown.
    """

    def __init__(
        self, table: Sequence[Family[S]], describe: Callable[[], Iterable[S] | None]
    ) -> None:
        self._table = table
        self._describe = describe

    def describe(self) -> list[Metric]:
        return []  # nothing to check for duplicates before the first scrape

    def collect(self) -> Iterator[Metric]:
        states = self._describe()
        if states is None:
            return
        states = list(states)
        for row in self._table:
            known = [row.samples(state) for state in states]
            found = [samples for samples in known if samples is not None]
            if known and not found:
                continue
            family = _KINDS[row.kind](row.name, row.text, labels=row.labels.split())
            for samples in found:
                for labels, value in samples or ():
                    family.add_metric(labels, float(value))
            yield family
