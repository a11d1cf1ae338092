"""Requests of the Responses API to compare with a real engine: seeded, mostly ordinary, some odd.

As in corpus.py; an agent's items come in the order in which it sends them back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.tokens.corpus import Body, text

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", None)


def responses_bodies(seed: int, count: int) -> Iterator[Body]:
    """Yield bodies of the Responses API."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _body(rng)


def _body(rng: random.Random) -> Body:
    body: Body = {"model": "tiny", "input": _input(rng), "max_output_tokens": 1}
    if rng.random() < 0.5:
        body["instructions"] = rng.choice([None, "", text(rng, 12), text(rng, 12)])
    if rng.random() < 0.5:
        body["tools"] = [_tool(rng, index) for index in range(rng.randrange(4))]
        if rng.random() < 0.3:
            body["tool_choice"] = rng.choice(["auto", "none"])
    if rng.random() < 0.25:
        body["reasoning"] = rng.choice(
            [None, {}, {"effort": rng.choice(_EFFORTS)}, {"effort": "low", "summary": "auto"}]
        )
    if rng.random() < 0.2:
        options: Body = {
            "enable_thinking": rng.choice([True, False, None, "auto"]),
            "custom": rng.choice([1, 1.0, "x", None, [1, {"b": 2, "a": 1}], "auto"]),
            "add_generation_prompt": False,
            "reasoning_effort": "max",
        }
        body["chat_template_kwargs"] = {
            key: options[key] for key in rng.sample(sorted(options), rng.randrange(1, 4))
        }
    if rng.random() < 0.3:
        body |= rng.choice(
            [
                {"store": False, "include": ["reasoning.encrypted_content"]},
                {"parallel_tool_calls": False, "prompt_cache_key": "k"},
                {"truncation": "auto"},
                {"truncation": None},
                {"text": {"format": {"type": "text"}, "verbosity": "low"}},
                {"cache_salt": "s", "metadata": {"a": "b"}},
            ]
        )
    return body


def _input(rng: random.Random) -> Any:
    if rng.random() < 0.08:
        return text(rng, 12) or " "
    items: list[Any] = []
    if rng.random() < 0.3:
        items.append(_message(rng, rng.choice(["developer", "system"]), 10))
    for turn in range(rng.randrange(1, 4)):
        items.append(_message(rng, "user", 12))
        while rng.random() < 0.6:
            items += _step(rng, turn)
    if rng.random() < 0.1:
        items.append(_output_message(rng, rng.choice(["in_progress", "incomplete", "completed"])))
    if rng.random() < 0.08:
        items.insert(rng.randrange(len(items) + 1), _rare(rng))
    return items


def _step(rng: random.Random, turn: int) -> list[Any]:
    """Make one step of an agent: it thinks, says something, calls tools, gets their results."""
    items: list[Any] = []
    if rng.random() < 0.4:
        items.append(_reasoning(rng))
    if rng.random() < 0.5:
        items.append(_output_message(rng))
    call_ids = [f"call_{turn}_{index}" for index in range(rng.randrange(3))]
    items += [_call(rng, call_id) for call_id in call_ids]
    outputs = [_output(rng, call_id) for call_id in call_ids]
    if rng.random() < 0.1:
        rng.shuffle(items)
    return items + outputs


def _message(rng: random.Random, role: str, num_words: int) -> Body:
    message: Body = {"role": role, "content": _content(rng, num_words)}
    if rng.random() < 0.6:
        message = {"type": "message", **message}
    if rng.random() < 0.1:
        message |= rng.choice(
            [
                {"id": "msg_1"},
                {"status": "completed"},
                {"name": "bob"},
                {"task": "sum"},
                {"x": 1},
                {"phase": None},
            ]
        )
    return message


def _content(rng: random.Random, num_words: int) -> Any:
    if rng.random() < 0.5:
        return text(rng, rng.randrange(num_words))
    return [_part(rng, num_words) for _ in range(rng.randrange(4))]


def _part(rng: random.Random, num_words: int) -> Body:
    part: Body = {"type": "input_text", "text": text(rng, rng.randrange(num_words))}
    if rng.random() < 0.1:
        part = {"text": part["text"], "zeta": 1, "type": "input_text", "alpha": None}
    if rng.random() < 0.05:
        part["prompt_cache_breakpoint"] = {"mode": "explicit"}
    return part


def _output_message(rng: random.Random, status: str | None = None) -> Body:
    said = text(rng, rng.randrange(12))
    if rng.random() < 0.3:
        message: Body = {"role": "assistant", "content": said}
        if rng.random() < 0.5:
            message["type"] = "message"
    else:
        part: Body = {"type": "output_text", "text": said}
        if rng.random() < 0.5:
            part |= {"annotations": [], "logprobs": []}
        message = {"type": "message", "role": "assistant", "content": [part]}
        if rng.random() < 0.1:
            message["content"].append({"type": "output_text", "text": "never seen"})
        if rng.random() < 0.5:
            message |= {"id": "msg_2", "status": "completed"}
    if rng.random() < 0.1:
        message["phase"] = "commentary"
    if status is not None:
        message["status"] = status
    return message


