"""A request of the Responses API as a chat: what vLLM makes of it before it renders the prompt.

Never an error: whatever is not certain to become the engine's own prompt is `engine_only`, and the
engine answers it in its own words. Where the engine refuses a request, what is made of it here is
of no account. Source: vLLM 0.32.0, entrypoints/openai/responses/protocol.py (input_item_parsing,
build_chat_params, build_tok_params), responses/utils.py (construct_input_messages,
should_continue_final_message), tool_parsers/utils.py (get_function_tools).

    item                                  becomes
    message, of user, system, developer   a message; its input_text parts are text parts,
                                          its input_image parts are images
    message, of the assistant             content of the assistant's message; the first part alone
    reasoning                             its reasoning: of the content, else of the summary
    function_call, custom_tool_call       one of its calls; `namespace` and `__` before the name
    function_call_output, custom_…        a tool's message
    any other                             unknown here

What belongs to the assistant is added to the message before, if that is the assistant's and has
none of it yet. The prompt begins with the tokenizer's special tokens, unlike a chat's.

The ids of responses: where a request names one, and where an answer brings one.

Source: vLLM 0.32.0, entrypoints/openai/responses/api_router.py and serving.py (a stream begins with
`response.created`, a whole answer with its `id`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from router.api.anthropic import BILLING_HEADER
from router.api.engine_bodies import tokenize_chat
from router.api.openai import ChatRequest, Json
from router.api.routes import RESPONSE_PATH
from router.base.errors import BadRequest

_Message = dict[str, Any]

_IMAGES: Final = "images"
_OPEN: Final = ("in_progress", "incomplete")
_TRUE: Final = ("true", "1", "yes", "y", "on", "t")
_CUSTOM_PARAMETERS: Final[Json] = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of the function that a custom tool is shown as."""

_STATEFUL: Final = ("previous_response_id", "prompt")
_MEDIA: Final = ("mm_processor_kwargs", "media_io_kwargs")


