"""An engine restarts, its events get lost, it dies: no client sees an error, nothing is made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from loadtest.agents import Session, make_sessions
from tests.engines.harness import ENGINE_READY_S, Engine, LossyProxy, Router, wait_until
from tests.engines.turns import PROFILE, mixed_sessions, take_turns, wrong_predictions


def sessions(seed: int, num_sessions: int = 4) -> list[Session]:
    return make_sessions(replace(PROFILE, num_sessions=num_sessions, seed=seed))


def first_body(seed: int) -> dict[str, Any]:
    """Build a request that no replica has seen."""
    turn = sessions(seed, 1)[0].next_turn()
    assert turn is not None
    return turn.body


def reported(engine: Engine, body: dict[str, Any]) -> int:
    """Ask the engine itself how many tokens of a request it had cached."""
    tokens: int = engine.chat(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@contextmanager
def behind_proxy(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router], *, has_replay: bool
) -> Iterator[tuple[Router, LossyProxy]]:
    """Put a lossy proxy between r1's events and the router."""
    with LossyProxy(replicas[0].events_endpoint) as proxy:
        lossy: dict[str, Any] = {"url": replicas[0].url, "events": [proxy.endpoint]}
        if has_replay:
            lossy["replay"] = [replicas[0].replay_endpoint]
        config = {"replicas": [lossy, {"url": replicas[1].url}]}
        with start_router(config=config) as router:
            yield router, proxy


def test_a_replica_that_is_paused_gets_no_requests(
    replicas: tuple[Engine, Engine], router: Router
) -> None:
    """The engine says so, and when it goes on; its cache was kept, and is still counted on."""

    def is_paused() -> bool:
        return router.metric("warmroute_replica_withheld", replica="r1", why="paused") == 1

    held = first_body(57)
    replicas[0].chat(held)
    wait_until(lambda: router.num_known_tokens(held)["r1"] > 0, 60, "its blocks")
    try:
        pause = httpx.post(f"{replicas[0].url}/pause", params={"clear_cache": "false"}, timeout=60)
        pause.raise_for_status()
        wait_until(is_paused, 60, "the pause in the router")
        answer = router.chat(held)
        assert answer.status_code == 200
        assert answer.headers["x-warmroute-replica"] == "r2"
    finally:
        httpx.post(f"{replicas[0].url}/resume", timeout=60).raise_for_status()
    wait_until(lambda: not is_paused(), 60, "its end")
    assert router.num_known_tokens(held)["r1"] == reported(replicas[0], held) > 0


