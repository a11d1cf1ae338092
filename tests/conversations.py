"""Generated conversations, each as a body of every API: what proofs of rendering have in common.

    for conversation in conversations(seed=1, count=100):
        conversation.chat()  conversation.messages()  conversation.responses()

Seeded: the same conversations for the same seed, however many are asked for. Mostly what agents
send (tools, parallel calls, thinking, reminders in between), with text that is hard on tokenizers;
some odd (null and empty content, images, roles that no template knows). `grown` cuts one after
each of its user's turns: the requests that an agent would have sent on the way.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.tokens import corpus

Body = dict[str, Any]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
_SPECIALS = (
    "<|start|> <|end|> <|message|> <|channel|>analysis <|call|> <|return|> <|start|>assistant "
    "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜DSML｜invoke ｜DSML｜ "
    "<｜latest_reminder｜> "
    "<|chan [INST] [/INST] </s> <s> [TOOL_CALLS] [THINK] [AVAILABLE_TOOLS] <|eot_id|> "
    "<|start_header_id|> "
    "<|user|> <|assistant|> <|observation|> [gMASK] <|tool_calls_section_begin|> <|im_middle|> "
    "]~b] [e~[ <minimax:tool_call> <function=f> {} {0} {content} %s \\n"
).split(" ")
_BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch=%05x;"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    description: str | None
    schema: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one role says; a `tool` turn is the result of the call `call_id`.

    texts: Its parts; None: null, or no content where an API has no null.
    """

    role: str
    texts: tuple[str, ...] | None
    thinking: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    num_images: int = 0


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said, in no API's shape.

    system: Parts of the first system message; None: there is none.
    is_plain: Content of one part is a string, not a list of parts.
    kwargs: `chat_template_kwargs`.
    """

    system: tuple[str, ...] | None
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    effort: str | None = None
    kwargs: dict[str, Any] | None = None
    tool_choice: str | None = None
    is_plain: bool = True

    def chat(self) -> Body:
        """Build a body for `/v1/chat/completions`."""
        messages: list[Body] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self._content(self.system, "text")})
        messages += [self._chat_message(turn) for turn in self.turns]
        body: Body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.schema,
                    },
                }
                for tool in self.tools
            ]
        return body | self._options("reasoning_effort", self.effort)

    def messages(self) -> Body:
        """Build a body for `/v1/messages`: results and what follows them are one user's message."""
        messages: list[Body] = []
        for turn in self.turns:
            role = "user" if turn.role == "tool" else turn.role
            blocks = self._blocks(turn)
            if role == "user" and messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += blocks
            else:
                messages.append({"role": role, "content": blocks})
        for message in messages:
            blocks = message["content"]
            if self.is_plain and len(blocks) == 1 and blocks[0].keys() == {"type", "text"}:
                message["content"] = blocks[0]["text"]
        body: Body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        if self.system is not None:
            body["system"] = self._content(self.system, "text")
        if self.tools:
            body["tools"] = [
                {"name": tool.name, "input_schema": tool.schema}
                | ({"description": tool.description} if tool.description is not None else {})
                for tool in self.tools
            ]
        if self.effort not in (None, "none", "minimal"):
            body["output_config"] = {"effort": self.effort}
        if self.tool_choice is not None:
            kinds = {"required": "any"}
            body["tool_choice"] = {"type": kinds.get(self.tool_choice, self.tool_choice)}
        return body | ({"chat_template_kwargs": self.kwargs} if self.kwargs is not None else {})

    def responses(self) -> Body:
        """Build a body for `/v1/responses`, with all of the input as items."""
        items: list[Body] = []
        for number, turn in enumerate(self.turns):
            items += self._items(turn, number)
        body: Body = {"model": "tiny", "input": items, "max_output_tokens": 1, "store": False}
        if self.system is not None:
            body["instructions"] = "\n".join(self.system)
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.schema,
                    "strict": False,
                }
                for tool in self.tools
            ]
        effort = {"effort": self.effort} if self.effort is not None else None
        return body | self._options("reasoning", effort)

    def _options(self, effort_field: str, effort: Any) -> Body:
        found = {
            effort_field: effort,
            "chat_template_kwargs": self.kwargs,
            "tool_choice": self.tool_choice,
        }
        return {field: value for field, value in found.items() if value is not None}

    def _content(self, texts: tuple[str, ...], kind: str) -> str | list[Body]:
        if self.is_plain and len(texts) == 1:
            return texts[0]
        return [{"type": kind, "text": each} for each in texts]

    def _chat_message(self, turn: Turn) -> Body:
        message: Body = {"role": turn.role}
        if turn.num_images:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
            parts = [{"type": "text", "text": each} for each in turn.texts or ()]
            message["content"] = parts + [image] * turn.num_images
        else:
            message["content"] = None if turn.texts is None else self._content(turn.texts, "text")
        if turn.role == "tool":
            message["tool_call_id"] = turn.call_id
        if turn.thinking is not None:
            message["reasoning"] = turn.thinking
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call in turn.calls
            ]
        return message

    def _blocks(self, turn: Turn) -> list[Body]:
        texts: list[Body] = [{"type": "text", "text": each} for each in turn.texts or ()]
        image = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
        }
        texts += [image] * turn.num_images
        if turn.role == "tool":
            content: Any = texts
            if self.is_plain and len(texts) == 1:
                content = turn.texts[0] if turn.texts else ""
            result: Body = {"type": "tool_result", "tool_use_id": turn.call_id}
            return [result | ({"content": content} if turn.texts is not None else {})]
        thinking: list[Body] = []
        if turn.thinking is not None:
            thinking = [{"type": "thinking", "thinking": turn.thinking, "signature": "c2ln"}]
        return [
            *thinking,
            *texts,
            *(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
                for call in turn.calls
            ),
        ]

    def _items(self, turn: Turn, number: int) -> list[Body]:
        if turn.role == "tool":
            output = "\n".join(turn.texts or ())
            return [{"type": "function_call_output", "call_id": turn.call_id, "output": output}]
        items: list[Body] = []
        if turn.thinking is not None:
            items.append(
                {
                    "type": "reasoning",
                    "id": f"rs_{number}",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": turn.thinking}],
                }
            )
        if turn.texts is not None or turn.num_images:
            items.append(self._message_item(turn, number))
        items += [
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
                "status": "completed",
            }
            for call in turn.calls
        ]
        return items

    def _message_item(self, turn: Turn, number: int) -> Body:
        texts = turn.texts or ()
        if turn.role == "assistant":
            return {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": each, "annotations": []} for each in texts
                ],
            }
        content = self._content(texts, "input_text")
        if turn.num_images:
            image = {
                "type": "input_image",
                "image_url": f"data:image/png;base64,{PIXEL}",
                "detail": "auto",
            }
            parts = [{"type": "input_text", "text": each} for each in texts]
            content = parts + [image] * turn.num_images
        return {"type": "message", "role": turn.role, "content": content}


