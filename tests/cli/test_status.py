"""`warmroute status`: what it says, and its exit status."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from router.cli import main
from router.cli.status import degraded, recent, report
from tests.cli.states import COLUMNS, REPLICA, state
from tests.faults.stage import SECRET, Engines, Stage, chat, on_stage, streamed, words


async def status(stage: Stage, *args: str) -> Result:
    """Run the command beside the router."""
    command = ("status", "--admin", stage.admin_url, *args)
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, command))


async def test_a_router_in_order_is_status_0() -> None:
    """It shows replicas, queue, sessions and tokens. A replica without requests is in order."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.ask(streamed(chat(words(1))))
        await stage.settled(*engines)
        await stage.ask(streamed(chat(words(1), "yes", words(2))))
        await stage.settled(*engines)
        result = await status(stage)
        raw = await status(stage, "--json")

    assert result.exit_code == raw.exit_code == 0
    lines = result.stdout.splitlines()
    assert "2 of 2 replicas up, 1 cache known, 0 in flight, 0 waiting" in lines[0]
    rows = sorted(line.split() for line in lines if line.startswith(("r1 ", "r2 ")))
    assert [row[:2] for row in rows] == [["r1", "up"], ["r2", "up"]]
    assert sorted(row[2] for row in rows) == ["exact", "no"]  # "no events"
    assert "queue: nothing waits" in lines
    assert "sessions: 1 known" in result.stdout
    assert "tokens of the last 1 minute: " in result.stdout
    assert lines[-1] == "all is well"
    assert json.loads(raw.stdout)["degraded"] == []
    assert SECRET not in result.stdout


async def test_a_replica_that_is_missing_is_status_1() -> None:
    """What is degraded is the last line; a replica that drains is not."""
    async with Engines(2) as engines, on_stage(*engines, "http://127.0.0.1:9") as stage:
        await stage.admin("/admin/replicas/r1/drain", {"draining": True})
        result = await status(stage)
        raw = await status(stage, "--json")

    assert result.exit_code == raw.exit_code == 1
    (said,) = json.loads(raw.stdout)["degraded"]
    assert said.startswith("replica r3 is not discovered: http://127.0.0.1:9/v1/models")
    assert result.stdout.splitlines()[-1] == f"✗ {said}"
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("r1 ")]
    assert row[1] == "draining"


async def test_no_router_is_status_2(tmp_path: Path) -> None:
    """Nor one that does not let us in."""
    token = tmp_path / "token"
    token.write_text("t0ken")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        refused = await status(stage)
        nobody = await status(stage, "--admin", "http://127.0.0.1:9")

    assert (refused.exit_code, nobody.exit_code) == (2, 2)
    assert refused.stderr == "Error: the admin token is missing or wrong\n"
    assert "is `warmroute serve` running" in nobody.stderr
    assert refused.stdout == nobody.stdout == ""


# -- made-up states ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (state(), "no replica is known"),
        (
            state(REPLICA | {"state": "down", "reason": "probe\nrefused"}),
            "replica r1 is down: probe refused",
        ),
        (
            state(REPLICA | {"cache": "blind", "cache_reason": "no events"}),
            "the cache of r1 is blind: no events",
        ),
        (
            state(REPLICA, sharing={"state": "degraded", "reason": "no answer"}),
            "nothing is shared with other routers: no answer",
        ),
        (state(REPLICA, pools=[{"name": "p", "up": False}]), "the pool p cannot be reached"),
        (state(REPLICA, pools=[{"name": "", "up": False}]), "the pool cannot be reached"),
    ],
)
def test_what_is_degraded_is_said(given: dict[str, Any], said: str) -> None:
    wrong = list(degraded(given))

    assert wrong == [said]
    assert report(given, wrong).splitlines()[-1] == f"✗ {said}"


def test_what_is_on_purpose_is_not_degraded() -> None:
    for on_purpose in ("draining", "asleep", "paused"):
        assert list(degraded(state(REPLICA | {"state": on_purpose}))) == []


def test_much_that_is_wrong_is_counted() -> None:
    """A line each for the first ones."""
    many = state(*(REPLICA | {"name": f"r{n}", "state": "down"} for n in range(40)))
    text = report(many, list(degraded(many)))

    assert "… 30 more" in text
    assert text.count("✗") == 10
    assert text.splitlines()[-1] == "and 30 more"


def test_a_full_replica_is_seen() -> None:
    """The sessions that are alive need more than its cache has."""
    (row,) = [line for line in report(state(REPLICA), []).splitlines() if line.startswith("r1")]
    unknown = state(REPLICA | {"live_fill": None, "cache_fill": None, "audited": 0})

    assert row.split() == [
        *("r1", "up", "exact", "██████", "125%", "2", "5,000", "50%", "3", "1.5", "s", "90.0%")
    ]
    (row,) = [line for line in report(unknown, []).splitlines() if line.startswith("r1")]
    assert row.split()[3:] == ["-", "2", "5,000", "-", "3", "1.5", "s", "-"]


def test_the_queue_says_what_is_waited_for() -> None:
    waiting = [{"waited_s": 1.5}, {"waited_s": 3.25}]
    queue = {"on": True, "waiting": 5, "for": {"tbt": 1, "room": 4}, "shown": waiting}
    text = report(state(REPLICA, queue=queue), [])

    assert "queue: 5 waiting, 4 for room, 1 for tbt; the longest for 3.2 s" in text
    assert "queue: off" in report(state(REPLICA, queue=queue | {"on": False}), [])


def test_tokens_are_of_the_last_minutes() -> None:
    """The sums of the steps, the newest first to be counted."""
    tokens = {
        "columns": COLUMNS,
        "step_s": 10.0,
        "steps": [[0, 9, 9, 9, 9], *[[at, 50, 30, 10, 10] for at in range(6)]],
    }
    given = state(REPLICA, tokens=tokens)

    assert recent(given, 60.0) == ({"cached": 300, "new": 180, "moved": 60, "last_block": 60}, 1)
    assert "636, 49% cached, 41% new, 11% computed again: moved 69" in report(given, [])


def test_markup_in_a_reason_is_text() -> None:
    given = state(REPLICA | {"state": "down", "reason": "[red]x[/red]"})

    assert report(given, list(degraded(given))).count("[red]x[/red]") == 1


def test_it_says_which_caches_are_too_small() -> None:
    """Nothing is degraded; but sessions evict each other."""
    text = report(state(REPLICA, REPLICA | {"name": "r2", "live_fill": 0.8}), [])

    said = " ".join(text.split())
    assert "! live sessions need more than the KV cache of r1 (125%): add replicas" in said
    assert "r2 (" not in said