def test_a_gap_is_replayed(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """Messages lost on the way are fetched again: the next ones' numbers show that they are
    missing, if the router has not asked by itself before, as it does on a quiet stream."""
    with behind_proxy(replicas, start_router, has_replay=True) as (router, proxy):
        lost, after = first_body(51), first_body(52)
        num_replays = router.metric("warmroute_kv_events_total", replica="r1", kind="replays")
        with proxy.losing():
            replicas[0].chat(lost)
        replicas[0].chat(after)
        wait_until(lambda: router.num_known_tokens(lost)["r1"] > 0, 60, "the replay")

        assert proxy.num_lost > 0
        replays = router.metric("warmroute_kv_events_total", replica="r1", kind="replays")
        assert replays > num_replays
        for body in (lost, after):
            assert router.num_known_tokens(body)["r1"] == reported(replicas[0], body)
        wait_until(lambda: router.state("r1") == "exact", 60, "r1 exact again")


def test_a_gap_without_replay_is_admitted(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """What cannot be fetched again is not made up: less is known, nothing too much."""
    with behind_proxy(replicas, start_router, has_replay=False) as (router, proxy):
        before, lost, after = first_body(53), first_body(54), first_body(55)
        replicas[0].chat(before)
        with proxy.losing():
            replicas[0].chat(lost)
        replicas[0].chat(after)
        wait_until(lambda: router.num_known_tokens(after)["r1"] > 0, 60, "the events after")

        assert router.state("r1") == "degraded"
        for body in (before, lost, after):
            assert router.num_known_tokens(body)["r1"] <= reported(replicas[0], body)
        assert router.chat(after).is_success


async def test_a_restart_is_survived(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """While r2 is away r1 serves; back again it is exact, and credited with nothing it lost."""
    with start_router(policy="round_robin") as router:  # so that both have work
        await restart(router, replicas)


async def restart(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """Kill r2, go on without it, start it again, and use it."""
    warm = await take_turns(router.url, sessions(61), max_rounds=2)
    bodies = [turn.body for turn, result in warm if result.replica == "r2"]
    assert bodies, "no session was sent to r2"

    replicas[1].kill()
    away = await take_turns(router.url, sessions(62, 2), max_rounds=2)  # raises on an error
    again = [router.chat(body) for body in bodies]
    replicas[1].start().wait_ready("/health", ENGINE_READY_S)
    wait_until(lambda: router.metric("warmroute_replica_healthy", replica="r2") == 1, 60, "r2 up")
    credited = [router.num_known_tokens(body)["r2"] for body in bodies]
    replicas[1].chat(first_body(63))  # the first event of its new life
    wait_until(lambda: router.state("r2") == "exact", 60, "r2 exact again")
    back = await take_turns(router.url, sessions(64), max_rounds=3)

    assert {result.replica for _, result in away} == {"r1"}
    assert [answer.status_code for answer in again] == [200] * len(bodies)
    assert credited == [0] * len(bodies)
    assert {result.replica for _, result in back} == {"r1", "r2"}
    assert wrong_predictions(result for _, result in back) == []


async def test_killing_the_owner_costs_no_error(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """A replica dies with the cache and with a request in it: the other one answers both."""
    with start_router() as router:
        await kill_owner(router, replicas)


async def kill_owner(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """Kill the replica that has a session's cache in the middle of the session's next request."""
    turns = await take_turns(router.url, sessions(71, 1), max_rounds=2)
    owner = turns[-1][1].replica
    engine = replicas[0] if owner == "r1" else replicas[1]
    # Long to generate and answered whole: no byte of the answer before the kill.
    body = {**turns[-1][0].body, "max_tokens": 2_000, "min_tokens": 2_000}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(router.chat(body))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: engine.metric("vllm:num_requests_running") > 0, 60, "the request to run")
    engine.kill()
    asking.join()
    rest = await take_turns(router.url, mixed_sessions(num_sessions=2), max_rounds=2)

    [answer] = answers
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-warmroute-replica"] != owner
    assert {result.replica for _, result in rest} == {answer.headers["x-warmroute-replica"]}
    assert router.metric("warmroute_failovers_total", replica=str(owner)) >= 1


def kill_core(engine: Engine) -> None:
    """Kill an engine's core alone: its HTTP server lives on for long enough to say so."""
    listed = subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    [core] = [
        int(pid)
        for pid, group, args in rows
        if int(group) == engine.pid and args.startswith("VLLM::EngineCore")
    ]
    os.kill(core, signal.SIGKILL)


@pytest.mark.parametrize("kill", [Engine.kill, kill_core])
def test_a_stream_whose_engine_dies_ends_with_an_error_event(
    replicas: tuple[Engine, Engine],
    start_router: Callable[..., Router],
    kill: Callable[[Engine], None],
) -> None:
    """The client sees an error event after what it has; the other engine answers again."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me of the cat."}],
        "stream": True,
        "max_tokens": 800,
        "ignore_eos": True,
    }
    with start_router() as router:
        url, events = f"{router.url}/v1/chat/completions", list[dict[str, Any]]()
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            name = answer.headers["x-warmroute-replica"]
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if len(events) == 40:
                        kill(replicas[0 if name == "r1" else 1])
        again = router.chat({**body, "stream": False, "max_tokens": 8})

    assert "error" in events[-1]
    assert len(events) >= 40
    assert again.status_code == 200
    assert again.headers["x-warmroute-replica"] != name
