"""Records of experiments, made by the objects that make them live: snapshots, policies, records.

Only what happened next is drawn: a first token after the time that the decision predicts, times
noise of the session and of the request, times the arm's effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.random import Generator

from loadtest.experiments import Options, Report, load, make_report
from loadtest.experiments.observations import Observations, observe
from policies import CandidateId, Policy, ReplicaView, RequestView, Snapshot, create
from policies.cost import candidate_costs
from router.records.record import AssignmentRecord, DecisionRecord, Try
from tests.policies.snapshots import PLAIN

START_S = 1_800_000_000.0
MODEL = "Qwen/Qwen3-8B"


class Arm(Struct, frozen=True, kw_only=True):
    """A variant: its policy, its effect on first tokens, its share over the experiment's time."""

    name: str
    policy: str = "kv_aware"
    params: dict[str, Any] = {}
    effect: float = 1.0  # times the first-token time
    share: Callable[[float], float] = lambda at: 0.5  # `at` in [0, 1)
    error_rate: float = 0.0
    missing_rate: float = 0.0


CONTROL = Arm(name="control", policy="least_loaded")
TREATMENT = Arm(name="treatment")


class Scene(Struct, frozen=True, kw_only=True):
    """What was run."""

    name: str = "trial"
    design: str = "split"
    arms: tuple[Arm, ...] = (CONTROL, TREATMENT)
    num_sessions: int = 400
    num_turns: float = 5.0
    span_s: float = 7_200.0
    slot_s: float = 120.0
    wash_out_s: float = 12.0
    num_replicas: int = 4
    seed: int = 1
    num_routers: int = 1
    trial: str = ""
    control: str = ""
    start_s: float = START_S


def records(scene: Scene) -> list[DecisionRecord]:
    """Run a scene; records in order of their ends."""
    rng = np.random.default_rng(scene.seed)
    made: list[DecisionRecord] = []
    policies = {arm.name: create(arm.policy, arm.params) for arm in scene.arms}
    begins = np.sort(rng.random(scene.num_sessions))
    numbers = [0] * scene.num_routers
    for session, begin in enumerate(begins):
        num_turns = int(np.clip(rng.lognormal(np.log(scene.num_turns), 0.7), 1, 60))
        level = rng.lognormal(0.0, 0.3)
        digest = blake2b(f"{scene.seed}-{session}".encode(), digest_size=8).hexdigest()
        point = int(digest, 16) / 2**64
        for turn in range(num_turns):
            at = float(begin) + turn * 20.0 / scene.span_s
            if at >= 1.0:
                break
            placed = _arm(scene, point, float(begin), at)
            if placed is None:
                continue
            arm, assignment = placed
            if assignment.design != "switchback":
                assignment = msgspec.structs.replace(assignment, unit=digest)
            router = session % scene.num_routers
            snapshot = _snapshot(scene, arm, numbers[router], router, digest, turn, rng)
            numbers[router] += 1
            noise = level * rng.lognormal(0.0, 0.4)
            made.append(
                _record(scene, arm, policies[arm.name], assignment, snapshot, at, noise, rng)
            )
    return sorted(made, key=lambda record: record.at)


