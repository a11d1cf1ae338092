"""Chats that one release of vLLM renders otherwise than the next, and what each makes of them.

    PYTHONPATH=OVERLAY:. VLLM_TARGET_DEVICE=cpu .engines/venv/bin/python -m tests.tokens.releases

Where vLLM is installed: asks its renderers, and writes golden/releases-VERSION.json. OVERLAY: see
tests/engines/overlay.py; without it the installed release is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tests.tokens.vllm_routes import HERE, Rendering

GOLDEN: Final = HERE / "golden"
EFFORTS: Final = {"medium": "low", "xhigh": "max", "none": "high"}


class Case(NamedTuple):
    """One chat: its API and body, and how its engine is started."""

    api: str
    body: dict[str, Any]
    mode: str = "hf"
    template: Path | None = None
    efforts: Mapping[str, str] = MappingProxyType({})


_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "I look it up.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
_TEXT_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
]
_NAMESPACE: Final = HERE / "templates" / "releases" / "namespace.jinja"
_SYSTEM: Final = {"role": "system", "content": "be brief"}


def cases() -> list[Case]:
    """List the chats."""
    v41: list[Case] = []
    for kwargs in ({}, {"thinking": True}, {"thinking": True, "drop_thinking": False}):
        for turns in (_TURNS, [_SYSTEM, *_TURNS], [*_TURNS, {"role": "user", "content": "And?"}]):
            body: dict[str, Any] = {"messages": turns, "chat_template_kwargs": kwargs}
            v41.append(Case("chat", body, "deepseek_v41"))
            v41.append(Case("chat", body | {"reasoning_effort": "max"}, "deepseek_v41"))
    spaced = [
        Case("chat", {"messages": turns}, template=_NAMESPACE)
        for turns in (_TEXT_TURNS, [_SYSTEM, *_TEXT_TURNS])
    ]
    mapped: list[Case] = []
    for effort in ("none", "low", "medium", "high", "xhigh"):
        chat = {"messages": _TEXT_TURNS, "reasoning_effort": effort}
        mapped.append(Case("chat", chat, template=_NAMESPACE, efforts=EFFORTS))
        mapped.append(Case("chat", chat, "deepseek_v41", efforts=EFFORTS))
        response = {"input": "hi", "reasoning": {"effort": effort}}
        mapped.append(Case("responses", response, template=_NAMESPACE, efforts=EFFORTS))
    for thinking in ("disabled", "adaptive"):
        message = {
            "model": "tiny",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "thinking": {"type": thinking},
            "output_config": {"effort": "medium"},
        }
        mapped.append(Case("messages", message, template=_NAMESPACE, efforts=EFFORTS))
        mapped.append(Case("messages", message, "deepseek_v41", efforts=EFFORTS))
    return [*v41, *spaced, *mapped]


def record() -> None:
    """Ask the vLLM that this interpreter has."""
    import vllm

    async def everything() -> list[str | None]:
        found: list[str | None] = []
        for case in cases():
            routes = Rendering(mode=case.mode).routes(case.template, efforts=case.efforts)
            found.append(await routes.entry(case.api, case.body))
        return found

    path = GOLDEN / f"releases-{vllm.__version__}.json"
    path.write_text(json.dumps(asyncio.run(everything()), indent=0) + "\n")


if __name__ == "__main__":
    record()
