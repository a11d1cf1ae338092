"""`warmroute tail`: the feed of a running router, in the terminal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import click
import pytest
from aiohttp import web
from click.testing import CliRunner

from router.api.sessions import engine_name, session_hash
from router.cli import main
from router.cli.admin import Admin, NoRouter, Refused
from router.cli.terminal import waiting
from router.cli.watch import COLUMNS, is_wanted, long_waits, text_of, watched
from tests.conftest import Serve
from tests.faults.stage import SECRET, SESSION, Engines, Stage, chat, on_stage, streamed, words

Line = dict[str, Any]

LINE: Line = {
    "kind": "decision", "request": "q1", "at": 0.0, "session": "0123456789abcdef", "tenant": None,
    "replica": "r1#0", "tokens": 2000, "cached": 500, "reported": 1000, "outcome": "ok",
    "causes": {"new": 400, "last_block": 8, "moved": 192, "evicted": 400}, "waited_ms": 1500.0,
    "waited_for": "room",
    "ttft_ms": 320.4,
}  # fmt: skip


@asynccontextmanager
async def watching(stage: Stage, *args: str, **streams: Any) -> AsyncIterator[Any]:
    """Run a command as a process, and wait until it follows the feed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli", *args, "--admin", stage.admin_url),
        **({"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE} | streams),
    )
    try:
        await stage.until(lambda: stage.num_following == 1)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


# -- tail ----------------------------------------------------------------------------------------


async def test_tail_prints_the_last_requests_and_each_that_ends_until_ctrl_c() -> None:
    """Plain where there is no terminal; only the requests that are asked for."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for other in (SESSION, "another"):
            await stage.ask(streamed(chat(words(1))), headers={"X-Session-ID": other})
        async with watching(stage, "tail", "--session", SESSION) as process:
            await stage.ask(streamed(chat(words(1), "yes", words(2))))
            heading, *lines = [(await process.stdout.readline()).decode() for _ in range(3)]
            process.send_signal(signal.SIGINT)
            rest, said = await process.communicate()
        await stage.until(lambda: stage.num_following == 0)

    name = engine_name(session_hash(SESSION, ""))
    assert heading.split()[:3] == ["ended", "session", "replica"]
    assert all(f" {name} r1 " in line for line in lines)
    assert lines[0].split()[4] == "0%"
    assert "\x1b" not in "".join(lines)
    assert SECRET not in "".join(lines)
    assert (process.returncode, rest, said) == (0, b"", b"")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({}, "0123456789abcdef r1#0      2,000    50%  320ms   1.5s"),
        ({}, "  evicted 400, moved 192, waited for room"),
        ({"waited_ms": 3.0}, "  evicted 400, moved 192"),
        ({"reported": None}, "  ~25%"),
        ({"ttft_ms": None}, "    50%      -"),
        ({"causes": None, "outcome": "client_gone"}, "client_gone"),
        ({"session": None, "tenant": "ac\nme"}, "-                r1#0"),
        ({"session": None, "tenant": "ac\nme"}, "ac_me"),
        ({"tokens": 0, "reported": 0}, "      0      -"),
    ],
)
def test_a_request_is_one_line(line: Line, said: str) -> None:
    """What is not known is not guessed: a predicted share is marked."""
    text = click.unstyle(text_of(LINE | line, {}))

    assert said in text
    assert "\n" not in text


def test_headings_and_cells_can_be_split() -> None:
    """Only the last column has spaces, and each has its explanation in the help."""
    cells = click.unstyle(text_of(LINE | {"tenant": "ac me"}, {})).split(maxsplit=8)
    text = CliRunner().invoke(main, ("tail", "--help")).stdout

    titles = [column.title for column in COLUMNS]
    assert dict(zip(titles, cells, strict=True))["why"] == "evicted 400, moved 192, waited for room"
    for column in COLUMNS:
        assert f"    {column.title}" in text
        assert column.about in text


def test_a_request_that_waits_for_long_is_named_once() -> None:
    """Again only if it was answered in between."""
    waits = [
        {"request": name, "waited_s": waited_s, "for": "room", "before": 1, "late_s": 525.4}
        for name, waited_s in (("a", 45.3), ("b", 14.0))
    ]
    state, said = {"queue": {"shown": waits}}, set[str]()

    found = list(long_waits(state, said))
    assert [waiting(each) for each in found] == [
        "request a waits for room: 45 s so far, 1 request before it, first in 525 s at the latest"
    ]
    assert list(long_waits(state, said)) == []
    assert list(long_waits({"queue": {"shown": []}}, said)) == []
    assert said == set()


@pytest.mark.parametrize(
    ("wanted", "is_selected"),
    [
        ((None, None, None), True),
        (("0123456789ABCDEF", None, None), True),
        (("fedcba9876543210", None, None), False),
        ((None, None, "r1"), True),
        ((None, None, "r1#0"), True),
        ((None, None, "r"), False),
        ((None, "acme", None), False),
    ],
)
def test_requests_are_selected(wanted: tuple[str | None, ...], is_selected: bool) -> None:
    """By the session's name here, by replica with or without rank, by tenant."""
    assert is_wanted(LINE, *wanted) == is_selected


def test_a_tenants_session_is_found_by_its_clients_id() -> None:
    line = LINE | {"tenant": "acme", "session": engine_name(session_hash("mine", "acme\0"))}

    assert is_wanted(line, "mine", None, None)
    assert is_wanted(line, "mine", "acme", None)
    assert not is_wanted(line | {"tenant": "globex"}, "mine", None, None)


# -- the feed ------------------------------------------------------------------------------------


def _followed(url: str, most: int) -> list[Line]:
    return list(islice(watched(Admin(url, None, False)), most))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.cli.watch.PAUSE_S", 0.001)


async def test_a_router_that_goes_away_is_tried_again(serve: Serve) -> None:
    """And it is said once: whether it ends the stream, breaks it, or fails for a while."""
    calls = 0

    async def feed(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            error = {"error": {"message": "busy"}}
            return web.json_response(error, status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(json.dumps({"kind": "state", "call": calls}).encode() + b"\n")
        if calls == 4 and request.transport is not None:
            await response.write(b'{"kind": "half')
            request.transport.abort()
        return response

    lines = await asyncio.to_thread(_followed, await serve(feed), 5)

    assert [line["kind"] for line in lines] == [
        "state", "gone", "state", "gone", "state",
    ]  # fmt: skip
    assert [line["call"] for line in lines if line["kind"] == "state"] == [1, 4, 5]


async def test_a_router_that_was_never_there_is_an_error(serve: Serve) -> None:
    """So is one that does not let us in, at any time."""
    with pytest.raises(NoRouter, match="is `warmroute serve` running"):
        await asyncio.to_thread(_followed, "http://127.0.0.1:9", 1)
    calls = 0

    async def feed(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls == 1:
            return web.Response(text='{"kind": "state"}\n')
        return web.json_response({"error": {"message": "wrong token"}}, status=401)

    with pytest.raises(Refused, match="wrong token"):
        await asyncio.to_thread(_followed, await serve(feed), 9)
