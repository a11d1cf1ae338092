"""What `serve` shows on a terminal once it listens: replicas, policy, queue, what to do next.

A process of its own runs `warmroute check` with the same options, so that the router's event loop
and log have nothing of it, and both say the same. Without a terminal, or with JSON logs, there is
no banner: the log has one line, as ever.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from router.base.addresses import bound_url
from router.cli.terminal import one_line
from router.config import Config
from router.config.exposure import open_to

if TYPE_CHECKING:
    from router.check import Report

logger = logging.getLogger(__name__)

_WAIT_S: Final = 5.0  # for what the check asks
_DEADLINE_S: Final = 60.0  # for its process, on a busy machine
_MOST: Final = 5  # complaints shown
_COLOURS: Final = {"EXACT": "green", "DEGRADED": "yellow", "no events yet": "cyan"}


def greeter(config: Config, arguments: Sequence[str]) -> Callable[[str, str], None]:
    """Return what to call once a router listens: it shows the banner later, and never waits.

    Args:
        arguments: The flags of `serve`.
    """

    def greet(data_url: str, admin_url: str) -> None:
        if sys.stderr.isatty() and not config.log.json:
            urls = data_url, admin_url
            threading.Thread(
                target=show_banner, args=(config, urls, arguments), name="banner", daemon=True
            ).start()

    return greet


def show_banner(config: Config, urls: tuple[str, str], arguments: Sequence[str]) -> None:
    try:
        report = _checked(arguments)
    except Exception as exc:  # a banner is no reason to end, or to show a traceback
        logger.warning("start banner not shown", extra={"reason": type(exc).__name__})
        return
    lines = banner(config, report, urls=urls, arguments=arguments)
    click.echo("\n".join(["", *lines, ""]), err=True, color=None if _has_colour() else False)


def _has_colour() -> bool:
    return not os.environ.get("NO_COLOR")  # a thread has no click context that says so


def _checked(arguments: Sequence[str]) -> Report:
    """Run `warmroute check` and read its report."""
    import msgspec

    from router.check import Report

    command = [sys.executable, "-m", "router.cli", "check", "--json", f"--wait={_WAIT_S}"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, timeout=_DEADLINE_S, check=False
    )
    return msgspec.json.decode(done.stdout, type=Report)


def banner(
    config: Config, report: Report, *, urls: tuple[str, str], arguments: Sequence[str] = ()
) -> list[str]:
    """Write the lines of the banner, with colours; `urls` are the data and the admin URL."""
    data_url, admin_url = urls
    policy = config.policy.name
    redis = config.redis.url or ", ".join(config.redis.sentinels)
    rows = [
        *_listens(config, data_url),
        *_replicas(report),
        ("policy", f"{policy}, queue {'on' if config.queue.is_on(policy) else 'off'}"),
        ("redis", f"{redis}, namespace {config.redis.namespace}" if redis else "none: one router"),
        ("live page", f"{admin_url}/  `warmroute page` prints a link with the token"),
        *_clients(report, data_url),
    ]
    lines = [f"  {click.style(f'{name:<12}', bold=True)}{text}" for name, text in rows]
    complaints = report.complaints()
    if not complaints:
        return lines
    lines.append("")
    for finding in complaints[:_MOST]:
        colour = "red" if finding.level == "error" else "yellow"
        mark = click.style("✗" if finding.level == "error" else "!", fg=colour)
        lines.append(f"  {mark} {one_line(f'{finding.subject}: {finding.about}: {finding.text}')}")
    more = len(complaints) - _MOST
    rest = f"{more} more, and what to do" if more > 0 else "What to do"
    lines.append(f"  {rest}: {shlex.join(['warmroute', 'check', *arguments])}")
    return lines


def _listens(config: Config, data_url: str) -> Iterator[tuple[str, str]]:
    """Write the address as it is bound, and who can send requests to it without a key."""
    yield "listens on", bound_url(data_url, config.listen.host)
    reached_by = open_to(config)
    if reached_by is not None:
        warning = click.style(f"{reached_by} can send requests, without a key", fg="yellow")
        yield "", f"{warning}: --host 127.0.0.1, or a --tenants-file with keys, ends that"


def _replicas(report: Report) -> Iterator[tuple[str, str]]:
    from router.check import described, state_of

    heading = "replicas"
    for seen in report.replicas:
        state = state_of(seen)
        coloured = click.style(state, fg=_COLOURS.get(state, "red"))
        yield heading, f"{seen.name}  {seen.url}  {coloured}  {one_line(described(seen))}".rstrip()
        heading = ""
    if not report.replicas:
        yield heading, "none yet"


def _clients(report: Report, data_url: str) -> Iterator[tuple[str, str]]:
    """Write what to set for Claude Code: docs/guides/agents.md has the other variables."""
    base = f"export ANTHROPIC_BASE_URL={data_url} ANTHROPIC_AUTH_TOKEN=none"
    yield "Claude Code", base
    models = [model.id for seen in report.replicas for model in seen.models]
    if models:
        name = one_line(shlex.quote(models[0]))
        yield "", f"export ANTHROPIC_MODEL={name} ANTHROPIC_DEFAULT_HAIKU_MODEL={name}"
