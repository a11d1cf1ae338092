"""What a body holds, without building all of it: for bodies of too many values to read at once.

A JSON decoder holds the interpreter for as long as it runs: 0.4 s for 23 MB of small objects, 1 s
for as much of small keys. So `costs_ms` bounds that time by counting bytes, and what takes too long
is outlined in a process of its own (router.api.outliner), which runs this file as a program: the
body on stdin, an `Outline` on stdout. So this module imports nothing of the router.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

SMALL_BYTES: Final = 256 * 1024
"""Bodies up to this are read at once: 10 ms if they are nothing but keys, else less than 1."""

LARGE_BYTES: Final = 8 * 1024 * 1024
"""Bodies beyond this are outlined, whatever they hold: a text of 30 MB takes 50 to 70 ms."""

AT_ONCE_MS: Final = 20.0

_US_PER_COLON: Final = 0.5  # a key and its place in an object; measured, as the others, on 2 GHz
_US_PER_COMMA: Final = 0.06
_US_PER_BRACKET: Final = 0.05
_SMALL_FIELD: Final = 4096  # bytes of JSON; longer ones are left out
_MOST_PROMPTS: Final = 1_000  # that are looked at
_CHILD_BYTES: Final = 2 << 30
_CHILD_CPU_S: Final = 10


class Outline(Struct, frozen=True, kw_only=True):
    """What is known of a body that was not read whole.

    fields: Top-level fields that routing needs, where they are short.
    is_cheap: It can be read whole at once after all: its colons and commas are text.
    withheld: Which fields that clients must not send it has (router.api.withheld).
    num_messages, num_tools: How long these lists are; 0 without.
    num_prompt_ids, num_prompt_chars: Of the longest prompt of a completion request.
    wrong: Why it is no JSON object; None: it is one.
    """

    fields: dict[str, Any] = {}
    is_cheap: bool = False
    withheld: list[str] = []
    num_messages: int = 0
    num_tools: int = 0
    num_prompt_ids: int = 0
    num_prompt_chars: int = 0
    wrong: str | None = None


class _Sketch(Struct, kw_only=True):
    """The fields that are looked at, as views into the body; an empty one is absent."""

    model: Raw = Raw()
    stream: Raw = Raw()
    stream_options: Raw = Raw()
    n: Raw = Raw()
    max_tokens: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    truncation: Raw = Raw()
    cache_salt: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    previous_response_id: Raw = Raw()
    request_id: Raw = Raw()
    store: Raw = Raw()
    background: Raw = Raw()
    metadata: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    vllm_xargs: Raw = Raw()
    priority: Raw = Raw()
    sampling_params: Raw = Raw()
    messages: Raw = Raw()
    tools: Raw = Raw()
    prompt: Raw = Raw()


class _Sampling(Struct):
    extra_args: Raw = Raw()


_WITHHELD: Final = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority")
EXTRA_ARGS: Final = "sampling_params.extra_args"
_OTHERS: Final = frozenset({"messages", "tools", "prompt", "sampling_params", *_WITHHELD})
_FIELDS: Final = tuple(name for name in _Sketch.__struct_fields__ if name not in _OTHERS)
_sketch = msgspec.json.Decoder(_Sketch)
_items = msgspec.json.Decoder(list[Raw])
_text = msgspec.json.Decoder(str)


def make_outline(body: bytes) -> Outline:
    """Outline a body: some 10 ms a megabyte at worst."""
    try:
        return _outlined(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return Outline(wrong=str(exc))


def _outlined(body: bytes) -> Outline:
    sketch = _sketch.decode(body)
    fields = {}
    for name in _FIELDS:
        raw = getattr(sketch, name)
        if 0 < memoryview(raw).nbytes <= _SMALL_FIELD:
            fields[name] = msgspec.json.decode(raw)
    withheld = [name for name in _WITHHELD if memoryview(getattr(sketch, name)).nbytes]
    if _begins(sketch.sampling_params, b"{"):
        sampling = msgspec.json.decode(sketch.sampling_params, type=_Sampling)
        withheld += [EXTRA_ARGS] if memoryview(sampling.extra_args).nbytes else []
    num_ids, num_chars = _longest_prompt(sketch.prompt)
    return Outline(
        fields=fields,
        is_cheap=_is_cheap(body),
        withheld=withheld,
        num_messages=len(_list(sketch.messages)),
        num_tools=len(_list(sketch.tools)),
        num_prompt_ids=num_ids,
        num_prompt_chars=num_chars,
    )


def _list(raw: Raw) -> list[Raw]:
    return _items.decode(raw) if _begins(raw, b"[") else []


def _longest_prompt(raw: Raw) -> tuple[int, int]:
    """Count the token ids and the characters of the longest prompt."""
    if _begins(raw, b'"'):
        return 0, len(_text.decode(raw))
    items = _list(raw)
    if not items or not (_begins(items[0], b"[") or _begins(items[0], b'"')):
        return len(items), 0
    num_ids = num_chars = 0
    for item in items[:_MOST_PROMPTS]:
        if _begins(item, b"["):
            num_ids = max(num_ids, len(_list(item)))
        elif memoryview(item).nbytes > num_chars and _begins(item, b'"'):
            num_chars = max(num_chars, len(_text.decode(item)))
    return num_ids, num_chars


def _begins(raw: Raw, byte: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == byte


def _is_cheap(body: bytes) -> bool:
    """Return whether reading it whole takes little time, by doing it: no request waits here."""
    if len(body) > LARGE_BYTES:
        return False
    import orjson

    started_s = time.thread_time()
    try:
        orjson.loads(body)
    except ValueError:
        return True  # and will be refused as quickly
    return (time.thread_time() - started_s) * 1000 <= AT_ONCE_MS


def main() -> None:
    """Outline stdin, within bounds of memory and time."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_CHILD_BYTES, _CHILD_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_CHILD_CPU_S, _CHILD_CPU_S))
    except (ImportError, ValueError, OSError):
        pass  # then the deadline is the only bound
    sys.stdout.buffer.write(msgspec.json.encode(make_outline(sys.stdin.buffer.read())))


def costs_ms(body: bytes) -> float:
    """Bound the time that reading a body whole takes, by counting its bytes (0.6 ms a megabyte)."""
    import numpy as np

    bytes_of = np.frombuffer(body, np.uint8)
    num_colons, num_commas, num_brackets = (
        int(np.count_nonzero(bytes_of == byte)) for byte in b":,["
    )
    us = num_colons * _US_PER_COLON + num_commas * _US_PER_COMMA + num_brackets * _US_PER_BRACKET
    return us / 1000


if __name__ == "__main__":
    main()
