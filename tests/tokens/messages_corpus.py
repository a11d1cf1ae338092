"""Bodies of `/v1/messages` to compare with a real engine: seeded, mostly ordinary, some odd.

As `corpus`, whose texts they are made of. What an agent sends: system blocks with a billing header,
reminders between messages, parallel calls with results in any order, thinking, images.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.tokens.corpus import Body, schema, text, value_of

_BILLING = "x-anthropic-billing-header: cc_version=2.1.139; cch=00000;"
_EPHEMERAL = {"type": "ephemeral"}
_IMAGE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def messages_bodies(seed: int, count: int) -> Iterator[Body]:
    """Yield bodies of `/v1/messages`."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _body(rng)


def _body(rng: random.Random) -> Body:
    names = [f"tool_{index}" for index in range(rng.randrange(1, 4))]
    body: Body = {"model": "tiny", "max_tokens": 2048, "messages": _messages(rng, names)}
    if rng.random() < 0.7:
        body["system"] = _system(rng)
    if rng.random() < 0.6:
        body["tools"] = [_tool(rng, name) for name in names]
        if rng.random() < 0.3:
            kind = rng.choice(["auto", "any", "none", "tool", "tool"])
            body["tool_choice"] = {"type": kind} | ({"name": names[0]} if kind == "tool" else {})
    elif rng.random() < 0.05:
        body["tools"] = rng.choice([[], None])
    if rng.random() < 0.3:
        body["thinking"] = rng.choice(
            [
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "disabled"},
                {"type": "disabled"},
                {"type": "adaptive"},
                {"type": "adaptive", "display": "omitted"},
                None,
            ]
        )
    if rng.random() < 0.2:
        effort = rng.choice(["low", "medium", "high", "xhigh", "max", None])
        body["output_config"] = {"effort": effort}
    if rng.random() < 0.1:
        options: Body = {"enable_thinking": False, "custom": [1, {"b": 2.0}], "dump": True}
        body["chat_template_kwargs"] = {key: options[key] for key in rng.sample(sorted(options), 2)}
    if rng.random() < 0.3:
        body |= {"metadata": {"user_id": "u_session_1"}, "stream": True, "stop_sequences": ["x"]}
    return _odd_body(rng, body)