def write(path: Path, made: Iterable[DecisionRecord]) -> Path:
    """Write a file as the decision log does."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in made))
    return path


def _arm(
    scene: Scene, point: float, begin: float, at: float
) -> tuple[Arm, AssignmentRecord] | None:
    """Assign as a router does: a point on a line of shares, of the session or of the slot."""
    slot = None
    is_wash_out = False
    unit = ""
    if scene.design == "switchback":
        at_s = scene.start_s + at * scene.span_s
        slot = int(at_s // scene.slot_s)
        digest = blake2b(f"{scene.seed}-slot-{slot}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64
        is_wash_out = at_s - slot * scene.slot_s < scene.wash_out_s
        unit = str(slot)
        begin = at
    end = 0.0
    for arm in scene.arms:
        end += arm.share(begin)
        if point < end:
            return arm, AssignmentRecord(
                experiment=scene.name,
                design=scene.design,
                arm=arm.name,
                unit=unit,
                share=arm.share(begin),
                slot=slot,
                not_counted="wash_out" if is_wash_out else None,
                control=scene.control,
                trial=scene.trial,
            )
    return None


def _snapshot(
    scene: Scene, arm: Arm, number: int, router: int, digest: str, turn: int, rng: Generator
) -> Snapshot:
    num_tokens = 2_000 + 400 * turn + int(rng.integers(0, 400))
    home = int(digest, 16) % scene.num_replicas
    names = [f"r{i + 1}" for i in range(scene.num_replicas)]
    loads = rng.integers(0, 4, scene.num_replicas)
    views = []
    for index, name in enumerate(names):
        held = num_tokens - 400 if turn and index == home else 256
        waiting = int(loads[index])
        views.append(
            ReplicaView(
                id=CandidateId(name),
                num_gpu_tokens=held,
                num_cpu_tokens=held,
                num_requests=waiting + 1,
                num_waiting=waiting,
                num_queued_tokens=900 * waiting,
                queue_ms=90.0 * waiting,
                busy_ratio=0.4,
                num_pool_tokens=num_tokens // 2,
                cost=PLAIN,
            )
        )
    return Snapshot(
        now_s=float(number),
        number=number,
        seed=scene.seed * 100 + router,
        request=RequestView(num_tokens=num_tokens, session_hash=int(digest, 16)),
        replicas=tuple(views),
    )


def _record(
    scene: Scene,
    arm: Arm,
    policy: Policy,
    assignment: AssignmentRecord,
    snapshot: Snapshot,
    at: float,
    noise: float,
    rng: Generator,
) -> DecisionRecord:
    decision = policy.decide(snapshot)
    costs = {cost.id: cost for cost in candidate_costs(snapshot)}
    live = costs[decision.candidate]
    failed = rng.random() < arm.error_rate
    ttft_ms = 300.0 * noise * arm.effect
    num_tokens = snapshot.request.num_tokens
    num_cached = num_tokens - live.num_uncached_tokens
    total_ms = 1.0 + ttft_ms + 400.0
    is_missing = failed or rng.random() < arm.missing_rate
    return DecisionRecord(
        request_id=f"{scene.seed}-{snapshot.seed}-{snapshot.number}",
        at=scene.start_s + at * scene.span_s + total_ms / 1000,
        api="chat",
        model=MODEL,
        policy=policy.name,
        policy_params=msgspec.structs.asdict(policy),
        assignment=assignment,
        state="exact",
        snapshot=snapshot,
        decision=decision,
        tries=(Try(candidate=decision.candidate, failure="timeout" if failed else None),),
        outcome="replica_failed" if failed else "ok",
        status=502 if failed else 200,
        num_prompt_tokens=num_tokens,
        num_predicted_cached_tokens=num_cached,
        num_reported_cached_tokens=None if failed else num_cached,
        num_completion_tokens=None if failed else 41,
        router_ms=1.0,
        predicted_ttft_ms=live.ttft_ms,
        ttft_ms=None if is_missing else ttft_ms,
        total_ms=total_ms,
    )


def observed(path: Path, made: list[DecisionRecord]) -> Observations:
    """Return the observations of the only experiment in these records."""
    read = load([str(write(path / "r.jsonl", made))])
    return observe(read, read.choose(None))


def reported(
    path: Path, made: list[DecisionRecord], options: Options | None = None, **named: Any
) -> Report:
    """Report on these records."""
    return make_report(load([str(write(path / "r.jsonl", made))]), options=options, **named)


def codes(report: Report, weight: str) -> set[str]:
    """Return the codes of the findings of a weight."""
    return {finding.code for finding in report.findings if finding.weight == weight}