class _Unknown(Exception):
    """The engine may make something else of it. `reason` is one of a few words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_responses(body: Json) -> ChatRequest:
    """View a decoded body as the chat that the engine makes of it."""
    try:
        continues = _continues(body.get("input"))
        messages = _messages(body)
        tools = _tools(body.get("tools", []))
        effort = _effort(body.get("reasoning"))
        arguments = _typed(body.get("chat_template_kwargs"), dict, "chat_template_kwargs")
    except _Unknown as exc:
        return replace(_frame(body), engine_only=exc.reason)
    return replace(
        _frame(body),
        messages=messages,
        tools=tools,
        reasoning_effort=effort,
        chat_template_kwargs=arguments,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        responses_body=body,
        engine_only=_engine_only(body),
    )


def tokenize_responses(body: Json) -> dict[str, Any]:
    """Build the body for an engine's `/tokenize` that yields the tokens of this request.

    Raises:
        BadRequest: that route might make others of it: of calls (it puts their fields in another
            order), of null arguments, of what is cut.
    """
    chat = parse_responses(body)
    arguments = chat.chat_template_kwargs or {}
    if (
        chat.engine_only is not None
        or chat.truncates
        or any("tool_calls" in message for message in chat.messages)
        or any(value in (None, "auto") for value in arguments.values())
    ):
        raise BadRequest("its tokens are the Responses route's own")
    return {
        **tokenize_chat(chat),
        "add_special_tokens": chat.add_special_tokens,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
    }


def _frame(body: Json) -> ChatRequest:
    """View all but the prompt; what the engine will refuse is left out."""
    max_tokens = body.get("max_output_tokens")
    stream = body.get("stream")
    return ChatRequest(
        model=_str_or_none(body.get("model")),
        messages=(),
        tool_choice=_str_or_none(body.get("tool_choice")),
        add_special_tokens=True,
        cache_salt=_str_or_none(body.get("cache_salt")),
        max_tokens=max_tokens if type(max_tokens) is int else None,
        stream=isinstance(stream, str | int) and str(stream).lower() in _TRUE,
        renders_as="responses",
        truncates=body.get("truncation", "disabled") != "disabled",
    )


def _engine_only(body: Json) -> str | None:
    """Name the first field with which only the engine can make the prompt."""
    for field in (*_STATEFUL, *_MEDIA):
        if body.get(field) is not None:
            return field
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        return "kv_transfer_params.prompt_token_ids"
    return None


# -- messages ------------------------------------------------------------------------------------


def _messages(body: Json) -> list[_Message]:
    instructions = _typed(body.get("instructions"), str, "instructions")
    messages: list[_Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add_item(messages, item)
    if not messages:
        raise _Unknown("input")
    return messages


def _add_item(messages: list[_Message], item: Any) -> None:
    if type(item) is not dict:
        raise _Unknown("input")
    kind = item.get("type", "message")
    add = _ITEMS.get(kind) if type(kind) is str else None
    if add is None:
        raise _Unknown("item")
    add(messages, item)


def _add_message(messages: list[_Message], item: Json) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        _add_to_assistant(messages, "content", _text_of_assistant(item, content))
        return
    if role not in ("user", "system", "developer"):
        raise _Unknown("item")
    if item.get("tools") is not None and role == "developer":
        raise _Unknown("item")
    message: _Message = {"role": role, "content": _content(content)}
    if role == "system" and type(content) is list and _has_billing_header(message["content"]):
        raise _Unknown("part")  # of text parts the engine drops it; of these it does not
    for key in ("name", "task"):
        if type(item.get(key)) is str:
            message[key] = item[key]
    messages.append(message)


def _text_of_assistant(item: Json, content: Any) -> str:
    if type(content) is str:
        return content
    if type(content) is not list or not content:
        raise _Unknown("item")
    first = content[0]
    kind = first.get("type") if type(first) is dict else None
    if kind == "input_text":
        return _text(first)
    if kind != "output_text" or "type" not in item or not all(map(_is_output, content)):
        raise _Unknown("part")
    return _text(first)


def _is_output(part: Any) -> bool:
    """Return whether a part is surely what the assistant said.

    The engine takes annotations and log probabilities that are wrong for something else.
    """
    return (
        type(part) is dict
        and type(part.get("text", part.get("refusal"))) is str
        and part.get("annotations", []) == []
        and not part.get("logprobs")
    )


def _add_reasoning(messages: list[_Message], item: Json) -> None:
    if item.get("encrypted_content"):
        raise _Unknown("encrypted_content")
    if "role" in item:
        raise _Unknown("item")
    given = item.get("content") or item.get("summary")
    if type(given) is not list:
        raise _Unknown("item")
    reasoning = _text(given[0]) if given else ""
    _add_to_assistant(messages, "reasoning", reasoning)


def _add_to_assistant(messages: list[_Message], key: str, value: str) -> None:
    """Add content or reasoning to the assistant's last message, else make it a new one's."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and key not in last:
        last[key] = value
    else:
        messages.append({"role": "assistant", key: value})


def _add_function_call(messages: list[_Message], item: Json) -> None:
    name, arguments = _str(item, "name"), _str(item, "arguments")
    namespace = _typed(item.get("namespace"), str, "item")
    if namespace:
        name = f"{namespace}__{name}"
    _add_call(messages, _str(item, "call_id"), name, arguments)


def _add_custom_call(messages: list[_Message], item: Json) -> None:
    arguments = json.dumps({"input": _str(item, "input")}, ensure_ascii=False)
    _add_call(messages, _str(item, "call_id"), _str(item, "name"), arguments)