def _system(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return rng.choice(["", f"{_BILLING}\n{text(rng, 8)}", text(rng, 12), text(rng, 12)])
    blocks = [_text(rng, 12) for _ in range(rng.randrange(4))]
    if rng.random() < 0.4:
        blocks.insert(0, {"type": "text", "text": f"{_BILLING}{text(rng, 2)}"})
    return blocks


def _text(rng: random.Random, num_words: int) -> Body:
    block: Body = {"type": "text", "text": text(rng, rng.randrange(num_words))}
    if rng.random() < 0.3:
        block["cache_control"] = _EPHEMERAL
    if rng.random() < 0.05:
        block["citations"] = None
    return block


def _messages(rng: random.Random, names: list[str]) -> list[Body]:
    messages: list[Body] = []
    for turn in range(rng.randrange(1, 5)):
        content: Any = text(rng, rng.randrange(15))
        if rng.random() < 0.5:
            content = [_text(rng, 15) for _ in range(rng.randrange(4))]
        messages.append({"role": "user", "content": content})
        while rng.random() < 0.6:
            ids = [f"toolu_{turn}_{index}" for index in range(rng.randrange(0, 4))]
            messages.append({"role": "assistant", "content": _assistant(rng, ids, names)})
            if ids:
                messages.append({"role": "user", "content": _results(rng, ids)})
        if rng.random() < 0.15:
            messages.append(_reminder(rng))
    if rng.random() < 0.1:
        messages.append({"role": "assistant", "content": text(rng, 4)})
    return [_odd(rng, message) for message in messages]


def _assistant(rng: random.Random, ids: list[str], names: list[str]) -> Any:
    blocks: list[Body] = []
    if rng.random() < 0.4:
        thought = rng.choice(["", text(rng, 8)])
        blocks.append({"type": "thinking", "thinking": thought, "signature": "c2ln"})
    if rng.random() < 0.05:
        blocks.append({"type": "redacted_thinking", "data": "ZGF0YQ=="})
    if rng.random() < 0.7:
        blocks.append(_text(rng, 15))
    for id in ids:
        given = {f"p{rng.randrange(5)}": value_of(rng, 2) for _ in range(rng.randrange(4))}
        name = rng.choice(names)
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": given})
        if rng.random() < 0.1:
            blocks.append(_text(rng, 5))
    return blocks


def _results(rng: random.Random, ids: list[str]) -> list[Body]:
    rng.shuffle(ids)
    blocks: list[Body] = []
    for id in ids:
        block: Body = {"type": "tool_result", "tool_use_id": id}
        kind = rng.randrange(8)
        if kind < 4:
            block["content"] = text(rng, rng.randrange(20))
        elif kind < 6:
            block["content"] = [_text(rng, 10) for _ in range(rng.randrange(3))]
        elif kind == 6:
            block["content"] = None
        if rng.random() < 0.2:
            block["is_error"] = rng.random() < 0.5
        if rng.random() < 0.2:
            block["cache_control"] = _EPHEMERAL
        blocks.append(block)
    if rng.random() < 0.3:
        blocks.insert(rng.randrange(len(blocks) + 1), _text(rng, 8))
    return blocks


def _reminder(rng: random.Random) -> Body:
    texts = [_text(rng, 6) for _ in range(rng.randrange(3))]
    content = [text(rng, 6), texts, [{"type": "text", "text": _BILLING}, *texts], _BILLING, ""]
    return {"role": "system", "content": rng.choice(content)}


def _tool(rng: random.Random, name: str) -> Body:
    tool: Body = {"name": name, "input_schema": rng.choice([{}, *(schema(rng) for _ in range(3))])}
    optional: Body = {
        "description": rng.choice([None, "", text(rng, 6)]),
        "strict": rng.choice([None, True, False]),
        "defer_loading": rng.choice([None, True, False]),
        "cache_control": _EPHEMERAL,
        "type": "custom",
    }
    for key in rng.sample(sorted(optional), rng.randrange(4)):
        tool[key] = optional[key]
    return tool


def _odd_body(rng: random.Random, body: Body) -> Body:
    """Change a body, now and then, into something rarer or something wrong."""
    if rng.random() < 0.93:
        return body
    rare: list[Body] = [
        {"system": [{"type": "image", "source": _IMAGE}, {"type": "text", "text": "s"}]},
        {"system": [{"type": "document", "text": "s"}]},
        {"system": 5},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "system", "content": "only"}]},
        {"thinking": {"type": "enabled", "budget_tokens": 10}},
        {"thinking": {"type": "sometimes"}},
        {"output_config": {"effort": "none"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
        {"tools": [{"name": "a", "input_schema": {"n": 2**70}}]},
        {"tools": [{"name": "a", "input_schema": {}}, {"name": "a", "input_schema": {"x": 1}}]},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": "auto"},
        {"tool_choice": {"type": "none"}},
        {"chat_template_kwargs": []},
        {"max_tokens": 1},
        _changed(rng),
        _changed(rng),
        _changed(rng),
        _changed(rng),
    ]
    return body | rng.choice(rare)


def _changed(rng: random.Random) -> Body:
    """Make a conversation that adds tools and removes them."""
    tools = [_tool(rng, f"tool_{index}") for index in range(3)]
    changes = [
        rng.choice(
            [
                {"type": kind, "tool": {"type": "tool_reference", "name": f"tool_{number}"}}
                for kind in ("tool_addition", "tool_removal")
                for number in range(3)
            ]
            + [
                {
                    "type": "tool_addition",
                    "tool": {"type": "tool_definition", "definition": _tool(rng, f"tool_{number}")},
                }
                for number in range(5)
            ]
        )
        for _ in range(rng.randrange(1, 5))
    ]
    role = rng.choice(["system", "system", "system", "user"])
    messages = [
        {"role": "user", "content": text(rng, 5)},
        {"role": role, "content": [*changes, _text(rng, 4)]},
        {"role": "user", "content": text(rng, 5)},
    ]
    return {"messages": messages, "tools": rng.choice([None, tools, tools, tools])}


def _odd(rng: random.Random, message: Body) -> Body:
    """Change a message, now and then, into something rarer or something wrong."""
    if rng.random() < 0.97:
        return message
    blocks: list[Any] = [
        {"type": "image", "source": _IMAGE},
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a.png"}},
        {"type": "image"},
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "search_result", "content": []},
        {"type": "tool_use", "name": "tool_0", "input": {}},
        {"type": "tool_use", "id": "t", "name": None, "input": None},
        {"type": "tool_use", "id": "t", "name": "tool_0", "input": {"n": 2**70, "f": 1e300}},
        {"type": "tool_use", "id": "t", "name": "tool_0", "input": {"a": "é\u2028\x7f", "f": 1e16}},
        {"type": "tool_use", "id": "t", "name": "tool_0", "input": "{}"},
        {"type": "tool_result", "content": [{"type": "text"}, {"type": "text", "text": "b"}]},
        {"type": "tool_result", "content": [{"type": "text", "text": None}]},
        {"type": "tool_result", "content": [{"type": "document", "x": 1}, {"text": "no type"}]},
        {"type": "tool_result", "content": [{"type": "image", "source": _IMAGE}]},
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url"}}]},
        {"type": "tool_result", "content": [{"type": "tool_reference", "tool_name": "tool_0"}]},
        {"type": "tool_result", "content": ["text"]},
        {"type": "tool_result", "tool_use_id": "t", "content": ""},
        {"type": "tool_reference", "tool_name": "tool_0"},
        {"type": "thinking", "thinking": None},
        {"type": "thinking", "thinking": "hm", "tool": {"type": "tool_reference"}},
        {"type": "text", "text": None},
        {"type": "text", "text": 5},
        {"type": "text"},
        {"type": "text", "text": "t", "name": 5},
        {"text": "typeless"},
        "a string",
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "tool_0"}},
    ]
    block = rng.choice(blocks)
    rare: list[Body] = [
        {"content": [block]},
        {"content": [{"type": "text", "text": "before"}, block]},
        {"content": [block, {"type": "text", "text": "behind"}]},
        {"content": [block]},
        {"content": [{"type": "text", "text": "before"}, block]},
        {"content": [block, {"type": "text", "text": "behind"}]},
        {"content": None},
        {"content": 5},
        {"role": "tool"},
        {"role": "developer"},
        {"role": None},
        {"role": "assistant"},
        {"role": "user"},
        {"role": "system"},
        {"name": "bob"},
    ]
    return message | rng.choice(rare)
