"""Small whole objects that several tests need."""

from __future__ import annotations

from dataclasses import dataclass

from policies.view import CandidateId, Decision, ReplicaView, RequestView, Snapshot
from router.base.contracts import BlockKey
from router.records.record import DecisionRecord, Try

R1 = CandidateId("r1")


def decision_record(request_id: str = "req-1") -> DecisionRecord:
    """Build a record of one ordinary request."""
    return DecisionRecord(
        request_id=request_id,
        at=1_800_000_000.0,
        api="chat",
        model="tiny",
        policy="kv_aware",
        state="exact",
        snapshot=Snapshot(
            now_s=1.0,
            number=0,
            seed=7,
            request=RequestView(num_tokens=100),
            replicas=(ReplicaView(id=R1),),
        ),
        decision=Decision(candidate=R1, reason="the only one"),
        tries=(Try(candidate="r1"),),
        outcome="ok",
        status=200,
        num_prompt_tokens=100,
        num_predicted_cached_tokens=64,
        num_reported_cached_tokens=64,
        num_completion_tokens=5,
        router_ms=1.0,
        predicted_ttft_ms=20.0,
        ttft_ms=21.0,
        total_ms=40.0,
    )


def keys(*names: int) -> list[BlockKey]:
    """Name blocks."""
    return [BlockKey(name) for name in names]


@dataclass
class Clock:
    """A clock that moves only when a test moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
