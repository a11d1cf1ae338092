from __future__ import annotations

import math
import random
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from loadtest.queue_model import Setup, cost_for, main, rules, run
from loadtest.traces import TraceRequest, sessions_of
from policies import Decision, Policy, Snapshot, create


def conversations(num_sessions: int = 60, num_turns: int = 6) -> list[TraceRequest]:
    """Sessions that share one system block and grow by two blocks a turn, a second apart."""
    trace = []
    next_id = 1
    for session in range(num_sessions):
        blocks: tuple[int, ...] = (0,)
        for turn in range(num_turns):
            blocks += (next_id, next_id + 1)
            next_id += 2
            trace.append(
                TraceRequest(
                    timestamp=1000.0 * (session % 20 + 20 * turn) + session,
                    input_length=512 * len(blocks) - 100,
                    hash_ids=blocks,
                )
            )
    return sorted(trace, key=lambda request: request.timestamp)


TRACE = conversations()
SETUP = Setup(num_replicas=3, num_blocks=200, load=0.9)


def test_speed_is_set_by_the_offered_load() -> None:
    """Without any cache the fleet would be busy for `load` of the trace's span."""
    cost = cost_for(TRACE, SETUP)
    work_ms = sum(cost.prefill_ms(request.input_length, 0) for request in TRACE)
    span_ms = TRACE[-1].timestamp - TRACE[0].timestamp

    assert work_ms / (3 * span_ms) == pytest.approx(0.9)


def test_order_of_the_rules() -> None:
    """Load beats chance, sessions beat load, and cost in milliseconds needs no sessions."""
    sessions = sessions_of(TRACE)
    results = {
        name: run(TRACE, sessions, create(name), SETUP)
        for name in ("random", "least_loaded", "session_sticky", "kv_aware")
    }

    means = [result.mean_s for result in results.values()]
    assert means == sorted(means, reverse=True)
    assert results["kv_aware"].local_ratio > 2 * results["random"].local_ratio


def test_runs_are_deterministic() -> None:
    """The same trace, policy and seed give the same figures; another seed may not."""
    sessions = sessions_of(TRACE)

    first = run(TRACE, sessions, create("random"), SETUP)
    assert first == run(TRACE, sessions, create("random"), SETUP)
    assert first != run(TRACE, sessions, create("random"), msgspec.structs.replace(SETUP, seed=1))


def test_small_caches_forget() -> None:
    """An LRU that holds one conversation finds less than one that holds all."""
    sessions = sessions_of(TRACE)
    small = msgspec.structs.replace(SETUP, num_blocks=14)

    few = run(TRACE, sessions, create("session_sticky"), small)
    assert few.local_ratio < run(TRACE, sessions, create("session_sticky"), SETUP).local_ratio


def test_a_pool_serves_what_other_replicas_computed() -> None:
    """What is not in the own cache is fetched, and that is faster than computing."""
    sessions = sessions_of(TRACE)
    pooled = msgspec.structs.replace(SETUP, pool_speedup=20.0)

    without = run(TRACE, sessions, create("round_robin"), SETUP)
    with_pool = run(TRACE, sessions, create("round_robin"), pooled)
    assert without.pool_ratio == 0.0
    assert with_pool.pool_ratio > 0.1
    assert with_pool.mean_s < without.mean_s


def test_a_repeated_prompt_still_computes_its_last_token() -> None:
    """A full hit is capped at the last block boundary below the prompt's end."""
    twice = [
        TraceRequest(timestamp=at_ms, input_length=1024, hash_ids=(1, 2)) for at_ms in (0.0, 1e6)
    ]
    result = run(twice, [0, 0], create("kv_aware"), Setup(num_replicas=1))

    assert result.local_ratio == 512 / 2048
    pooled = Setup(num_replicas=2, pool_speedup=5.0)
    assert run(twice, [0, 0], create("round_robin"), pooled).pool_ratio == 512 / 2048


def test_what_the_policy_is_told_of_the_recent_past() -> None:
    """Busy rises with a prefill at work and falls when it is done; pressure follows the tokens."""
    setup = Setup(num_replicas=1, num_blocks=4, load=1.0)
    trace = [
        TraceRequest(timestamp=at_ms, input_length=1024, hash_ids=(number, -number))
        for number, at_ms in enumerate((1.0, 2.0, 60_000.0, 1e6), 1)
    ]
    recorder = Recorder()

    run(trace, [0] * 4, recorder, setup)
    idle, started, busy, later = [asked.replicas[0] for asked in recorder.seen]
    assert (idle.busy_ratio, idle.cache_pressure) == (0.0, 0.0)
    assert 0.0 < started.busy_ratio < 0.001
    assert started.cache_pressure == pytest.approx(0.5, rel=1e-4)
    assert busy.busy_ratio == pytest.approx(1 - 2.718281828**-1, rel=1e-3)
    assert later.busy_ratio < busy.busy_ratio


