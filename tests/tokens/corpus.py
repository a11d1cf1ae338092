"""Requests to compare with a real engine: seeded, mostly ordinary, some odd, a few refused.

`chat_bodies` and `completion_bodies` give what a client would send. The golden files hold what
vLLM made of them (record_golden.py); the real-engine suite sends the same ones to a live engine.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Body = dict[str, Any]

_WORDS = (
    "the file def return self import agent cache token block error None True 42 3.14 0x1F "
    "naïve Straße 数据 кэш 🚀 👩‍👩‍👧 e\u0301 \u200b \ufeff ﬁ Ⅷ ½ İ ß"
).split(" ")
_SPECIALS = (
    "<|im_end|> <|im_start|> <|im_end|>\n<|im_start|>system\n <|endoftext|> <think> </think> "
    "<tool_call> </tool_call> <tool_response> </tool_response> <|im_start <|im_| im_end|> "
    "<|<|im_end|> <|im_end|>|> <think></think>"
).split(" ")
_SPACES = (" ", " ", " ", "  ", "\n", "\r\n", "\t", "\n\n", "\u00a0", "\n   ", "")


@functools.cache
def written(draw: Callable[[int, int], Iterator[Body]], seed: int, count: int) -> list[bytes]:
    """Draw bodies, as JSON, once for all templates: it takes three times as long as their ids."""
    return [json.dumps(body).encode() for body in draw(seed, count)]


def chat_bodies(seed: int, count: int) -> Iterator[Body]:
    """Yield chat completion bodies."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _chat(rng)


def completion_bodies(seed: int, count: int) -> Iterator[Body]:
    """Yield completion bodies of one prompt each: text, or token ids below 1,000."""
    rng = random.Random(seed)
    for _ in range(count):
        body: Body = {"model": "tiny", "max_tokens": 1}
        if rng.random() < 0.3:
            body["prompt"] = [rng.randrange(1000) for _ in range(rng.randrange(1, 80))]
        else:
            body["prompt"] = text(rng, rng.randrange(1, 120)) or " "
        if rng.random() < 0.3:
            body["add_special_tokens"] = rng.random() < 0.5
        if rng.random() < 0.2:
            body["cache_salt"] = "salt"
        yield body


def text(rng: random.Random, num_words: int) -> str:
    """Make up a text: words, odd characters, odd spaces, forged special tokens."""
    pieces: list[str] = []
    for _ in range(num_words):
        pieces.append(rng.choice(_SPECIALS if rng.random() < 0.06 else _WORDS))
        pieces.append(rng.choice(_SPACES))
    return "".join(pieces)


def _chat(rng: random.Random) -> Body:
    tools = _tools(rng) if rng.random() < 0.5 else None
    body: Body = {"model": "tiny", "messages": _messages(rng), "max_tokens": 1}
    if tools:
        body["tools"] = tools
        if rng.random() < 0.3:
            body["tool_choice"] = rng.choice(["auto", "none", "required"])
    if rng.random() < 0.25:
        body["chat_template_kwargs"] = _template_kwargs(rng)
    if rng.random() < 0.15:
        body["reasoning_effort"] = rng.choice(["none", "low", "medium", "high"])
    if rng.random() < 0.1:
        body["documents"] = [
            {"title": text(rng, 2), "text": text(rng, 8)} for _ in range(rng.randrange(3))
        ]
    if rng.random() < 0.15:
        body["add_generation_prompt"] = False
        body["continue_final_message"] = rng.random() < 0.7
    elif rng.random() < 0.03:
        body["continue_final_message"] = True
    if rng.random() < 0.1:
        body["add_special_tokens"] = True
    if rng.random() < 0.1:
        body["cache_salt"] = "s"
    return body


def _template_kwargs(rng: random.Random) -> Body:
    options: Body = {
        "enable_thinking": rng.choice([True, False, False, None, "auto"]),
        "custom": rng.choice([1, 1.0, "x", None, [1, {"b": 2, "a": 1}], True, "auto", 1e16]),
        "dump": rng.random() < 0.5,
        "unknown": "ignored",
        "add_generation_prompt": False,
        "reasoning_effort": "max",
    }
    return {key: options[key] for key in rng.sample(sorted(options), rng.randrange(1, 4))}


def _messages(rng: random.Random) -> list[Body]:
    messages: list[Body] = []
    if rng.random() < 0.6:
        messages.append(_odd(rng, {"role": "system", "content": _content(rng, 12)}))
    if rng.random() < 0.1:
        messages.append({"role": "developer", "content": _content(rng, 6)})
    for turn in range(rng.randrange(1, 5)):
        messages.append(_odd(rng, {"role": "user", "content": _content(rng, 15)}))
        while rng.random() < 0.6:
            call_ids = [f"call_{turn}_{index}" for index in range(rng.randrange(0, 3))]
            messages.append(_odd(rng, _assistant(rng, call_ids)))
            messages.extend(
                _odd(rng, {"role": "tool", "tool_call_id": call_id, "content": _content(rng, 20)})
                for call_id in call_ids
            )
    if rng.random() < 0.05:
        role = rng.choice(["critic", "developer", "system", "function"])
        messages.insert(rng.randrange(len(messages)), {"role": role, "content": text(rng, 4)})
    return messages


def _content(rng: random.Random, num_words: int) -> Any:
    if rng.random() < 0.75:
        return text(rng, rng.randrange(num_words))
    parts: list[Body] = []
    for _ in range(rng.randrange(4)):
        part: Body = {"type": "text", "text": text(rng, rng.randrange(num_words))}
        if rng.random() < 0.2:
            part["cache_control"] = {"type": "ephemeral"}
        if rng.random() < 0.1:
            part = {"text": part["text"], "zeta": 1, "type": "text", "alpha": None}
        parts.append(part)
    return parts


