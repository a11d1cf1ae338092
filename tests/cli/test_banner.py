"""The start banner: what a terminal shows, and that a log has nothing of it."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click
import pytest
from msgspec.structs import replace

from router import config
from router.check import Report
from router.check.finding import Subject
from router.cli.banner import banner, greeter
from router.replicas.replica import ServedModel
from tests.check.samples import MODEL, RANK, REPLICA, facts, gone, named, status
from tests.faults.stage import Engines

URL, ADMIN_URL = "http://127.0.0.1:8080", "http://127.0.0.1:8081"


def shown(report: Report, *arguments: str, **settings: Any) -> str:
    """Write the banner without its colours."""
    flags: dict[tuple[str, ...], Any] = {tuple(k.split("__")): v for k, v in settings.items()}
    lines = banner(config.load(flags=flags), report, urls=(URL, ADMIN_URL), arguments=arguments)
    return click.unstyle("\n".join(lines))


def test_it_has_replicas_with_their_states_and_what_is_configured() -> None:
    """Policy, queue, Redis, and what to set for Claude Code."""
    fresh = replace(RANK, status=status("blind", "no events yet"), num_batches=0)
    degraded = replace(RANK, status=status("degraded"))
    replicas = (
        REPLICA,
        replace(named("r2"), ranks=(RANK, degraded)),
        replace(named("r3"), ranks=()),
        replace(named("r4"), ranks=(fresh,)),
        named("r5", gone("refused the connection")),
        named("r6", facts(sleep="asleep")),
    )
    text = shown(Report(findings=(), replicas=replicas), redis__url="redis://h:1/0")

    states = re.findall(r"(r\d)  http://10.0.0.5:8000  (.+?)(?:  |$)", text, re.MULTILINE)
    assert [state for _, state in states] == [
        "EXACT", "DEGRADED", "BLIND", "no events yet", "not reachable", "asleep"
    ]  # fmt: skip
    assert "  policy      kv_aware, queue on\n" in text
    assert "  redis       redis://h:1/0, namespace default\n" in text
    assert f"  live page   {ADMIN_URL}/  `warmroute page` prints" in text
    assert f"export ANTHROPIC_BASE_URL={URL} ANTHROPIC_AUTH_TOKEN=none\n" in text
    assert "export ANTHROPIC_MODEL=qwen ANTHROPIC_DEFAULT_HAIKU_MODEL=qwen" in text
    assert "warmroute check" not in text


@pytest.mark.parametrize(
    ("host", "bound", "reached_by"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080", None),
        ("::1", "http://[::1]:8080", None),
        ("0.0.0.0", "http://0.0.0.0:8080", "every host that can reach this machine"),
        ("", "http://[::]:8080", "every host that can reach this machine"),
        ("10.0.0.7", "http://10.0.0.7:8080", "every host that can reach 10.0.0.7"),
        ("gpu-1", "http://gpu-1:8080", "every host that can reach gpu-1"),
    ],
)
def test_it_has_the_bound_address_and_who_needs_no_key(
    host: str, bound: str, reached_by: str | None
) -> None:
    """Nobody does with a tenants file, or where clients show certificates."""
    text = shown(Report(findings=()), listen__host=host)
    keys = shown(Report(findings=()), listen__host=host, tenants__file="tenants.yaml")
    certificates = shown(
        Report(findings=()),
        listen__host=host,
        listen__tls_cert="c.pem",
        listen__tls_client_ca="ca.pem",
    )

    assert text.startswith(f"  listens on  {bound}\n")
    if reached_by is None:
        assert "without a key" not in text
    else:
        assert f"{reached_by} can send requests, without a key: --host 127.0.0.1" in text
    assert "without a key" not in keys + certificates


def test_it_has_the_first_lines_of_what_check_complains_about() -> None:
    """Errors first, five at most; then the command that shows all, with the same options."""
    subject = Subject("replica r1")
    findings = (
        subject.note("audit", "not shown"),
        *(subject.warning("events", f"warning {i}", "hint") for i in range(5)),
        subject.error("tokenizer", "an error", "hint"),
    )
    text = shown(Report(findings=findings), "--replica", "http://h:1", "--redis", "a b")

    assert text.splitlines()[-7:] == [
        "",
        "  ✗ replica r1: tokenizer: an error",
        *(f"  ! replica r1: events: warning {i}" for i in range(4)),
        "  1 more, and what to do: warmroute check --replica http://h:1 --redis 'a b'",
    ]


def test_no_word_of_an_engine_breaks_out_of_its_line() -> None:
    """Neither of the terminal's, nor of the shell's."""
    odd = replace(MODEL, served=ServedModel(id="a'; rm -rf /\n\x1b[2J"))
    text = shown(Report(findings=(), replicas=(replace(REPLICA, models=(odd,)),)))

    assert "\x1b" not in text
    assert "\nrm" not in text
    assert """ANTHROPIC_MODEL='a'"'"'; rm -rf / ?[2J' """ in text


@asynccontextmanager
async def on_a_terminal(*args: str) -> AsyncIterator[asyncio.Queue[str]]:
    """Run `warmroute serve` with stderr on a terminal; its output comes in parts."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli", "serve", "--host", "127.0.0.1", "--port", "0"),
        *("--admin-port", "0", "--set", "admin.open=true", *args),
        stderr=theirs,
        env=os.environ | {"WARMROUTE_LISTEN_DRAIN_GRACE_S": "0"},
    )
    os.close(theirs)
    written: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def take() -> None:
        try:
            written.put_nowait(os.read(ours, 65536).decode(errors="replace"))
        except OSError:  # its other end is closed
            loop.remove_reader(ours)

    loop.add_reader(ours, take)
    try:
        yield written
    finally:
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        loop.remove_reader(ours)
        os.close(ours)


async def until(written: asyncio.Queue[str], *wanted: str) -> str:
    """Read until all of it has come."""
    text = ""
    async with asyncio.timeout(120):
        while not all(each in text for each in wanted):
            text += await written.get()
    return text


async def test_a_terminal_shows_the_banner_after_the_start() -> None:
    """It says what `check` says of the same options."""
    async with Engines(1, events=False) as (engine,), on_a_terminal("--replica", engine.url) as tty:
        text = await until(tty, "What to do: warmroute check", engine.url)

    assert "replica r1: events: BLIND: started without KV events" in text
    assert "warmroute check --host 127.0.0.1 --port 0 --admin-port 0" in text


@pytest.mark.parametrize(
    ("is_terminal", "as_json", "is_shown"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_only_a_terminal_without_json_logs_has_a_banner(
    is_terminal: bool, as_json: bool, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log stays as it is."""
    module = sys.modules["router.cli.banner"]
    began = threading.Event()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(module, "show_banner", lambda *_: began.set())
    settings = config.load(flags={("log", "json"): as_json})

    greeter(settings, ())(URL, ADMIN_URL)

    assert began.wait(10 if is_shown else 0.2) == is_shown


def test_a_check_that_fails_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The router runs without a banner."""
    module = sys.modules["router.cli.banner"]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    module.show_banner(config.load(), (URL, ADMIN_URL), ())

    assert [record.getMessage() for record in caplog.records] == ["start banner not shown"]
