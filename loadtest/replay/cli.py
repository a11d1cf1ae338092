"""`warmroute replay`: drive a target, show how it goes, report, and keep every turn.

Exit status: 0 every turn was answered; 1 some failed, or the run was cut short; 2 what was asked
for cannot be done, and nothing was sent.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click
import orjson
import uvloop
from msgspec import Struct
from rich.console import Console

from loadtest.output_options import output_option
from loadtest.replay.report import Asked, make_report, show
from loadtest.results import RunInfo, TurnResult
from loadtest.runner.display import Display
from loadtest.runner.driver import replay
from loadtest.runner.options import ReplayError, ReplayOptions
from loadtest.runner.requests import num_output_tokens
from loadtest.runner.run_file import RunWriter
from loadtest.runner.stop import Stop
from loadtest.runner.target import Target, base_url
from loadtest.traces.options import WorkloadError, load_workload, workload_options
from loadtest.words import clock
from loadtest.workload import Turn, TurnKey, Workload

_WIDTH: Final = 120  # where the width of the screen is unknown
_NUM_FILES: Final = 65_536
_COUNT: Final = click.IntRange(min=1)
_POSITIVE: Final = click.FloatRange(min=0.0, min_open=True)
_OWN: Final = (
    "api",
    "concurrency",
    "extra_body",
    "ignore_eos",
    "label",
    "max_tokens",
    "model",
    "salt",
    "session_header",
    "stop_after_s",
    "timeout_s",
    "warm_up_turns",
)
"""Options that mean the same in `ReplayOptions`."""


class Job(Struct, frozen=True, kw_only=True):
    """What was asked for."""

    workload: Workload
    url: str
    options: ReplayOptions
    out: Path | None
    overwrite: bool


class Header(click.ParamType[tuple[str, str]]):
    """NAME: VALUE."""

    name = "name: value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, separator, text = str(value).partition(":")
        if not separator or not name.strip() or any(c.isspace() for c in name.strip()):
            self.fail("a header is written 'NAME: VALUE'", param, ctx)  # not shown: may be secret
        return name.strip(), text.strip()


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            found = orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            self.fail(f"{value!r} is not JSON: {exc}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is no JSON object, like '{{\"top_k\": 5}}'", param, ctx)
        return found


@click.command("replay", context_settings={"max_content_width": 100})
@click.argument("url", metavar="BASE_URL")
@workload_options
@click.option(
    "--request-rate",
    type=_POSITIVE,
    help="Open loop: stretch the arrivals to so many requests a second on average.",
)
@click.option(
    "--concurrency",
    type=_COUNT,
    help="Closed loop: at most so many sessions at once, their sub-agents not counted.",
)
@click.option("--max-tokens", type=_COUNT, help="Cut replies: no more than so many tokens.")
@click.option(
    "--timeout",
    "timeout_s",
    type=_POSITIVE,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Give a turn up after such a silence.",
)
@click.option(
    "--warm-up",
    "warm_up_turns",
    type=click.IntRange(min=0),
    default=0,
    help="Send the first turns without counting them.",
)
@click.option("--model", help="Name of the model. [default: the only one that is served]")
@click.option(
    "--salt",
    default="",
    help="Any text: makes prompts that no cache has seen; the same text, the same prompts.",
)
@click.option(
    "--header", "headers", type=Header(), multiple=True, help="For all requests; repeatable."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the API key. [default: OPENAI_API_KEY, if set]",
)
@click.option(
    "--loop",
    type=click.Choice(["open", "closed"]),
    default="open",
    show_default=True,
    help="open: every turn at its arrival, answered or not those before it. closed: the next turn "
    "when the last one is answered and its tool has run.",
)
@click.option(
    "--api",
    type=click.Choice(["auto", "completions", "chat"]),
    default="auto",
    show_default=True,
    help="auto: chat for turns with messages, completions with token ids for the others.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Make replies as long as the workload says (vLLM, SGLang); OpenAI itself refuses this.",
)
@click.option(
    "--extra-body", type=JsonObject(), default=dict, help="Fields to put into every request."
)
@click.option(
    "--session-header",
    metavar="NAME",
    default="X-Session-ID",
    show_default=True,
    help="Send the session id in this header; '': send none.",
)
@click.option(
    "--stop-after", "stop_after_s", type=_POSITIVE, metavar="SECONDS", help="Send nothing later."
)
@click.option("--label", default="", help="Name of the run. [default: the base URL]")
@output_option(is_file=True, help="Keep every turn in this file, as JSON Lines.")
@click.option("--overwrite", is_flag=True, help="Even if that file is there.")
def command(
    url: str,
    loop: str,
    request_rate: float | None,
    headers: tuple[tuple[str, str], ...],
    api_key_file: Path | None,
    out: Path | None,
    overwrite: bool,
    seed: int,
    **others: Any,
) -> None:
    """Send a workload to an API and measure each turn.

    BASE_URL is a router's or an engine's: http://127.0.0.1:8080, with or without /v1.

    \b
    A trace as it was:       warmroute replay URL --trace conversation_trace.jsonl --spread 3
    Twice as fast:           warmroute replay URL --trace … --scale-time 0.5
    Agents, as they work:    warmroute replay URL --generate agents --loop closed
    Kept for later:          warmroute replay URL --generate agents -o run.jsonl
    """
    mine = {name: others.pop(name) for name in _OWN}
    tokenizer = others.get("tokenizer")
    try:
        base_url(url)
        options = ReplayOptions(
            loop="closed" if loop == "closed" else "open",
            rate=request_rate,
            headers=dict(headers),
            api_key=api_key(api_key_file),
            seed=seed,
            tokenizer=None if tokenizer is None else str(tokenizer),
            settings=_given(others),
            **mine,
        )
        job = Job(
            workload=load_workload(seed=seed, **others),
            url=url,
            options=options,
            out=out,
            overwrite=overwrite,
        )
        status = uvloop.run(_run(job, _console(stderr=False), _console(stderr=True)))
    except (ReplayError, WorkloadError) as error:
        raise _Refused(str(error)) from error
    except FileExistsError as error:
        raise _Refused(f"{error.filename} is there: --overwrite replaces it") from error
    except OSError as error:
        raise _Refused(f"{error.filename or out}: {error.strerror or error}") from error
    sys.exit(status)


class _Refused(click.ClickException):
    exit_code = 2


def api_key(path: Path | None) -> str | None:
    """Read the key from a file, else from OPENAI_API_KEY.

    Raises:
        click.UsageError: the file cannot be read, or holds no key.
    """
    if path is None:
        return os.environ.get("OPENAI_API_KEY") or None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise click.UsageError(f"{path}: {exc.strerror or exc}") from exc
    if len(key.split()) != 1:
        raise click.UsageError(f"{path}: an API key is one word on one line")
    return key


def _given(workload_options: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """Select what was said about the workload, to be kept with the run."""
    return {
        name: value if isinstance(value, (bool, int, float)) else str(value)
        for name, value in workload_options.items()
        if value is not None and value is not False
    }


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_WIDTH)


async def _run(job: Job, console: Console, progress: Console) -> int:
    """Replay until the end or the first signal; report; return the exit status."""
    _allow_many_files()
    stop = Stop()
    stop.listen()
    with ExitStack() as stack:
        watcher = _Watcher(job, progress, stack, stop)
        try:
            run = await replay(
                job.workload,
                job.url,
                options=job.options,
                on_result=watcher.result,
                on_send=watcher.send,
                on_start=watcher.start,
            )
        except asyncio.CancelledError:
            _say(progress, f"Nothing was sent: {stop.reason}.")
            return 1
        watcher.end(run.info)
    if stop.reason:
        _say(progress, f"The run was {stop.reason}; what was measured follows.")
    report = make_report(run, _asked(job))
    show(run, report, console)
    if job.out is not None:
        _say(console, f"Every turn: {job.out}")
    return 0 if run.info.is_complete and not report.num_errors else 1


class _Watcher:
    """Keeps the run file and the display up to date; ends the run if the file cannot be written."""

    __slots__ = ("_began_s", "_console", "_display", "_job", "_stack", "_stop", "_writer")

    def __init__(self, job: Job, console: Console, stack: ExitStack, stop: Stop) -> None:
        self._job = job
        self._console = console
        self._stack = stack
        self._stop = stop
        self._began_s = 0.0
        self._display: Display
        self._writer: RunWriter | None = None

    def start(self, info: RunInfo, target: Target) -> None:
        """Open the file, describe what is to come, and show it from now on."""
        job = self._job
        if job.out is not None:
            self._writer = self._stack.enter_context(RunWriter(job.out, overwrite=job.overwrite))
            self._writer.begin(info)
        for line in _introduction(job, info, target):
            _say(self._console, line)
        display = Display(self._console, info.label, len(job.workload.turns))
        self._display = self._stack.enter_context(display)
        self._began_s = time.monotonic()

    def send(self, turn: Turn) -> None:
        self._display.send()

    def result(self, result: TurnResult) -> None:
        self._display.add(result, time.monotonic() - self._began_s)
        if self._writer is None or self._stop.reason:
            return
        try:
            self._writer.add(result)
        except OSError as error:  # a full disk: what is in memory can still be reported
            self._stop.request(
                f"ended, because {self._job.out} cannot be written ({error.strerror or error})"
            )

    def end(self, info: RunInfo) -> None:
        """Write down how it ended."""
        self._display.print(time.monotonic() - self._began_s, "done")
        if self._writer is not None:
            self._writer.end(info)  # in place: needs no room


def _introduction(job: Job, info: RunInfo, target: Target) -> Iterator[str]:
    """Describe what is about to be sent, with notes on what may surprise."""
    workload, limit = job.workload, target.max_model_len
    span = f" over {clock(workload.span_s * float(info.settings['time_factor']))}"
    skipped = f" ({workload.num_skipped:,} bad lines left out)" if workload.num_skipped else ""
    yield (
        f"{workload.name}{skipped}: {len(workload.turns):,} turns, "
        f"{workload.num_input_tokens:,} prompt tokens, {info.loop} loop"
        f"{span if info.loop == 'open' else ''}"
    )
    yield f"to {target.url}, model {target.model}"
    lengths = [turn.num_input_tokens + turn.num_output_tokens for turn in workload.turns]
    if limit is not None and (num_too_long := sum(length > limit for length in lengths)):
        yield (
            f"Note: {num_too_long:,} turns are longer than the model's {limit:,} tokens and will "
            "be refused."
        )
    if (
        job.options.api == "chat"
        and job.options.tokenizer is None
        and workload.turns[0].messages is None
    ):
        yield (
            "Note: prompts are words of the bundled tokenizer; --tokenizer takes the model's, for "
            "exact lengths."
        )
    if info.loop == "open" and any(turn.after for turn in workload.turns):
        yield (
            "Note: in the open loop a turn does not wait for the one before it in its session; "
            "--loop closed does."
        )


def _asked(job: Job) -> dict[TurnKey, Asked]:
    """Return how long every prompt and reply is meant to be."""
    options = job.options
    return {
        turn.key: Asked(
            turn.num_input_tokens,
            num_output_tokens(turn, options) if options.ignore_eos else None,
        )
        for turn in job.workload.turns
    }


def _allow_many_files() -> None:
    """Raise the limit of open files as far as allowed: every turn in flight is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