def _assistant(rng: random.Random, call_ids: list[str]) -> Body:
    message: Body = {"role": "assistant"}
    if rng.random() < 0.85:
        message["content"] = None if call_ids and rng.random() < 0.6 else _content(rng, 15)
    if rng.random() < 0.3:
        key = rng.choice(["reasoning", "reasoning_content"])
        message[key] = rng.choice([None, "", text(rng, 8), text(rng, 8)])
    if rng.random() < 0.1:
        message["content"] = f"<think>\n{text(rng, 5)}\n</think>\n\n{text(rng, 5)}"
    if call_ids:
        message["tool_calls"] = [_call(rng, call_id) for call_id in call_ids]
    elif rng.random() < 0.2:
        message["tool_calls"] = rng.choice([[], None])
    return message


def _call(rng: random.Random, call_id: str) -> Body:
    function: Body = {"name": f"tool_{rng.randrange(4)}", "arguments": _arguments(rng)}
    if rng.random() < 0.3:
        function = {"arguments": function["arguments"], "name": function["name"]}
    call: Body = {"id": call_id, "type": "function", "function": function}
    if rng.random() < 0.2:
        call = {"index": 0, "function": function, "type": "function", "id": call_id}
    if rng.random() < 0.05:
        function["note"] = {"b": 1, "a": [None]}
    return call


def _arguments(rng: random.Random) -> Any:
    if rng.random() < 0.8:
        values = {f"p{rng.randrange(5)}": value_of(rng, 2) for _ in range(rng.randrange(4))}
        return json.dumps(values, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
    return rng.choice(
        [
            "",
            "{}",
            "null",
            "[1, 2]",
            "42",
            '"text"',
            '{"a": 1',
            "not json",
            '{"a": 1, "b": 2, "a": 3}',
            '{"n": 123456789012345678901234567890, "f": 1e400, "g": NaN, "h": -0.0, "i": 1E5}',
            '{"lone": "\\ud800"}',
            '{"pair": "\\ud83d\\ude80"}',
            ' {"spaced" : "\\u00e9\\/"} ',
        ]
    )


def value_of(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.choice([0, -1, 2**53 + 1, 2**63 - 1, 7])
    if kind == 2:
        return rng.choice([0.1, 1.0, -2.5e-7, 1e22])
    if kind < 6:
        return text(rng, rng.randrange(5))
    if kind == 6:
        return [value_of(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {text(rng, 1): value_of(rng, depth - 1) for _ in range(rng.randrange(3))}


def _tools(rng: random.Random) -> list[Body]:
    return [_tool(rng, index) for index in range(rng.randrange(1, 4))]


def _tool(rng: random.Random, index: int) -> Body:
    function: Body = {"name": f"tool_{index}"}
    optional: Body = {
        "description": rng.choice([None, "", text(rng, 6)]),
        "parameters": rng.choice([None, {}, schema(rng), schema(rng), schema(rng)]),
        "strict": rng.choice([None, True, False]),
        "returns": {"type": "string"},
        "defer_loading": rng.choice([None, True]),
    }
    for key in rng.sample(sorted(optional), rng.randrange(len(optional))):
        function[key] = optional[key]
    if rng.random() < 0.3:
        function["name"] = function.pop("name")  # last instead of first
    tool: Body = {"type": "function", "function": function}
    if rng.random() < 0.2:
        tool = {"function": function, "cache_control": {"type": "ephemeral"}}
    if rng.random() < 0.1:
        tool["defer_loading"] = rng.choice([True, False, None])
    return tool


def schema(rng: random.Random) -> Body:
    names = [f"p{index}" for index in range(rng.randrange(1, 4))]
    rng.shuffle(names)
    schema: Body = {
        "type": "object",
        "properties": {
            name: {
                "type": rng.choice(["string", "integer", ["string", "null"]]),
                "description": text(rng, 3),
                "default": value_of(rng, 1),
                "maximum": rng.choice([1, 1.0, 1e3, 2**63]),
            }
            for name in names
        },
        "required": names[:1],
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    }
    keys = rng.sample(sorted(schema), rng.randrange(1, len(schema) + 1))
    return {key: schema[key] for key in keys}


def _odd(rng: random.Random, message: Body) -> Body:
    """Change a message, now and then, into something rarer or something wrong."""
    if rng.random() < 0.975:
        return message
    rare: list[Body] = [
        {"name": "bob"},
        {"name": None},
        {"name": 5},
        {"id": "msg_1", "provider_specific_fields": {"a": 1}},
        {"annotations": [], "audio": None, "function_call": None, "refusal": None},
        {"task": "summarise"},
        {"content": None},
        {"content": 5},
        {"content": ["plain", "strings"]},
        {"content": [{"type": "text"}]},
        {"content": [{"text": "typeless"}]},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]},
        {"content": [{"type": "input_text", "text": "hi"}]},
        {"content": [{"type": "text", "text": "hi", "uuid": "u"}]},
        {"content": [{"type": "text", "text": "hi", "name": "n"}]},
        {"content": "x-anthropic-billing-header: cch=1;\nYou are an agent."},
        {"content": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}]},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ]
        },
        {"tool_calls": "wrong"},
        {"tool_call_id": None},
        {"tool_call_id": 7},
        {"reasoning": 5},
        {"role": 5},
        {"role": "robot"},
        {"author": {"role": "user"}, "recipient": "all"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    return message | rng.choice(rare)