def test_rules_cross_alpha_and_beta() -> None:
    """kv_aware appears once per pair, others once."""
    labels = [label for label, _ in rules(["random", "kv_aware"], [0.0, 2.0], [1.0, 4.0])]

    assert labels == [
        "random",
        "kv_aware:alpha=0:beta=1",
        "kv_aware:alpha=0:beta=4",
        "kv_aware:beta=1",
        "kv_aware:beta=4",
    ]
    assert [label for label, _ in rules(["kv_aware"])] == ["kv_aware"]


class Recorder(Policy, frozen=True):
    """Send everything to the first candidate and keep what was asked."""

    name: ClassVar[str] = "recorder"
    seen: list[Snapshot] = msgspec.field(default_factory=list)

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen.append(snapshot)
        return Decision(candidate=snapshot.replicas[0].id, reason="first")


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def test_the_command_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row per policy and parameter, for a trace, a load and a pool."""
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path / "t.jsonl", [msgspec.json.encode(request) for request in TRACE[:50]])
    argv = ["--trace", str(path), "--policies", "least_loaded", "kv_aware", "--alpha", "0", "2"]

    assert main([*argv, "--load", "1.15", "--pool", "5"]) == 0
    shown = capsys.readouterr().out
    assert "50 requests, 8 replicas x 5,859 blocks, load 1.15, pool x5" in shown
    assert [word in shown for word in ("least_loaded", "kv_aware:alpha=0")] == [True] * 2
    assert main(["--trace", str(path), "--policies", "round_robin"]) == 0
    assert "no pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policies", "kv_awre"], "did you mean 'kv_aware'"),
        (["--trace", "/nowhere/trace.jsonl"], "No such file"),
        (["--requests", "0"], "no requests"),
    ],
)
def test_the_command_refuses_bad_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    message: str,
) -> None:
    """Exit status 2 and a sentence, no traceback."""
    monkeypatch.setenv("COLUMNS", "300")
    path = write(tmp_path / "t.jsonl", [msgspec.json.encode(TRACE[0])])

    assert main(["--trace", str(path), *argv]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded", "longest_prefix"])
def test_routers_that_hear_at_once_are_as_one(policy: str) -> None:
    """However many there are: the model's decisions are the same."""
    sessions = sessions_of(TRACE)
    one, three = (
        run(TRACE, sessions, create(policy), msgspec.structs.replace(SETUP, num_routers=number))
        for number in (1, 3)
    )

    assert one == three


class _First(Policy, frozen=True, kw_only=True):
    """Sends all to the first replica and keeps what it was shown of it."""

    name: ClassVar[str] = "first"
    shown: list[tuple[int, float, int]]

    def decide(self, snapshot: Snapshot) -> Decision:
        first = snapshot.replicas[0]
        self.shown.append((first.num_requests, first.queue_ms, first.num_gpu_tokens))
        return Decision(candidate=first.id, reason="first")


@pytest.mark.parametrize("staleness_ms", [0.0, 2.0, math.inf])
def test_what_others_sent_is_not_seen_in_time(staleness_ms: float) -> None:
    """Neither their place in the queue nor what they are computing; one's own is, at once."""
    trace = [
        TraceRequest(timestamp=float(number), input_length=2000, hash_ids=(1, 2, 3, number + 9))
        for number in range(12)
    ]
    setup = Setup(num_replicas=2, num_routers=2, staleness_ms=staleness_ms, load=1e3)
    policy = _First(shown=[])
    run(trace, [0] * 12, policy, setup)

    dice = random.Random(setup.seed)
    routers = [dice.randrange(2) for _ in trace]
    for number, (num_requests, queue_ms, num_tokens) in enumerate(policy.shown):
        known = [
            n for n in range(number) if routers[n] == routers[number] or n + staleness_ms <= number
        ]
        assert num_requests == len(known)
        assert (queue_ms > 0.0) == bool(known)
        assert num_tokens == (3 * 512 if known else 0)
