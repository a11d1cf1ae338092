"""How long one hostile request body holds up everybody else, and what is left of it in memory.

Each body is sent alone, to a router in front of replicas that take a million tokens. Meanwhile
`/healthz` is asked every few milliseconds on a connection of its own, as in `stall`: an answer
that takes long has waited for the event loop. Resident memory is read before, at its highest and
when the body is gone. Any answer counts: what is measured is what the others notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

import uvloop

from loadtest.bench.client import Answer, Connection, request_bytes
from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.rig import Rig, start_rig
from loadtest.bench.setting import Setting

_PROBE_S: Final = 0.002
_PATIENCE_S: Final = 120.0
_SETTLE_MS: Final = 1_500  # the router collects its garbage once a second
_MB: Final = 1_000_000
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_MESSAGES: Final = "/v1/messages"
_RESPONSES: Final = "/v1/responses"
_USER: Final = b'{"role":"user","content":"'

Make = Callable[[int], bytes]


def _filled(before: bytes, item: bytes, after: bytes, num_bytes: int) -> bytes:
    """Repeat an item, with commas between, up to a size."""
    return before + b",".join([item] * max(1, num_bytes // (len(item) + 1))) + after


def _distinct(before: bytes, item: bytes, after: bytes, num_bytes: int) -> bytes:
    """Repeat an item with a number in it."""
    count = max(1, num_bytes // (len(item) + 8))
    return before + b",".join(item % number for number in range(count)) + after


def _long(before: bytes, text: bytes, after: bytes, num_bytes: int) -> bytes:
    """Repeat a text, without anything between, up to a size."""
    return before + text * max(1, num_bytes // len(text)) + after


_HEAD: Final = b'{"model":"tiny","max_tokens":1,'
_CHAT_HEAD: Final = _HEAD + b'"messages":[' + _USER + b'hi"}],'
_TOOL: Final = b'{"type":"function","function":{"name":"t"}}'
_CALL: Final = b'{"id":"a","type":"function","function":{"name":"t","arguments":"%s"}}'


def bodies() -> dict[str, tuple[str, int, Make]]:
    """Name every probe: its route, its size, and what makes it.

    The first four are the ones of the report that started this; the others are their kind.
    """
    made: dict[str, tuple[str, int, Make]] = {}

    def add(name: str, path: str, size_mb: float, make: Make) -> None:
        made[name] = (path, int(size_mb * _MB), make)

    message = b'{"role":"user"}'
    add("empty messages", _CHAT, 23, partial(_filled, _HEAD + b'"messages":[', message, b"]}"))
    add("tools", _CHAT, 8.8, partial(_filled, _CHAT_HEAD + b'"tools":[', _TOOL, b"]}"))
    add("token ids", _COMPLETIONS, 16, partial(_filled, _HEAD + b'"prompt":[', b"12345", b"]}"))
    opened = _HEAD + b'"messages":[' + _USER
    add("one message of words", _CHAT, 30, partial(_long, opened, b"hello, world ", b'"}]}'))
    add("one message, no spaces", _CHAT, 30, partial(_long, opened, b"a", b'"}]}'))
    add(
        "messages, half a MB", _CHAT, 0.5, partial(_filled, _HEAD + b'"messages":[', message, b"]}")
    )
    add("tools, half a MB", _CHAT, 0.5, partial(_filled, _CHAT_HEAD + b'"tools":[', _TOOL, b"]}"))
    add("messages, 4 MB", _CHAT, 4, partial(_filled, _HEAD + b'"messages":[', message, b"]}"))
    add("one message of words, 8 MB", _CHAT, 8, partial(_long, opened, b"hello, world ", b'"}]}'))
    add("escapes in one message", _CHAT, 30, partial(_long, opened, b"\\u00e9", b'"}]}'))
    add("small keys", _CHAT, 25, partial(_distinct, _CHAT_HEAD, b'"k%d":1', b"}"))
    add("nested lists", _CHAT, 16, partial(_long, _CHAT_HEAD + b'"x":', b"[", b"}"))
    shallow = b"[" * 500 + b"]" * 500
    add("many nested lists", _CHAT, 16, partial(_filled, _CHAT_HEAD + b'"x":[', shallow, b"]}"))
    add("numbers", _CHAT, 16, partial(_filled, _CHAT_HEAD + b'"x":[', b"1e307", b"]}"))
    number = _CHAT_HEAD + b'"temperature":'
    add("one huge number", _CHAT, 16, partial(_long, number, b"9", b"}"))
    part = b'{"type":"text","text":""}'
    opened_parts = _HEAD + b'"messages":[{"role":"user","content":['
    add("content parts", _CHAT, 16, partial(_filled, opened_parts, part, b"]}]}"))
    schema = (
        _CHAT_HEAD + b'"tools":[{"type":"function","function":{"name":"t","parameters":'
        b'{"type":"object","properties":{'
    )
    add("one tool's schema", _CHAT, 16, partial(_distinct, schema, b'"p%d":{}', b"}}}}]}"))
    calls = _HEAD + b'"messages":[{"role":"assistant","tool_calls":['
    add("tool calls", _CHAT, 8, partial(_filled, calls, _CALL % b"{}", b"]}]}"))
    deep = _CALL % (b"[" * 400 + b"]" * 400)
    add("arguments of tool calls", _CHAT, 8, partial(_filled, calls, deep, b"]}]}"))
    add("prompts", _COMPLETIONS, 16, partial(_filled, _HEAD + b'"prompt":[', b'"a"', b"]}"))
    add("prompts of ids", _COMPLETIONS, 16, partial(_filled, _HEAD + b'"prompt":[', b"[1]", b"]}"))
    add(
        "one prompt of words",
        _COMPLETIONS,
        30,
        partial(_long, _HEAD + b'"prompt":"', b"a b ", b'"}'),
    )
    add("stop words", _CHAT, 16, partial(_filled, _CHAT_HEAD + b'"stop":[', b'"a"', b"]}"))
    add(
        "logit_bias",
        _CHAT,
        16,
        partial(_distinct, _CHAT_HEAD + b'"logit_bias":{', b'"%d":1', b"}}"),
    )
    arguments = _CHAT_HEAD + b'"chat_template_kwargs":{'
    add("template arguments", _CHAT, 16, partial(_distinct, arguments, b'"a%d":1', b"}}"))
    add(
        "/v1/messages, messages",
        _MESSAGES,
        23,
        partial(_filled, _HEAD + b'"messages":[', message, b"]}"),
    )
    add("/v1/messages, one message", _MESSAGES, 30, partial(_long, opened, b"a b ", b'"}]}'))
    add(
        "/v1/responses, input items",
        _RESPONSES,
        16,
        partial(_filled, _HEAD + b'"input":[', message, b"]}"),
    )
    add("/v1/responses, small keys", _RESPONSES, 25, partial(_distinct, _HEAD, b'"k%d":1', b"}"))
    add(
        "/v1/embeddings, inputs",
        "/v1/embeddings",
        16,
        partial(_filled, _HEAD + b'"input":[', b'"a"', b"]}"),
    )
    return made


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    lines: list[Line] = []
    probes = bodies()
    settle_s = setting.size(_SETTLE_MS, 20) / 1_000
    async with start_rig(setting) as rig:
        idle_ms, _ = await _probe_while(rig, asyncio.sleep(setting.size(20, 1) / 10))
        for name in setting.track(list(probes), "hostile bodies"):
            path, num_bytes, make = probes[name]
            body = make(num_bytes if not setting.quick else num_bytes // 50)
            request = request_bytes(path, body)
            del body
            lines.append(await _line(rig, name, [request], max(idle_ms), settle_s))
        eight = [request_bytes(*_words(8 * _MB // (50 if setting.quick else 1))) for _ in range(3)]
        lines.append(await _line(rig, "three of 8 MB at once", eight, max(idle_ms), settle_s))
    return lines


def _words(num_bytes: int) -> tuple[str, bytes]:
    path, _, make = bodies()["messages, 4 MB"]
    return path, make(num_bytes)


async def _line(
    rig: Rig, name: str, requests: list[bytes], idle_ms: float, settle_s: float
) -> Line:
    before = rig.rss_bytes()
    answers: list[Answer] = []
    taken_ms, highest = await _probe_while(rig, _send(rig, requests, answers))
    after_ms, _ = await _probe_while(rig, asyncio.sleep(settle_s))  # work that was left behind
    said = ",".join(sorted({str(answer.status) for answer in answers})) or "cut"
    slowest_ms = max((answer.total_ms for answer in answers), default=0.0)
    return distribution(
        f"{name}, {sum(map(len, requests)) / _MB:.1f} MB",
        "ms",
        taken_ms + after_ms,
        Budget("max", 50.0),
        note=f"answered {said} in {slowest_ms:.0f} ms; RSS {before / _MB:.0f} -> "
        f"{highest / _MB:.0f} -> {rig.rss_bytes() / _MB:.0f} MB; idle max {idle_ms:.1f} ms",
    )


async def _send(rig: Rig, requests: list[bytes], answers: list[Answer]) -> None:
    async def send_one(request: bytes) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S), Connection(rig.port) as connection:
                answers.append(await connection.send(request))
        except (ConnectionError, TimeoutError):
            pass  # refused before it was read: no answer of it is a result, too

    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(send_one(request), name="hostile body")


async def _probe_while(rig: Rig, work: Coroutine[None, None, None]) -> tuple[list[float], int]:
    """Ask /healthz until the work is done; return how long each answer took, and the top RSS."""
    request = request_bytes("/healthz")
    taken_ms: list[float] = []
    highest = rig.rss_bytes()
    async with Connection(rig.port) as connection, asyncio.TaskGroup() as group:
        working = group.create_task(work, name="work")
        while not working.done():
            taken_ms.append((await connection.send(request)).total_ms)
            highest = max(highest, rig.rss_bytes())
            await asyncio.sleep(_PROBE_S)
    return taken_ms, highest
