"""Parameters of the command line that replay and compare share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import orjson

F = TypeVar("F", bound=Callable[..., Any])


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


class WarmUp(click.ParamType[tuple[int, float]]):
    """So many turns, or so many seconds: `20`, `30s`."""

    name = "turns|seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        text = str(value).strip()
        try:
            turns, seconds = (0, float(text[:-1])) if text.endswith("s") else (int(text), 0.0)
        except ValueError:
            turns, seconds = -1, -1.0
        if not (turns >= 0 and 0 <= seconds < float("inf")):
            self.fail(f"{value!r}: give a number of turns (20) or seconds (30s)", param, ctx)
        return turns, seconds


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


_COUNT: Final = click.IntRange(min=1)
POSITIVE: Final = click.FloatRange(min=0.0, min_open=True)

_SENDING: Final = (
    click.option(
        "--request-rate",
        type=POSITIVE,
        help="Open loop: stretch the arrivals to so many requests a second on average.",
    ),
    click.option("--load-factor", type=POSITIVE, help="Times as fast as the workload: 2, 0.5."),
    click.option(
        "--concurrency",
        type=_COUNT,
        help="Closed loop: at most so many sessions at once, their sub-agents not counted.",
    ),
    click.option("--max-tokens", type=_COUNT, help="Cut replies: no more than so many tokens."),
    click.option(
        "--timeout",
        "timeout_s",
        type=POSITIVE,
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help="Give a turn up after such a silence.",
    ),
    click.option(
        "--warm-up",
        type=WarmUp(),
        default="0",
        help="Send the first turns (20), or those of the first seconds (30s), without counting "
        "them.",
    ),
    click.option("--model", help="Name of the model. [default: the only one that is served]"),
    click.option(
        "--salt",
        default="",
        help="Any text: makes prompts that no cache has seen; the same text, the same prompts.",
    ),
    click.option(
        "--header", "headers", type=Header(), multiple=True, help="For all requests; repeatable."
    ),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the API key. [default: OPENAI_API_KEY, if set]",
    ),
)


def sending_options(command: F) -> F:
    """Add the options of sending to a click command: rates, limits, model, headers, key."""
    for option in reversed(_SENDING):
        command = option(command)
    return command


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
