"""Snapshots for the tables, and a strategy that draws any."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from policies import CandidateId, CostModel, ReplicaView, RequestView, Snapshot
from tests.effort import examples

PLAIN = CostModel(
    base_ms=10.0,
    ms_per_token=0.1,
    ms_per_mtoken2=0.0,
    ms_per_fetched_token=0.01,
    ms_per_fetch=0.0,
    fetched_token_error_ms=0.0,
)


def replica(
    name: str,
    *,
    gpu: int = 0,
    cpu: int | None = None,
    requests: int = 0,
    waiting: int = 0,
    queue_ms: float = 0.0,
    busy: float = 0.0,
    cost: CostModel = PLAIN,
) -> ReplicaView:
    return ReplicaView(
        id=CandidateId(name),
        num_gpu_tokens=gpu,
        num_cpu_tokens=gpu if cpu is None else cpu,
        num_requests=requests,
        num_waiting=waiting,
        queue_ms=queue_ms,
        busy_ratio=busy,
        cost=cost,
    )


def snapshot(
    *replicas: ReplicaView,
    tokens: int = 1000,
    session: int | None = None,
    home: str | None = None,
    first_blocks: int | None = None,
    pool: int | None = None,
    sessions: tuple[int, ...] = (),
    arrivals_per_s: float = 0.0,
    number: int = 0,
    seed: int = 0,
) -> Snapshot:
    return Snapshot(
        now_s=0.0,
        number=number,
        seed=seed,
        request=RequestView(
            num_tokens=tokens,
            session_hash=session,
            session_candidate=None if home is None else CandidateId(home),
            first_blocks_hash=first_blocks,
        ),
        replicas=tuple(
            view if pool is None else replace(view, num_pool_tokens=pool) for view in replicas
        ),
        num_sessions=sessions,
        arrivals_per_s=arrivals_per_s,
    )


# A loaded machine is no finding: neither slow drawing nor a slow example fails a test.
quick = settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])

_HASHES = st.integers(0, 2**64 - 1)
_MS = st.floats(0.0, 1e6)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot as the fleet makes them: matches nested and below the prompt's length."""
    num_tokens = draw(st.integers(1, 200_000))
    num_replicas = draw(st.integers(1, 5))
    replicas = []
    for index in range(num_replicas):
        num_cpu = draw(st.integers(0, num_tokens - 1))
        num_requests = draw(st.integers(0, 50))
        num_pool = draw(st.none() | st.integers(0, num_tokens - 1))
        reads_pool = draw(st.booleans())
        num_read = max(0, (num_pool or 0) - num_cpu) if reads_pool else 0
        replicas.append(
            ReplicaView(
                id=CandidateId(f"r{index}"),
                num_gpu_tokens=draw(st.integers(0, num_cpu)),
                num_cpu_tokens=num_cpu,
                num_requests=num_requests,
                num_waiting=draw(st.integers(0, num_requests)),
                num_queued_tokens=draw(st.integers(0, 10**6)),
                queue_ms=draw(_MS),
                busy_ratio=draw(st.floats(0.0, 1.0)),
                num_pool_tokens=num_pool,
                reads_pool=reads_pool,
                num_disk_tokens=draw(st.integers(0, num_read)),
                cost=CostModel(
                    base_ms=draw(st.floats(0.0, 100.0)),
                    ms_per_token=draw(st.floats(0.0, 10.0)),
                    ms_per_running=draw(st.floats(0.0, 10.0)),
                ),
            )
        )
    ids = [view.id for view in replicas]
    return Snapshot(
        now_s=draw(st.floats(0.0, 1e9)),
        number=draw(st.integers(0, 2**40)),
        seed=draw(_HASHES),
        request=RequestView(
            num_tokens=num_tokens,
            session_hash=draw(st.none() | _HASHES),
            session_candidate=draw(st.none() | st.sampled_from([*ids, CandidateId("gone")])),
            first_blocks_hash=draw(st.none() | _HASHES),
        ),
        replicas=tuple(replicas),
        num_sessions=draw(st.sampled_from([(), tuple(range(num_replicas))])),
        arrivals_per_s=draw(st.floats(0.0, 1e4)),
    )
