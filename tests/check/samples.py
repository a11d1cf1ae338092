"""Systems as they should be seen; a test changes what it is about."""

from __future__ import annotations

from msgspec.structs import replace

from router.check.events import RankSeen
from router.check.finding import Finding, Level
from router.check.mooncake import PatternSeen, PoolSeen
from router.check.redis import RedisSeen, StreamSeen
from router.check.replica import ReplicaSeen
from router.check.tokenizer import ModelSeen
from router.messages import StreamId

RANK = RankSeen(
    rank=0,
    reported="tcp://*:5557",
    endpoint="tcp://10.0.0.5:5557",
    reach="open",
    has_handshake=True,
    replay_endpoint="tcp://10.0.0.5:5558",
    replay_reach="open",
    has_replay=True,
    state="exact",
    algorithm="sha256",
    seed="vllm-none-hash",
    block_size=16,
    is_verified=True,
    num_batches=12,
    num_blocks=1200,
    num_pooled=4,
)
MODEL = ModelSeen(
    id="qwen", source="/models/qwen", max_model_len=32768, is_loaded=True, is_compared=True
)
REPLICA = ReplicaSeen(
    pool="",
    name="r1",
    identity="one",
    url="http://10.0.0.5:8000",
    version="0.32.0",
    block_size=16,
    num_blocks=8192,
    prefix_caching=True,
    started_s=1.0,
    models=(MODEL,),
    has_source_route=True,
    ranks=(RANK,),
)
STREAM = StreamSeen(id=StreamId("one#0"), sequence=7, state="exact", reason="", leader="router-a")
REDIS = RedisSeen(
    address="10.0.0.6:6379",
    namespace="default",
    server="redis",
    version="7.0.15",
    mode="standalone",
    round_trip_ms=0.3,
    schema="2",
    used_bytes=50 << 20,
    max_bytes=1 << 30,
    policy="noeviction",
    routers=("router-a", "router-b"),
    feeds=(STREAM,),
    num_sessions=2,
)
POOL = PoolSeen(
    url="http://10.0.0.6:9003",
    num_objects=40,
    used_bytes=40 << 20,
    max_bytes=1 << 30,
    num_evicted=2,
    num_segments=2,
    publishes_events=False,
    is_listed=True,
    models=(PatternSeen(model="qwen", text="qwen@tp_rank:*", num_ranks=2, bytes_per_token=2048.0),),
)


def rank(**changes: object) -> ReplicaSeen:
    """A replica whose rank differs."""
    return replace(REPLICA, ranks=(replace(RANK, **changes),))


def model(**changes: object) -> ReplicaSeen:
    """A replica whose model differs."""
    return replace(REPLICA, models=(replace(MODEL, **changes),))


def wrong(findings: list[Finding]) -> list[tuple[Level, str, str]]:
    """What is not as it should be: level, about, text."""
    return [(f.level, f.about, f.text) for f in findings if f.level != "ok"]
