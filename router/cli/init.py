"""`warmroute init`: a commented configuration file, from the replicas that answer."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from router import config as configuration
from router.base.errors import ConfigError
from router.cli.terminal import one_line, refuse

if TYPE_CHECKING:
    from router.check import Finding, Report
    from router.check.seen import ReplicaSeen

FILE: Final = "warmroute.yaml"
SCHEMA: Final = "warmroute.schema.json"
PORTS: Final = range(8000, 8010)
_SCAN_S: Final = 1.0
_WIDTH: Final = 96
_PLAIN: Final = re.compile(r"https?://[\w.:\[\]/-]+", re.ASCII)
_SET: Final = ("listen.host", "listen.port", "admin.port", "policy.name", "queue.mode", "log.level")
_EXAMPLES: Final = {
    "redis.url": "redis://HOST:6379/0",
    "tenants.file": "tenants.yaml",
    "log.json": "true",
    "log.decisions": "decisions.jsonl",
}
"""Keys that many set-ups need, as comments."""


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=FILE,
    show_default=True,
    metavar="FILE",
    help="File to write; - writes to stdout.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@click.option(
    "--engine-api-key-file",
    "key_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the --api-key of the engines.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to wait for answers.",
)
def init(
    urls: tuple[str, ...], output: Path, force: bool, key_file: Path | None, wait_s: float
) -> None:
    """Write a config file from the replicas it finds.

    URL is the base URL of a vLLM server. Without one, ports 8000 to 8009 of 127.0.0.1 are tried.
    The file names the engine flags that are missing.
    """
    is_file = str(output) != "-"
    if is_file and output.exists() and not force:
        refuse(f"{output} exists; overwrite it with --force, or name another file with --output")
    is_scan = not urls
    if is_scan:
        click.echo(f"no URL given: trying 127.0.0.1, {_port_range()}", err=True)
        urls = tuple(asyncio.run(_listening()))
    report = _checked(urls, key_file, wait_s) if urls else None
    found = [] if report is None else _usable(report, is_scan=is_scan)
    if report is None or not found:
        raise click.ClickException(
            f"no vLLM server answers at 127.0.0.1, {_port_range()}; name yours: "
            "warmroute init http://HOST:PORT"
        )
    has_schema = is_file and (output.parent / SCHEMA).exists()
    name = str(output) if is_file else FILE
    text = config_text(report, found, name=name, key_file=key_file, has_schema=has_schema)
    if not is_file:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as exc:
        refuse(f"{output}: {exc.strerror}")
    _summarize(report, found, output)


def config_text(
    report: Report,
    replicas: Sequence[ReplicaSeen],
    *,
    name: str = FILE,
    key_file: Path | None = None,
    has_schema: bool = False,
) -> str:
    """Write the configuration file, its comments included."""
    lines = [f"# yaml-language-server: $schema={SCHEMA}"] if has_schema else []
    lines += [
        "# Written by `warmroute init`. All keys: `warmroute options`.",
        f"# Check it:  warmroute check --config {one_line(name)}",
        f"# Start it:  warmroute serve --config {one_line(name)}",
        "",
        "replicas:",
    ]
    for i, seen in enumerate(replicas):
        lines += _replica(report, seen, i)
    lines += ["", *_engines(report, replicas, key_file)]
    lines += sections_text()
    return "\n".join(lines) + "\n"


def _replica(report: Report, seen: ReplicaSeen, number: int) -> Iterator[str]:
    from router.check.events import EVENTS_PORT, events_flag
    from router.check.report import described

    about = described(seen) if seen.error is None else f"not reachable: {seen.error}"
    yield from _wrapped(about, "  # ")
    yield f"  - url: {_scalar(seen.url)}"
    for finding in _wrong(report, seen) if seen.error is None else ():
        yield from _wrapped(f"{finding.about}: {finding.text}", "    # ")
        # Engines on one machine need ports of their own.
        own = events_flag(EVENTS_PORT + 2 * number)
        hint = finding.hint.replace(events_flag(), own)
        if hint:
            yield f"    #   -> {one_line(hint)}"


def _engines(
    report: Report, replicas: Sequence[ReplicaSeen], key_file: Path | None
) -> Iterator[str]:
    """Write what concerns all engines: their key, their tokenizers, what only requests show."""
    for finding in report.of("router"):
        if finding.about == "audit" and finding.hint:
            yield from _wrapped(f"{finding.text}: {finding.hint}", "# ")
    if key_file is not None:
        yield f"engine: {{api_key_file: {_scalar(str(key_file))}}}"
    elif any(seen.failure == "api key" for seen in replicas):
        yield "# The engines have an --api-key."
        yield "# engine: {api_key_file: FILE}"
    models = {model.id: model for seen in replicas for model in seen.models}
    lacking = {name: model for name, model in models.items() if model.engine_only is not None}
    if not lacking:
        return
    named = ", ".join(f"{_quoted(name)}: DIRECTORY" for name in lacking)
    yield f"# tokens: {{models: {{{named}}}}}"


def sections_text() -> Iterator[str]:
    for section, options in _sections():
        is_set = any(".".join(option.path) in _SET for option in options)
        yield ""
        yield f"{section}:" if is_set else f"# {section}:"
        for option in options:
            yield from _key(option, is_in_comment=not is_set)


def _sections() -> Iterator[tuple[str, list[configuration.Option]]]:
    """List the keys that the file shows, by section."""
    shown: dict[str, list[configuration.Option]] = {}
    for option in configuration.options():
        if ".".join(option.path) in (*_SET, *_EXAMPLES):
            shown.setdefault(option.path[0], []).append(option)
    yield from shown.items()


def _key(option: configuration.Option, *, is_in_comment: bool) -> Iterator[str]:
    key = ".".join(option.path)
    indent = "#   " if is_in_comment else "  "
    text = option.description
    if option.choices:
        text += f" ({', '.join(option.choices)})"
    yield from _wrapped(text, "#   # " if is_in_comment else "  # ")
    if key in _SET:
        yield f"{indent}{option.path[-1]}: {option.default}"
    else:
        yield f"{indent if is_in_comment else '  # '}{option.path[-1]}: {_EXAMPLES[key]}"


def _wrong(report: Report, seen: ReplicaSeen) -> list[Finding]:
    mine = f"replica {seen.name}"
    return [finding for finding in report.complaints() if finding.subject == mine]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        one_line(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [indent.rstrip()]


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text)


# -- looking -------------------------------------------------------------------------------------


def _port_range() -> str:
    return f"ports {PORTS[0]} to {PORTS[-1]}"


async def _listening() -> list[str]:
    """List the URLs of this machine where anything listens."""
    from router.check.reach import reach

    urls = [f"http://127.0.0.1:{port}" for port in PORTS]
    async with asyncio.TaskGroup() as tg:
        tries = [tg.create_task(reach(url, timeout_s=_SCAN_S), name=url) for url in urls]
    return [url for url, task in zip(urls, tries, strict=True) if task.result() == "open"]


def _checked(urls: Sequence[str], key_file: Path | None, wait_s: float) -> Report:
    """Check the replicas as `warmroute check` does; variables and ports of this shell aside."""
    from router import check as checking

    flags: dict[tuple[str, ...], Any] = {
        ("replicas",): list(urls),
        ("listen", "port"): 0,  # a router that runs here is none of these replicas' business
        ("admin", "port"): 0,
    }
    if key_file is not None:
        flags["engine", "api_key_file"] = key_file
    try:
        config = configuration.load(flags=flags)
    except ConfigError as error:
        refuse(error.message.removeprefix("--replica: "))
    logging.getLogger("router").addHandler(logging.NullHandler())
    return asyncio.run(checking.check(config, wait_s=wait_s))


def _usable(report: Report, *, is_scan: bool) -> list[ReplicaSeen]:
    """List the replicas to write: those that were named, or those that a scan found."""
    return [seen for seen in report.replicas if not is_scan or seen.error is None]


def _summarize(report: Report, replicas: Sequence[ReplicaSeen], output: Path) -> None:
    from router.check import described

    counted = f"{len(replicas)} replica" + ("" if len(replicas) == 1 else "s")
    click.secho(f"wrote {output}: {counted}", fg="green", err=True)
    for seen in replicas:
        about = described(seen) if seen.error is None else f"not reachable: {seen.error}"
        click.echo(f"  {seen.url}  {one_line(about)}", err=True)
    complaints = report.complaints()
    for finding in complaints:
        text = one_line(f"! {finding.subject}: {finding.about}: {finding.text}")
        click.secho(text, fg="yellow", err=True)
    if complaints:
        click.echo("The file has the flags that engines lack.", err=True)
    click.echo(f"next: warmroute check --config {output}", err=True)
    click.echo(f"      warmroute serve --config {output}", err=True)