def text(rng: random.Random, num_words: int) -> str:
    """Make up a text as the corpus does, at times with what other families' templates print."""
    made = corpus.text(rng, num_words)
    if rng.random() < 0.9:
        return made
    position = rng.randrange(len(made) + 1)
    return made[:position] + rng.choice(_SPECIALS) + made[position:]


def conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Yield conversations; a tenth of them have something that few clients send."""
    rng = random.Random(seed)
    for _ in range(count):
        found = _conversation(rng)
        is_odd, fate = rng.random() < 0.1, rng.random()
        yield _odd(found, random.Random(fate)) if is_odd else found


def grown(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation after each turn of its user and each batch of results, the last whole.

    Like an agent's requests: each begins as the one before, if the template lets it.
    """
    turns = conversation.turns
    for end in range(1, len(turns)):
        if turns[end].role == "assistant" and turns[end - 1].role != "assistant":
            yield replace(conversation, turns=turns[:end])
    yield conversation


def _conversation(rng: random.Random) -> Conversation:
    """Make one up; a part of them so simple that every family's template takes it."""
    is_simple = rng.random() < 0.4
    make_tool = _simple_tool if is_simple else _tool
    tools = tuple(make_tool(rng, index) for index in range(rng.choice((0, 0, 1, 2, 3))))
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 5))):
        if turns and not is_simple and rng.random() < 0.12:
            turns.append(_reminder(rng))
        turns.append(Turn(role="user", texts=_texts(rng, 15)))
        while rng.random() < (0.65 if tools else 0.35):
            count = rng.choice((1, 1, 2, 3)) if tools and rng.random() < 0.8 else 0
            count = min(count, 1) if is_simple else count
            calls = tuple(_call(rng, tools, f"call_{len(turns)}_{index}") for index in range(count))
            turns.append(_answer(rng, calls))
            turns += _results(rng, calls)
            if calls and not is_simple and rng.random() < 0.05:
                turns.append(_reminder(rng))
            if not calls:
                break
        if turns[-1].role != "assistant" and rng.random() < 0.7:
            turns.append(_answer(rng, ()))
    if turns[-1].role == "assistant" and rng.random() < 0.9:
        turns.append(Turn(role="user", texts=_texts(rng, 8)))
    return Conversation(
        system=_system(rng),
        turns=tuple(turns),
        tools=tools,
        effort=rng.choice(EFFORTS) if rng.random() < 0.3 else None,
        kwargs=_kwargs(rng) if rng.random() < 0.3 else None,
        tool_choice=rng.choice(("auto", "none")) if tools and rng.random() < 0.3 else None,
        is_plain=rng.random() < 0.7,
    )


