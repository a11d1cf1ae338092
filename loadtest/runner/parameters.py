"""Parameters of the command line that replay and compare share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import orjson


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
