"""The league: its traffic in words, the routers' command lines, runs and their table."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.dev.league.cell import Cell
from loadtest.dev.league.cli import main
from loadtest.dev.league.replicas import Replica
from loadtest.dev.league.routers import OTHERS, Place, router_of
from loadtest.dev.league.run import Waste, simulated, waste
from loadtest.dev.league.spoken import Spoken
from loadtest.dev.league.table import read, report
from loadtest.emulator.tokens import ChatTokenizer
from loadtest.tiny_model import MODEL_DIR

SMALL = Cell(
    engines="simulated", scale=0.1, working_set=2.0, num_turns=8, warm_up_s=5.0, seconds=20.0
)


def test_a_working_set_is_live_agents() -> None:
    """Twice the working set takes twice the agents, and shorter contexts take more of them."""
    one, two = Cell(working_set=1.0, scale=0.1), Cell(working_set=2.0, scale=0.1)

    assert two.live == pytest.approx(2 * one.live, abs=1)
    assert one.live == pytest.approx(76_736 / 5_400, rel=0.1)
    assert Cell(num_live=7).live == 7


def test_chats_keep_their_rate_whatever_their_pauses() -> None:
    """A factor for time shortens pauses; the rate is asked for apart."""
    slow = Cell(kind="chats", rate=2.0, seconds=100.0).workload(1)
    fast = Cell(kind="chats", rate=2.0, seconds=100.0, scale_time=0.1).workload(1)

    for workload in (slow, fast):
        starts = [turn.arrival_s for turn in workload.turns if turn.number == 0]
        assert len(starts) == pytest.approx(2.0 * 160.0, rel=0.15)
    assert sum(bool(t.number) for t in fast.turns) > 2 * sum(bool(t.number) for t in slow.turns)


@pytest.mark.parametrize("kind", ["agents", "chats"])
def test_what_is_said_has_the_workloads_tokens(kind: Any) -> None:
    """Each prompt begins with the one before, and is as long as planned, but for the template."""
    workload = Cell(kind=kind, scale=0.1, num_live=2, seconds=1.0, num_turns=4).workload(3)
    spoken = Spoken(workload, 3)
    tokenizer = ChatTokenizer(MODEL_DIR)
    firsts: dict[str, str] = {}
    by_session: dict[str, list[list[dict[str, Any]]]] = {}
    for turn in sorted(workload.turns, key=lambda turn: turn.number)[:20]:
        messages = spoken.body(turn)["messages"]
        text = tokenizer.render(messages)
        num_extra = len(tokenizer.encode_plain(text)) - turn.num_input_tokens
        assert 0 <= num_extra <= 8 * (len(messages) + 1)
        firsts.setdefault(turn.session_id, messages[0]["content"])
        by_session.setdefault(turn.session_id, []).append(messages)

    assert len(set(firsts.values())) == 1  # the system prompt
    for prompts in by_session.values():
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before
            assert [each["role"] for each in after[len(before) :]] == ["assistant", "user"]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_router_gets_its_port_and_the_replicas(name: str) -> None:
    """One that follows events gets each replica's socket, else the comparison would be unfair."""
    replicas = tuple(
        Replica(url=f"http://127.0.0.1:{n}", events=f"tcp://127.0.0.1:{n + 2}") for n in (1, 2)
    )
    place = Place(port=7, metrics_port=8, replicas=replicas, block_size=32, model="tiny")
    command = OTHERS[name].command
    assert command is not None
    words = command(place)

    assert words[words.index("--port") + 1] == "7"
    assert {"http://127.0.0.1:1", "http://127.0.0.1:2"} <= set(words)
    assert words.count("--kv-event-source") == (2 if name == "vllm-router:kv_aware" else 0)


@pytest.mark.parametrize(
    ("tokens", "reason", "requests", "state", "held", "expected"),
    [
        ([500], "room", 0, "up", 500, Waste.ROOM),
        ([500], "room", 0, "up", 501, Waste.IDLE),
        ([501, 400], "room", 0, "up", 500, Waste.IDLE),  # no prompt passes the first
        ([500], "window", 0, "up", 0, Waste.IDLE),  # for its own replica, which is busy
        ([], "room", 0, "up", 0, Waste.NONE),
        ([500], "room", 2, "up", 0, Waste.NONE),
        ([500], "room", 0, "down", 0, Waste.NONE),
    ],
)
def test_a_prompt_must_not_wait_for_room_that_an_idle_replica_has(
    tokens: list[int], reason: str, requests: int, state: str, held: int, expected: Waste
) -> None:
    """One replica is at work in each case; the other one counts only if it takes requests."""
    rows = [
        {"id": "r1", "state": "up", "num_requests": 1},
        {"id": "r2", "state": state, "num_requests": requests},
    ]
    shown = [{"for": reason, "tokens": n, "before": b} for b, n in enumerate(tokens)]
    queue = {"waiting": len(tokens), "shown": shown, "held_tokens": {"r2": held}}
    found = waste({"queue": queue, "replicas": {"shown": rows}}, 1_000)

    assert found is expected


def test_caches_that_never_evict_are_the_limit() -> None:
    """Simulated: they compute fewer tokens than any policy on small caches."""
    found = {name: simulated(router_of(name), SMALL, 1) for name in ("least_loaded", "unlimited")}

    computed = {name: run.steady.num_computed_tokens for name, run in found.items()}
    assert computed["unlimited"] < 0.7 * computed["least_loaded"]
    assert found["unlimited"].steady.num_turns > 100


def test_a_league_runs_before_emulated_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real router and real requests; the runs are kept, and their table is printed again."""
    out = tmp_path / "league.json"
    words = ["--engines", "emulated", "--scale", "0.05", "--live", "3", "--turns", "3"]
    words += [
        "--preset",
        "instant",
        "--warm-up-s",
        "1",
        "--seconds",
        "4",
        "--routers",
        "kv_aware",
        "--json",
        str(out),
    ]

    assert main(words) == 0
    printed = capsys.readouterr().out
    league = read(out)

    assert "| `kv_aware` |" in printed
    assert report(league.runs) in printed
    (run,) = league.runs
    assert (run.num_live, run.steady.num_errors) == (3, 0)
    assert run.wasted_s == 0.0
    assert run.steady.num_turns > 1
    assert run.steady.hits > 0.3
    assert main(["--read", str(out)]) == 0
    assert capsys.readouterr().out == printed
