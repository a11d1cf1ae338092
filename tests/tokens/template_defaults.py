"""Requests to engines with arguments for the template as flags, and what vLLM makes of each.

    VLLM_TARGET_DEVICE=cpu .engines/venv/bin/python -m tests.tokens.template_defaults

Where vLLM is installed: asks its renderers, and writes golden/template-defaults.json. Of the one
template, the arguments change the beginning of each prompt; the other is the tiny model's own.
"""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tests.tokens.vllm_routes import HERE, Rendering

GOLDEN: Final = HERE / "golden" / "template-defaults.json"
HEAD: Final = HERE / "templates" / "defaults" / "head.jinja"

_DEFAULTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": None, "custom": "auto"},
    {"reasoning_effort": "low", "custom": "x", "unknown": 1},
)
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
]
_OWN: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"enable_thinking": None, "custom": "auto"}},
    {"chat_template_kwargs": {"custom": "y", "reasoning_effort": "high"}},
)
_EFFORTS: Final = (None, "none", "high")

Format = Literal["auto", "string", "openai"]


class Case(NamedTuple):
    """One request: its API and body, and how its engine is started."""

    api: str
    body: dict[str, Any]
    template: Path | None
    defaults: dict[str, Any]
    content_format: Format = "auto"


def cases() -> list[Case]:
    """List the requests."""
    found: list[Case] = []
    for template, defaults in product((None, HEAD), _DEFAULTS):
        for own, effort in product(_OWN, _EFFORTS):
            chat = own | ({} if effort is None else {"reasoning_effort": effort})
            found.append(Case("chat", {"messages": _TURNS} | chat, template, defaults))
            told = own | ({} if effort is None else {"reasoning": {"effort": effort}})
            found.append(Case("responses", {"input": "hi"} | told, template, defaults))
        found.append(Case("chat", {"messages": _TURNS, "tools": [_TOOL]}, template, defaults))
        for thinking in ("disabled", "adaptive"):
            message = {
                "model": "tiny",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "hi"}],
                "thinking": {"type": thinking},
            }
            found.append(Case("messages", message, template, defaults))
    formats: tuple[Format, ...] = ("auto", "string", "openai")
    found += [Case("chat", {"messages": _TURNS}, HEAD, {}, form) for form in formats]
    return found


def record() -> None:
    """Ask the vLLM that this interpreter has."""

    async def everything() -> list[str | None]:
        rendering = Rendering()
        found: list[str | None] = []
        for case in cases():
            routes = rendering.routes(
                case.template, defaults=case.defaults, content_format=case.content_format
            )
            found.append(await routes.entry(case.api, case.body))
        return found

    GOLDEN.write_text(json.dumps(asyncio.run(everything()), indent=0) + "\n")


if __name__ == "__main__":
    record()