def _reminder(rng: random.Random) -> Turn:
    reminder = f"<system-reminder>\n{text(rng, 6)}\n</system-reminder>"
    return Turn(role="system", texts=(reminder,))


def _system(rng: random.Random) -> tuple[str, ...] | None:
    if rng.random() < 0.2:
        return None
    texts = tuple(text(rng, rng.randrange(1, 20)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    if rng.random() < 0.15:
        return (_BILLING % rng.randrange(1 << 20), *texts)
    return texts


def _kwargs(rng: random.Random) -> dict[str, Any]:
    options = {
        "enable_thinking": rng.random() < 0.5,
        "thinking": rng.random() < 0.5,
        "drop_thinking": rng.random() < 0.5,
        "clear_thinking": rng.random() < 0.5,
        "preserve_thinking": rng.random() < 0.5,
        "builtin_tools": [],
    }
    return {key: options[key] for key in rng.sample(sorted(options), rng.randrange(1, 3))}


def _texts(rng: random.Random, num_words: int) -> tuple[str, ...]:
    return tuple(text(rng, rng.randrange(1, num_words)) for _ in range(rng.choice((1, 1, 1, 2))))


def _answer(rng: random.Random, calls: tuple[Call, ...]) -> Turn:
    texts: tuple[str, ...] | None = (text(rng, rng.randrange(1, 15)),)
    if calls and rng.random() < 0.5:
        texts = rng.choice((None, None, ("",)))
    thinking = text(rng, rng.randrange(1, 10)) if rng.random() < 0.5 else None
    return Turn(role="assistant", texts=texts, thinking=thinking, calls=calls)


def _results(rng: random.Random, calls: tuple[Call, ...]) -> list[Turn]:
    results = [
        Turn(role="tool", texts=(text(rng, rng.randrange(25)),), call_id=call.id) for call in calls
    ]
    if rng.random() < 0.15:
        rng.shuffle(results)
    return results


def _call(rng: random.Random, tools: tuple[Tool, ...], call_id: str) -> Call:
    arguments = {f"p{rng.randrange(4)}": _value(rng, 2) for _ in range(rng.randrange(4))}
    return Call(id=call_id, name=rng.choice(tools).name, arguments=arguments)


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice((True, False, None, 0, -1, 7, 2**53 + 1, 0.1, 1.0, -2.5e-7))
    if kind < 5:
        return text(rng, rng.randrange(6))
    if kind == 5:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {text(rng, 1): _value(rng, depth - 1) for _ in range(rng.randrange(3))}


def _tool(rng: random.Random, index: int) -> Tool:
    return Tool(
        name=f"tool_{index}",
        description=rng.choice((None, "", text(rng, 6), f"{text(rng, 4)}\n{text(rng, 4)}")),
        schema=_schema(rng, 2),
    )


def _simple_tool(rng: random.Random, index: int) -> Tool:
    kinds = ("string", "integer", "number", "boolean")
    properties = {
        f"p{number}": {"type": rng.choice(kinds), "description": text(rng, 4)}
        for number in range(rng.randrange(1, 4))
    }
    schema = {"type": "object", "properties": properties, "required": ["p0"]}
    return Tool(name=f"tool_{index}", description=text(rng, 6), schema=schema)


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    names = [f"p{index}" for index in range(rng.randrange(5))]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _property(rng, depth) for name in names},
    }
    if rng.random() < 0.5:
        schema["required"] = rng.sample(names, rng.randrange(len(names) + 1))
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    if rng.random() < 0.2:
        schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return schema


