"""Systems in good order; a test changes the part that it is about."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from router.base.contracts import HashContract
from router.base.messages import StreamStatus
from router.check.finding import Finding, Level
from router.check.mooncake import PoolModel, PoolSeen
from router.check.redis import RedisSeen
from router.check.seen import ModelSeen, RankSeen, ReplicaSeen
from router.config import ReplicaConfig
from router.discovery.engine_api import EngineFacts
from router.discovery.engine_pages import ServerInfo
from router.kv_events.subscriber import EventSource
from router.pool.layouts import Layout
from router.pool.master import MasterFigures
from router.replicas.replica import Entry, ServedModel

URL = "http://10.0.0.5:8000"
SERVED = ServedModel(id="qwen", max_model_len=32768)
STATUS = StreamStatus("exact", "", HashContract(algorithm="sha256", block_size=16), 8192)
RANK = RankSeen(
    rank=0,
    source=EventSource(endpoint="tcp://*:5557"),
    endpoint="tcp://10.0.0.5:5557",
    reach="open",
    is_publisher=True,
    replay_endpoint="tcp://10.0.0.5:5558",
    replay_reach="open",
    has_replay=True,
    status=STATUS,
    num_batches=12,
    num_blocks=1200,
    num_pooled=4,
)
MODEL = ModelSeen(served=SERVED, source="/models/qwen", is_loaded=True, is_compared=True)
FACTS = EngineFacts(
    models=(SERVED,),
    version="0.32.0",
    block_size=16,
    num_gpu_blocks=8192,
    prefix_caching=True,
    started_s=1.0,
    num_ranks=1,
    event_sources={},
)
REPLICA = ReplicaSeen(
    entry=Entry(name="r1", identity="one", replica=ReplicaConfig(url=URL)),
    pool="",
    facts=FACTS,
    publishers=(),
    models=(MODEL,),
    ranks=(RANK,),
)
REDIS = RedisSeen(
    address="10.0.0.6:6379",
    namespace="default",
    server="redis 7.0.15, standalone",
    round_trip_ms=0.3,
    schema="3",
    used_bytes=50 << 20,
    max_bytes=1 << 30,
    policy="noeviction",
    followed=("one",),
)
FIGURES = MasterFigures(
    num_keys=40,
    allocated_bytes=40 << 20,
    capacity_bytes=1 << 30,
    num_evicted_keys=2,
    num_put_keys=42,
)
POOL = PoolSeen(
    url="http://10.0.0.6:9003",
    figures=FIGURES,
    num_segments=2,
    num_listed=40,
    models=(
        PoolModel(
            name="qwen",
            layout=Layout("qwen@tp_rank:0-1", {0: ("qwen@tp_rank:0", "qwen@tp_rank:1")}),
            num_blocks=20,
            bytes_per_token=2048.0,
        ),
    ),
)


def named(name: str, seen: ReplicaSeen = REPLICA, **config: Any) -> ReplicaSeen:
    """Rename a replica, or change its configuration."""
    replica = replace(seen.entry.replica, **config)
    return replace(seen, entry=replace(seen.entry, name=name, replica=replica))


def configured(**config: Any) -> ReplicaSeen:
    """Change the configuration of the replica."""
    return named("r1", **config)


def facts(seen: ReplicaSeen = REPLICA, **changes: Any) -> ReplicaSeen:
    """Change a fact of the replica."""
    assert seen.facts is not None
    return replace(seen, facts=replace(seen.facts, **changes))


def info(seen: ReplicaSeen = REPLICA, **changes: Any) -> ReplicaSeen:
    """Change what the replica reports in dev mode."""
    return replace(seen, info=ServerInfo(**changes))


def gone(text: str, failure: Any = "other") -> ReplicaSeen:
    """Have the replica not answer."""
    return replace(REPLICA, facts=None, models=(), ranks=(), error=text, failure=failure)


def rank(**changes: Any) -> ReplicaSeen:
    """Change the replica's rank."""
    return replace(REPLICA, ranks=(replace(RANK, **changes),))


def status(state: Any = "exact", reason: str = "", **changes: Any) -> StreamStatus:
    """Change the status of a rank's stream, or its hash contract."""
    fields = {name: changes.pop(name) for name in ("is_verified", "groups") if name in changes}
    contract = replace(STATUS.contract, **changes)
    return replace(STATUS, state=state, reason=reason, contract=contract, **fields)


def model(**changes: Any) -> ReplicaSeen:
    """Change the replica's model."""
    return replace(REPLICA, models=(replace(MODEL, **changes),))


def wrong(findings: list[Finding]) -> list[tuple[Level, str, str]]:
    """List the level, part and text of all findings that are not ok."""
    return [(f.level, f.about, f.text) for f in findings if f.level != "ok"]
