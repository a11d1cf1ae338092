"""Requests to engines with flags and of releases that change prompts; recorded vLLM's answers.

    PYTHONPATH=OVERLAY:. .engines/venv/bin/python -m tests.tokens.engine_flags

Where vLLM is installed: asks its renderers, and writes golden/releases-VERSION.json and
golden/template-defaults.json. OVERLAY: see tests/engines/overlay.py; without it the installed
release is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from tests.tokens.vllm_routes import HERE, Rendering

GOLDEN: Final = HERE / "golden"
DEFAULTS: Final = GOLDEN / "template-defaults.json"
HEAD: Final = HERE / "templates" / "defaults" / "head.jinja"
"""A template whose arguments change the beginning of each prompt."""

Format = Literal["auto", "string", "openai"]
Json = dict[str, Any]

_NAMESPACE: Final = HERE / "templates" / "releases" / "namespace.jinja"
_EFFORT_MAP: Final = {"medium": "low", "xhigh": "max", "none": "high"}
_TURNS: Final[list[Json]] = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
]
_FUNCTION: Final = {"name": "weather", "arguments": '{"city": "Oslo"}'}
_TOOL_TURNS: Final[list[Json]] = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "I look it up.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": _FUNCTION}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
_SYSTEM: Final = {"role": "system", "content": "be brief"}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Case(NamedTuple):
    """One request: its API and body, and its engine's flags."""

    api: str
    body: Json
    mode: str = "hf"
    template: Path | None = None
    efforts: Mapping[str, str] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})
    content_format: Format = "auto"


def release_cases() -> list[Case]:
    """List requests of which one release makes another prompt than the next."""
    v41: list[Case] = []
    for kwargs in ({}, {"thinking": True}, {"thinking": True, "drop_thinking": False}):
        after = [*_TOOL_TURNS, {"role": "user", "content": "And?"}]
        for turns in (_TOOL_TURNS, [_SYSTEM, *_TOOL_TURNS], after):
            body: Json = {"messages": turns, "chat_template_kwargs": kwargs}
            v41.append(Case("chat", body, "deepseek_v41"))
            v41.append(Case("chat", body | {"reasoning_effort": "max"}, "deepseek_v41"))
    spaced = [
        Case("chat", {"messages": turns}, template=_NAMESPACE)
        for turns in (_TURNS, [_SYSTEM, *_TURNS])
    ]
    mapped: list[Case] = []
    for effort in ("none", "low", "medium", "high", "xhigh"):
        chat = {"messages": _TURNS, "reasoning_effort": effort}
        mapped.append(Case("chat", chat, template=_NAMESPACE, efforts=_EFFORT_MAP))
        mapped.append(Case("chat", chat, "deepseek_v41", efforts=_EFFORT_MAP))
        response = {"input": "hi", "reasoning": {"effort": effort}}
        mapped.append(Case("responses", response, template=_NAMESPACE, efforts=_EFFORT_MAP))
    for thinking in ("disabled", "adaptive"):
        message = _message(thinking) | {"output_config": {"effort": "medium"}}
        mapped.append(Case("messages", message, template=_NAMESPACE, efforts=_EFFORT_MAP))
        mapped.append(Case("messages", message, "deepseek_v41", efforts=_EFFORT_MAP))
    return [*v41, *spaced, *mapped]


def default_cases() -> list[Case]:
    """List requests with template arguments, to engines with default ones or a content format."""
    found: list[Case] = []
    all_defaults: tuple[Json, ...] = (
        {},
        {"enable_thinking": False},
        {"enable_thinking": None, "custom": "auto"},
        {"reasoning_effort": "low", "custom": "x", "unknown": 1},
    )
    arguments: tuple[Json, ...] = (
        {},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": None, "custom": "auto"}},
        {"chat_template_kwargs": {"custom": "y", "reasoning_effort": "high"}},
    )
    for template, defaults in product((None, HEAD), all_defaults):
        bodies: list[tuple[str, Json]] = []
        for own, effort in product(arguments, (None, "none", "high")):
            asked = own | ({} if effort is None else {"reasoning_effort": effort})
            bodies.append(("chat", {"messages": _TURNS} | asked))
            told = own | ({} if effort is None else {"reasoning": {"effort": effort}})
            bodies.append(("responses", {"input": "hi"} | told))
        bodies.append(("chat", {"messages": _TURNS, "tools": [_TOOL]}))
        bodies += [("messages", _message(thinking)) for thinking in ("disabled", "adaptive")]
        found += [Case(api, body, template=template, defaults=defaults) for api, body in bodies]
    formats: tuple[Format, ...] = ("auto", "string", "openai")
    body = {"messages": _TURNS}
    found += [Case("chat", body, template=HEAD, content_format=form) for form in formats]
    return found


def _message(thinking: str) -> Json:
    return {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": thinking},
    }


def record() -> None:
    """Ask the vLLM that this interpreter has."""
    import vllm

    async def entries(cases: Sequence[Case]) -> list[str | None]:
        renderings: dict[str, Rendering] = {}
        found: list[str | None] = []
        for case in cases:
            if case.mode not in renderings:
                renderings[case.mode] = Rendering(mode=case.mode)
            routes = renderings[case.mode].routes(
                case.template,
                efforts=case.efforts,
                defaults=case.defaults,
                content_format=case.content_format,
            )
            found.append(await routes.entry(case.api, case.body))
        return found

    releases = GOLDEN / f"releases-{vllm.__version__}.json"
    for path, cases in ((releases, release_cases()), (DEFAULTS, default_cases())):
        path.write_text(json.dumps(asyncio.run(entries(cases)), indent=0) + "\n")


if __name__ == "__main__":
    record()
