"""DeepSeek V4: from a conversation to the prompt's text.

Tool results become blocks of a user's message, in the order of their calls. Thinking of earlier
turns is dropped unless there are tools. Source: vLLM 0.32.0, tokenizers/deepseek_v4.py and
deepseek_v4_encoding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from router.tokens.content_format import ContentFormat
from router.tokens.conversation import Conversation
from router.tokens.deepseek import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    THINK,
    USER,
    DeepSeekRenderer,
    Message,
    Printers,
    calls_block,
    last_user,
    refused,
)

_REMINDER = "<｜latest_reminder｜>"
_CALLS = "tool_calls"
_TASKS = frozenset({"action", "query", "authority", "domain", "title", "read_url"})
_LOW_EFFORTS = frozenset({"low", "minimal", "medium"})
_KEPT_ROLES = frozenset({"user", "system", "tool", "latest_reminder", "direct_search_results"})

_HIGH: Final = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_MAX: Final = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)

TOOLS_END: Final = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)


def tools_head(prefix: str, block: str) -> str:
    """Write what stands before the tools: how they are called.

    Args:
        prefix: The renderer's `tag_prefix`.
        block: The name of the tag around calls.
    """
    calls, invoke, parameter = (f"{DSML}{prefix}{name}" for name in (block, "invoke", "parameter"))
    return f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{calls}>" block like the following:

<{calls}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{calls}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501


_TOOLS: Final = tools_head("", _CALLS)


class DeepSeekV4Renderer(DeepSeekRenderer):
    """Renders chat requests of DeepSeek V4."""

    content_format: ContentFormat = "openai"

    __slots__ = ()

    def encode(
        self,
        conversation: Conversation,
        tools: Sequence[Message] | None,
        arguments: dict[str, Any],
        printers: Printers,
    ) -> str:
        is_thinking, preface = _thinking(arguments)
        messages = merged(with_tools(conversation, tools))
        sort_results(messages)
        drops = bool(arguments.get("drop_thinking", True)) and not tools
        if is_thinking and drops:
            messages = _history_dropped(messages)
        user = last_user(messages)
        pieces = [BOS]
        for index, message in enumerate(messages):
            if index == 0 and is_thinking:
                pieces.append(preface)
            shows = is_thinking and (not drops or index > user)
            pieces.append(_message(messages, index, shows, printers))
            opens_thinking = is_thinking and (not drops or index >= user)
            following = messages[index + 1]["role"] if index + 1 < len(messages) else None
            if following in (None, "assistant", "latest_reminder"):
                pieces.append(_transition(message, following, is_thinking, opens_thinking))
        return "".join(pieces)


def wants_thinking(arguments: dict[str, Any]) -> bool:
    """Return whether a request has the model think; it does unless something is said of it."""
    if "thinking" not in arguments and "enable_thinking" not in arguments:
        return True
    return bool(arguments.get("thinking") or arguments.get("enable_thinking"))


def _thinking(arguments: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the model thinks, and the text about its effort."""
    is_thinking = wants_thinking(arguments)
    effort = arguments.get("reasoning_effort")
    if not isinstance(effort, str):
        return is_thinking, _HIGH
    if effort == "none":
        return False, ""
    if effort == "max":
        return is_thinking, _MAX
    return is_thinking, "" if effort in _LOW_EFFORTS else _HIGH


def with_tools(conversation: Conversation, tools: Sequence[Message] | None) -> list[Message]:
    """Attach the tools to the first system message, which is made if there is none."""
    messages = list(conversation)
    if tools:
        for index, message in enumerate(messages):
            if message["role"] == "system":
                messages[index] = {**message, "tools": tools}
                return messages
        messages.insert(0, {"role": "system", "tools": tools})
    return messages


