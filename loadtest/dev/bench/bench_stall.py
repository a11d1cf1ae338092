"""How long the router's event loop stands still during cold prompts and hostile bodies.

Cold prompts of 100,000 tokens, each new to the router, are sent back to back, two in flight. Then
hostile bodies come one by one. Meanwhile `/healthz` is asked every few milliseconds on a connection
of its own: an answer that takes long has waited for the loop. The same without any load, before,
shows what the machine itself adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Final

import uvloop

from loadtest.dev.bench.client import Answer, Connection, request_bytes
from loadtest.dev.bench.conversations import Prepared, growing
from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.rig import Rig, RigError, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_TOKENS: Final = 100_000
_IN_FLIGHT: Final = 2
_PROBE_S: Final = 0.002
_PATIENCE_S: Final = 120.0
_MB: Final = 1_000_000
_CHAT: Final = "/v1/chat/completions"
_HEAD: Final = b'{"model":"tiny","max_tokens":1,'
_MESSAGES: Final = _HEAD + b'"messages":['
_CHAT_HEAD: Final = _MESSAGES + b'{"role":"user","content":"hi"}],'

# name, route, size in MB, what stands before, what repeats, what stands behind
_HOSTILE: Final = (
    ("empty messages", _CHAT, 23, _MESSAGES, b'{"role":"user"},', b'{"role":"user"}]}'),
    ("tools", _CHAT, 9, _CHAT_HEAD + b'"tools":[',
     b'{"type":"function","function":{"name":"t"}},', b"{}]}"),
    ("token ids", "/v1/completions", 16, _HEAD + b'"prompt":[', b"12345,", b"1]}"),
    ("one message of words", _CHAT, 30, _MESSAGES + b'{"role":"user","content":"',
     b"hello, world ", b'"}]}'),
    ("nested lists", _CHAT, 16, _CHAT_HEAD + b'"x":', b"[", b"}"),
    ("numbers", _CHAT, 16, _CHAT_HEAD + b'"x":[', b"1e307,", b"1]}"),
    ("input items", "/v1/responses", 16, _HEAD + b'"input":[', b'{"role":"user"},', b"{}]}"),
)  # fmt: skip


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    num_tokens = setting.size(_TOKENS, 4_000)
    prompts = [
        next(growing(prompter, f"stall-{n}", num_tokens, 0)) for n in range(setting.size(40, 3))
    ]
    async with start_rig(setting) as rig:
        idle_ms = await _probe_while(rig, asyncio.sleep(setting.size(30, 1) / 10))
        stall_ms = await _probe_while(rig, _send(setting, rig, prompts))
        lines = [
            distribution(
                f"/healthz while cold prompts of {prompts[0].num_tokens:,} tokens arrive",
                "ms",
                stall_ms,
                Budget("max", 20.0),
                note=f"at most {max(idle_ms):.2f} ms without them",
            )
        ]
        for name, path, size_mb, before, item, after in setting.track(_HOSTILE, "hostile bodies"):
            num_items = size_mb * _MB // len(item) // setting.size(1, 50)
            request = request_bytes(path, before + item * num_items + after)
            lines.append(await _hostile(rig, name, request))
    return lines


async def _hostile(rig: Rig, name: str, request: bytes) -> Line:
    answers: list[Answer] = []

    async def send() -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S), Connection(rig.port) as connection:
                answers.append(await connection.send(request))
        except (ConnectionError, TimeoutError):
            return  # refused before it was read, which is a result, too

    before_mb = rig.rss_bytes() / _MB
    taken_ms = await _probe_while(rig, send())
    said = str(answers[0].status) if answers else "cut"
    return distribution(
        f"/healthz during a hostile body: {name}, {len(request) / _MB:.1f} MB",
        "ms",
        taken_ms,
        Budget("max", 50.0),
        note=f"answered {said}; RSS {before_mb:.0f} -> {rig.rss_bytes() / _MB:.0f} MB",
    )


async def _probe_while(rig: Rig, work: Coroutine[None, None, None]) -> list[float]:
    """Ask /healthz until the work is done; return how long each answer took, in ms."""
    request = request_bytes("/healthz")
    taken_ms: list[float] = []
    async with Connection(rig.port) as connection, asyncio.TaskGroup() as group:
        working = group.create_task(work, name="work")
        while not working.done():
            taken_ms.append((await connection.send(request)).total_ms)
            await asyncio.sleep(_PROBE_S)
    return taken_ms


async def _send(setting: Setting, rig: Rig, prompts: Sequence[Prepared]) -> None:
    waiting = setting.track(prompts, "cold prompts")

    async def send_on() -> None:
        async with Connection(rig.port) as connection:
            for prompt in waiting:
                answer = await connection.send(prompt.request(stream="1,0"))
                if answer.status != 200:
                    raise RigError(f"the router answered {answer.status}")

    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(send_on(), name="cold prompts")