def _reasoning(rng: random.Random) -> Body:
    item: Body = {"type": "reasoning", "summary": []}
    if rng.random() < 0.7:
        item["content"] = [{"type": "reasoning_text", "text": text(rng, rng.randrange(8))}]
    elif rng.random() < 0.7:
        item["summary"] = [{"type": "summary_text", "text": text(rng, 6)}]
    if rng.random() < 0.5:
        item |= {"id": "rs_1", "encrypted_content": None, "status": None}
    return item


def _call(rng: random.Random, call_id: str) -> Body:
    if rng.random() < 0.2:
        return {
            "type": "custom_tool_call",
            "call_id": call_id,
            "name": f"tool_{rng.randrange(4)}",
            "input": text(rng, rng.randrange(6)),
            **rng.choice([{}, {"id": "ctc_1"}]),
        }
    values = {"path": text(rng, 2), "n": rng.choice([1, 2.5, None, True, [1, {"a": "ä"}]])}
    arguments = rng.choice(
        [json.dumps(values, ensure_ascii=rng.random() < 0.5), "", "{}", "[1]", '{"a": 1', "null"]
        + [json.dumps(values, indent=2)] * 4
    )
    item: Body = {
        "type": "function_call",
        "call_id": call_id,
        "name": f"tool_{rng.randrange(4)}",
        "arguments": arguments,
    }
    if rng.random() < 0.3:
        item["namespace"] = rng.choice(["mcp", "", None])
    if rng.random() < 0.5:
        item |= {"id": "fc_1", "status": "completed"}
    return item


def _output(rng: random.Random, call_id: str) -> Body:
    kind = rng.choice(["function_call_output"] * 4 + ["custom_tool_call_output"])
    item: Body = {"type": kind, "call_id": call_id, "output": _content(rng, 20)}
    if rng.random() < 0.2:
        item |= {"id": "fco_1", "status": "completed"}
    return item


def _tool(rng: random.Random, index: int) -> Body:
    function: Body = {"type": "function", "name": f"tool_{index}"}
    optional: Body = {
        "description": rng.choice([None, "", text(rng, 6)]),
        "parameters": rng.choice([None, {}, _schema(rng), _schema(rng)]),
        "strict": rng.choice([None, True, False]),
        "defer_loading": rng.choice([None, True, False]),
        "output_schema": {"type": "object"},
        "x": [1],
    }
    for key in rng.sample(sorted(optional), rng.randrange(len(optional))):
        function[key] = optional[key]
    custom = {"type": "custom", "name": f"free_{index}", "description": text(rng, 3)}
    kind = rng.random()
    if kind < 0.6:
        return function
    if kind < 0.75:
        return {
            "type": "namespace",
            "name": f"mcp_{index}",
            "description": text(rng, 2),
            "tools": [function, custom][: rng.randrange(3)],
        }
    if kind < 0.88:
        return custom | rng.choice([{}, {"format": {"type": "text"}}, {"defer_loading": True}])
    return rng.choice([{"type": "web_search"}, {"type": "local_shell"}, {"type": "custom"}])


def _schema(rng: random.Random) -> Body:
    properties = {f"p{i}": {"type": "string", "description": text(rng, 3)} for i in range(3)}
    schema: Body = {
        "type": "object",
        "properties": properties,
        "required": ["p1"],
        "additionalProperties": False,
        "minimum": rng.choice([1, 1.0, 2**63, -0.0]),
    }
    keys = rng.sample(sorted(schema), rng.randrange(1, len(schema) + 1))
    return {key: schema[key] for key in keys}


def _rare(rng: random.Random) -> Any:
    words = text(rng, 4)
    rare: list[Any] = [
        "no object",
        {"type": "unheard_of"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "item_reference", "id": "msg_1", "role": "user", "content": words},
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
        {"type": "reasoning", "summary": None},
        {"type": "reasoning", "id": None, "summary": []},
        {"type": None, "role": "user", "content": words},
        {"role": "tool", "content": words, "tool_call_id": "c"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "input_text", "text": words}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": words}]},
        {"type": "message", "role": "assistant", "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "n"}]},
        {"role": "user", "content": [{"type": "text", "text": words}]},
        {"role": "user", "content": [{"type": "input_text", "text": words, "uuid": "u"}]},
        {"role": "user", "content": [{"type": "input_text", "text": words, "name": "n"}]},
        {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nAn agent."},
        {
            "role": "system",
            "content": [{"type": "input_text", "text": "x-anthropic-billing-header: a\nAn agent."}],
        },
        {"role": "developer", "content": words, "tools": []},
        {"role": "developer", "content": words, "tools": [{"a": 1}]},
        {"role": "user", "content": words, "status": "in_progress"},
        {"role": "user", "content": words, "tool_calls": [], "reasoning": "r"},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": {"a": 1}},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": None, "output": words},
        {"type": "function_call_output", "output": words, "created_by": "m", "id": "i"},
        {"type": "custom_tool_call", "name": "f", "call_id": "c", "input": 'a\u2028"\\', "x": 1},
        {"type": "local_shell_call", "id": "a", "call_id": "c", "status": "completed"},
        {"role": "critic", "content": words},
    ]
    return rng.choice(rare)