def merged(messages: Sequence[Message]) -> list[Message]:
    """Join users' messages and tool results that follow one another into messages of blocks.

    A block is (whether it is a result, its call's id, text).
    """
    merged: list[Message] = []
    for message in messages:
        role = message["role"]
        if role not in ("tool", "user"):
            merged.append(message)
            continue
        before = merged[-1] if merged and merged[-1]["role"] == "user" else None
        if role == "tool":
            block = (True, message.get("tool_call_id", ""), message["content"])
            if before is not None:
                before["blocks"].append(block)
            else:
                merged.append({"role": "user", "blocks": [block]})
            continue
        block = (False, None, _text(message))
        if before is not None and before.get("task") is None:
            before["blocks"].append(block)
        else:
            merged.append({"role": "user", "blocks": [block], "task": message.get("task")})
    return merged


def sort_results(messages: list[Message]) -> None:
    """Put the results in each message into the order of the calls; in place."""
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            order = {}
            for index, call in enumerate(message["tool_calls"]):
                call_id = call.get("id") or call["function"].get("id", "")
                if call_id:
                    order[call_id] = index
        elif message["role"] == "user" and order:
            blocks = message["blocks"]
            results = [block for block in blocks if block[0]]
            if len(results) > 1:
                ordered = iter(sorted(results, key=lambda block: order.get(block[1], 0)))
                message["blocks"] = [next(ordered) if block[0] else block for block in blocks]


def _history_dropped(messages: list[Message]) -> list[Message]:
    """Leave out of the history what is no user's, no system's and no assistant's."""
    user = last_user(messages)
    return [
        message
        for index, message in enumerate(messages)
        if index >= user or message["role"] in _KEPT_ROLES or message["role"] == "assistant"
    ]


def _message(messages: list[Message], index: int, shows_thinking: bool, printers: Printers) -> str:
    message = messages[index]
    role = message["role"]
    if role == "user":
        return USER + print_blocks(message["blocks"])
    content = _text(message)
    if role == "assistant":
        thinking = ""
        is_task = index > 0 and messages[index - 1].get("task") is not None
        if shows_thinking and not is_task:
            thinking = (message.get("reasoning") or "") + END_THINK
        calls = message.get("tool_calls")
        block = calls_block(calls, _CALLS, printers) if calls else ""
        return f"{thinking}{content}{block}{EOS}"
    if role == "system":
        tools = message.get("tools")
        return content if not tools else f"{content}\n\n{_tools(tools, printers)}"
    if role == "latest_reminder":
        return _REMINDER + content
    if role == "developer":
        if not content:
            raise refused("developer message without content")
        return USER + content
    raise refused(f"role {role!r}")


def _transition(
    message: Message, following: str | None, is_thinking: bool, opens_thinking: bool
) -> str:
    """Write what opens an answer, behind the last message and before an assistant's."""
    role, task = message["role"], message.get("task")
    if task is not None:
        return print_task(task, is_thinking)
    opens = role in ("user", "developer") or (role == "system" and following != "latest_reminder")
    if not opens:
        return ""
    return ASSISTANT + (THINK if opens_thinking else END_THINK)


def print_blocks(blocks: Sequence[tuple[bool, str | None, str]]) -> str:
    """Write a user's blocks, as `merged` made them."""
    return "\n\n".join(
        [
            f"<tool_result>{text}</tool_result>" if is_result else text
            for is_result, _, text in blocks
        ]
    )


def print_task(task: str, is_thinking: bool) -> str:
    """Write what asks for a task.

    Raises:
        TemplateFailed: there is no such task.
    """
    if task not in _TASKS:
        raise refused(f"task {task!r}")
    if task != "action":
        return f"<｜{task}｜>"
    return f"{ASSISTANT}{THINK if is_thinking else END_THINK}<｜action｜>"


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n\n".join([part["text"] for part in content])
    return content or ""


def _tools(tools: Sequence[Message], printers: Printers) -> str:
    return _TOOLS + "\n".join([printers.tool(tool) for tool in tools]) + TOOLS_END