def _add_call(messages: list[_Message], call_id: str, name: str, arguments: str) -> None:
    call = {
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant":
        last.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _add_output(messages: list[_Message], item: Json) -> None:
    call_id = _typed(item.get("call_id"), str, "item")
    output = _content(item.get("output"))
    messages.append({"role": "tool", "content": output, "tool_call_id": call_id})


_ITEMS: Final[Mapping[str, Callable[[list[_Message], Json], None]]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_function_call,
    "custom_tool_call": _add_custom_call,
    "function_call_output": _add_output,
    "custom_tool_call_output": _add_output,
}


def _content(content: Any) -> str | list[_Message]:
    if type(content) is str:
        return content
    if type(content) is not list:
        raise _Unknown("item")
    return [_part(part) for part in content]


def _part(part: Any) -> _Message:
    kind = part.get("type") if type(part) is dict else None
    if kind == "input_image":
        return _image(part)
    if kind != "input_text":
        raise _Unknown("part")
    converted = {"type": "text", "text": _text(part)}
    if len(part) > 2:
        known = ("type", "text", "prompt_cache_breakpoint")
        converted.update((key, value) for key, value in part.items() if key not in known)
    return converted


def _image(part: Json) -> _Message:
    """Convert an image that came with its address or as a `data:` URL, not as a file's id."""
    url = part.get("image_url")
    if type(url) is not str or part.get("file_id") is not None or "uuid" in part:
        raise _Unknown(_IMAGES)
    known = ("type", "image_url", "file_id", "prompt_cache_breakpoint")
    more = {key: value for key, value in part.items() if key not in known}
    return {"type": "image_url", "image_url": {"url": url}, **more}


def _text(part: Any) -> str:
    text = part.get("text") if type(part) is dict else None
    if type(text) is not str:
        raise _Unknown("part")
    return text


def _has_billing_header(parts: list[_Message]) -> bool:
    return any(part.get("text", "").startswith(BILLING_HEADER) for part in parts)


def _continues(given: Any) -> bool:
    """Return whether the answer goes on with the last message."""
    last = given[-1] if isinstance(given, list) and given else None
    return (
        type(last) is dict
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in _OPEN
    )


# -- tools ---------------------------------------------------------------------------------------


def _tools(tools: Any) -> list[Json] | None:
    """List the functions that the model is shown; None: no tools were sent."""
    if type(tools) is not list:
        raise _Unknown("tools")
    shown: list[Json] = []
    for tool in tools:
        kind = tool.get("type") if type(tool) is dict else None
        if kind == "function":
            shown.append(_function(tool, _str(tool, "name")))
        elif kind == "custom":
            shown.append(_function({**tool, "parameters": _CUSTOM_PARAMETERS}, _str(tool, "name")))
        elif kind == "namespace":
            shown += _namespace(tool)
        elif type(kind) is not str:
            raise _Unknown("tools")
    return shown if tools else None


def _namespace(tool: Json) -> list[Json]:
    name, inner = _str(tool, "name"), tool.get("tools")
    if type(inner) is not list or not all(type(each) is dict for each in inner):
        raise _Unknown("tools")
    return [
        _function(each, f"{name}__{_str(each, 'name')}")
        for each in inner
        if each.get("type") == "function"
    ]


def _function(tool: Json, name: str) -> Json:
    function = {"name": name}
    is_function = tool.get("type") == "function"
    fields = ("description", "parameters", "strict", "defer_loading")[: 4 if is_function else 2]
    function.update((key, tool[key]) for key in fields if tool.get(key) is not None)
    return {"type": "function", "function": function}


# -- fields --------------------------------------------------------------------------------------


def _effort(reasoning: Any) -> str | None:
    reasoning = _typed(reasoning, dict, "reasoning")
    return _typed(reasoning.get("effort"), str, "reasoning") if reasoning else None


def _typed(value: Any, kind: type, reason: str) -> Any:
    if value is not None and type(value) is not kind:
        raise _Unknown(reason)
    return value


def _str(item: Json, key: str) -> str:
    value = item.get(key)
    if type(value) is not str:
        raise _Unknown("item")
    return value


def _str_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_HEAD_BYTES: Final = 4096
_ID: Final = rb'"id"\s*:\s*"([A-Za-z0-9_-]{1,128})"'
_IN_BODY: Final = re.compile(rb"\s*\{\s*" + _ID)
_IN_EVENT: Final = re.compile(rb'"response"\s*:\s*\{\s*' + _ID)
_NAMED: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

CREATE: Final = "/v1/responses"


def named_in(path: str, body: Mapping[str, Any] | None) -> str | None:
    """Find the id of the response that a request is about, or goes on from."""
    found = RESPONSE_PATH.fullmatch(path)
    if found is not None:
        return found[1]
    named = body.get("previous_response_id") if path == CREATE and body is not None else None
    return named if isinstance(named, str) and _NAMED.fullmatch(named) else None


def is_kept(body: Mapping[str, Any]) -> bool:
    """Return whether an engine may keep the response that it is asked for.

    An id that the client chose does not count: another client may have chosen the same.
    """
    return body.get("store", True) is not False and body.get("request_id") is None


def issued_in(beginning: bytes, *, is_event_stream: bool) -> str | None:
    """Find the id of the response that an answer begins."""
    head = beginning[:_HEAD_BYTES]
    found = _IN_EVENT.search(head) if is_event_stream else _IN_BODY.match(head)
    return found[1].decode() if found is not None else None