def _property(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(("string", "integer", "number", "boolean", "array", "object", "any", "enum"))
    found: dict[str, Any] = {} if kind in ("any", "enum") else {"type": kind}
    if kind == "enum":
        found = {"type": "string", "enum": [text(rng, 1), "b"]}
    elif kind == "any":
        variants = [{"type": "string"}, {"type": rng.choice(("null", "number"))}]
        found = {rng.choice(("anyOf", "oneOf")): variants}
    elif kind == "array":
        found["items"] = _property(rng, depth - 1) if depth else {"type": "string"}
    elif kind == "object" and depth:
        found |= _schema(rng, depth - 1)
    elif kind == "string" and rng.random() < 0.2:
        found["type"] = ["string", "null"]
    optional: dict[str, Any] = {
        "description": text(rng, 4),
        "default": _value(rng, 1),
        "title": "P",
        "examples": [_value(rng, 0)],
        "nullable": True,
        "maximum": 10,
    }
    for key in rng.sample(sorted(optional), rng.choice((0, 1, 1, 2, 4))):
        found[key] = optional[key]
    return found


def _odd(conversation: Conversation, rng: random.Random) -> Conversation:
    """Change something into what few clients send."""
    turns = list(conversation.turns)
    position = rng.randrange(len(turns))
    turn = turns[position]
    kind = rng.randrange(10)
    if kind == 0:
        users = [index for index, each in enumerate(turns) if each.role == "user"]
        position = rng.choice(users)
        turns[position] = replace(turns[position], num_images=rng.randrange(1, 3))
    elif kind == 1:
        turns[position] = replace(turn, texts=None)
    elif kind == 2:
        turns[position] = replace(turn, texts=("",))
    elif kind == 3:
        turns[position] = replace(turn, texts=())
    elif kind == 4:
        role = rng.choice(("critic", "developer", "system", "function", "latest_reminder"))
        turns.insert(position, Turn(role=role, texts=(text(rng, 4),)))
    elif kind == 5:
        turns.insert(0, Turn(role="developer", texts=_texts(rng, 6)))
    elif kind == 6:  # a call whose result never came, or a result that nothing asked for
        tools = [index for index, each in enumerate(turns) if each.role == "tool"]
        if tools:
            del turns[rng.choice(tools)]
        else:
            turns.insert(position, Turn(role="tool", texts=("?",), call_id="call_9"))
    elif kind == 7:
        turns.append(Turn(role="assistant", texts=(text(rng, 4),)))
    elif kind == 8:
        turns[position] = replace(turn, texts=("", text(rng, 3), ""))
    else:
        turns.append(Turn(role="system", texts=(text(rng, 3),)))
    return replace(conversation, turns=tuple(turns))
