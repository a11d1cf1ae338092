"""DeepSeek V4 and V4.1: from a conversation to the prompt's text.

Tool results become blocks of a user's message, in the order of their calls. Thinking of earlier
turns is dropped unless there are tools. V4.1 differs in these rules:

- A token stands before system messages. A later one opens an answer, as a user's message does.
- The effort is a number.
- The tags of calls contain a space.
- A billing header stays in the request's contents.

Source: vLLM 0.32.0, tokenizers/deepseek_v4.py, deepseek_v41.py, and both with `_encoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from router.api.openai import Json
from router.base.engines import V0_33
from router.base.errors import TemplateFailed
from router.tokens.conversation import Conversation, JsonMemo, build_conversation
from router.tokens.model_files import ModelFiles
from router.tokens.models import modes
from router.tokens.models.deepseek import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    THINK,
    USER,
    DeepSeekRenderer,
    Message,
    calls_block,
    last_user,
    load_deepseek,
    refused,
)
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompter import Prompter
from router.tokens.template_probes import ContentFormat

_REMINDER = "<｜latest_reminder｜>"
_SYSTEM = "<｜System｜>"
_TASKS = frozenset({"action", "query", "authority", "domain", "title", "read_url"})
_LOW_EFFORTS = frozenset({"low", "minimal", "medium"})
_HISTORY = frozenset(
    {"user", "system", "assistant", "tool", "latest_reminder", "direct_search_results"}
)
_ROLES_V41: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_EFFORTS_V41: Final = {"low": 50, "high": 75, "xhigh": 75, "max": 100}

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

_TOOLS_END: Final = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)


def _tools_head(prefix: str, block: str) -> str:
    """Write the text before the tools: how to call them.

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


def load(files: ModelFiles, max_bytes: int) -> Prompter:
    """Load a model's tokenizer and its rules; see `models`."""
    mode = modes.find_mode(files.name, files.config, files.mode)
    renderer = DeepSeekV41Renderer if mode == modes.DEEPSEEK_V41 else DeepSeekV4Renderer
    return load_deepseek(files, renderer, max_bytes)


class DeepSeekV4Renderer(DeepSeekRenderer):
    """Renders chat requests of DeepSeek V4.

    calls: The name of the tag around calls.
    tools_head: Stands before the tools.
    system: Stands before a system message.
    """

    content_format: ContentFormat = "openai"
    calls = "tool_calls"
    tools_head = _tools_head("", "tool_calls")
    system = ""

    __slots__ = ()

    def write(
        self, conversation: Conversation, tools: Sequence[Message] | None, arguments: dict[str, Any]
    ) -> str:
        is_thinking, preface = self.thinking(arguments)
        messages = _merged(_with_tools(conversation, tools))
        _sort_results(messages)
        drops = bool(arguments.get("drop_thinking", True)) and not tools
        if is_thinking and drops:
            user = self.last_user(messages)
            messages = [m for i, m in enumerate(messages) if i >= user or m["role"] in _HISTORY]
        user = self.last_user(messages)
        pieces = [BOS, preface if is_thinking else ""]
        for index, message in enumerate(messages):
            if message["role"] == "system" and (index > 0 or not is_thinking):
                pieces.append(self.system)
            shows = is_thinking and (not drops or index > user)
            pieces.append(self._message(messages, index, shows))
            following = messages[index + 1]["role"] if index + 1 < len(messages) else None
            if following in (None, "assistant", "latest_reminder"):
                opens_thinking = is_thinking and (not drops or index >= user)
                task = message.get("task")
                if task is not None:
                    pieces.append(_task(task, is_thinking))
                elif self.opens_answer(message["role"], index, following):
                    pieces.append(ASSISTANT + (THINK if opens_thinking else END_THINK))
        return "".join(pieces)

    def thinking(self, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Return whether the model thinks, and the text about its effort.

        Raises:
            TemplateFailed: the rules do not know the effort.
        """
        is_thinking = _wants_thinking(arguments)
        effort = arguments.get("reasoning_effort")
        if not isinstance(effort, str):
            return is_thinking, _HIGH
        if effort == "none":
            return False, ""
        if effort == "max":
            return is_thinking, _MAX
        return is_thinking, "" if effort in _LOW_EFFORTS else _HIGH

    def last_user(self, messages: Sequence[Message]) -> int:
        """Find the last message that asks for an answer; -1: there is none."""
        return last_user(messages)

    def opens_answer(self, role: str, index: int, following: str | None) -> bool:
        """Return whether a message opens an answer before the role that follows."""
        if role == "system":
            return following != "latest_reminder"
        return role in ("user", "developer")

    def _message(self, messages: list[Message], index: int, shows_thinking: bool) -> str:
        message = messages[index]
        role = message["role"]
        if role == "user":
            return USER + _print_blocks(message["blocks"])
        content = _text(message)
        if role == "assistant":
            thinking = ""
            is_task = index > 0 and messages[index - 1].get("task") is not None
            if shows_thinking and not is_task:
                thinking = (message.get("reasoning") or "") + END_THINK
            calls = message.get("tool_calls")
            block = calls_block(calls, self.calls, self.printers, self.tag_prefix) if calls else ""
            return f"{thinking}{content}{block}{EOS}"
        if role == "system":
            tools = message.get("tools")
            if not tools:
                return content
            listed = "\n".join([self.printers.tool(tool) for tool in tools])
            return f"{content}\n\n{self.tools_head}{listed}{_TOOLS_END}"
        if role == "latest_reminder":
            return _REMINDER + content
        if role == "developer":
            if not content:
                raise refused("developer message without content")
            return USER + content
        raise refused(f"role {role!r}")


class DeepSeekV41Renderer(DeepSeekV4Renderer):
    """Renders chat requests of DeepSeek V4.1."""

    tag_prefix = " "
    calls = "calls"
    tools_head = _tools_head(" ", "calls")
    system = _SYSTEM

    __slots__ = ()

    def read(self, messages: Sequence[Json], memo: JsonMemo) -> Conversation:
        conversation = build_conversation(messages, self.content_format, memo)
        for message, given in zip(conversation, messages, strict=True):
            if message["role"] not in _ROLES_V41:
                raise refused(f"role {message['role']!r}")
            content = given.get("content") or ""
            if isinstance(content, list):
                content = "\n\n".join([part["text"] for part in content])
            elif given.get("content") == []:  # the engine fails on it
                raise NeedsEngine("message", "content without a part")
            message["content"] = content
        return conversation

    def thinking(self, arguments: dict[str, Any]) -> tuple[bool, str]:
        effort = arguments.get("reasoning_effort")
        if effort == "none":
            return False, ""
        if effort is None:
            effort = "high"
        if isinstance(effort, str) and effort in _EFFORTS_V41:
            effort = _EFFORTS_V41[effort]
        if type(effort) is not int or not 1 <= effort <= 100:
            raise TemplateFailed(
                "DeepSeek V4.1 takes a `reasoning_effort` of none, low, high, xhigh, max or 1 to "
                "100",
                param="reasoning_effort",
            )
        return _wants_thinking(arguments), (
            f"{_SYSTEM}Reasoning Effort: {effort} "
            "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        )

    def last_user(self, messages: Sequence[Message]) -> int:
        """Find the last message that asks for an answer; since 0.33, tool results alone do not."""
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            role = message["role"]
            if role == "user" and self._release >= V0_33:
                if all(is_result for is_result, _, _ in message["blocks"]):
                    continue
            if role in ("user", "developer") or (role == "system" and index > 0):
                return index
        return -1

    def opens_answer(self, role: str, index: int, following: str | None) -> bool:
        return role in ("user", "developer") or (role == "system" and index > 0)


def _wants_thinking(arguments: dict[str, Any]) -> bool:
    """Return whether a request has the model think, as it does by default."""
    if "thinking" not in arguments and "enable_thinking" not in arguments:
        return True
    return bool(arguments.get("thinking") or arguments.get("enable_thinking"))


def _with_tools(conversation: Conversation, tools: Sequence[Message] | None) -> list[Message]:
    """Attach the tools to the first system message, which is made if there is none."""
    messages = list(conversation)
    if tools:
        for index, message in enumerate(messages):
            if message["role"] == "system":
                messages[index] = {**message, "tools": tools}
                return messages
        messages.insert(0, {"role": "system", "tools": tools})
    return messages


def _merged(messages: Sequence[Message]) -> list[Message]:
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


def _sort_results(messages: list[Message]) -> None:
    """Sort the results in each message into the order of the calls; in place."""
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


def _print_blocks(blocks: Sequence[tuple[bool, str | None, str]]) -> str:
    """Write a user's blocks, as `_merged` made them."""
    return "\n\n".join(
        [
            f"<tool_result>{text}</tool_result>" if is_result else text
            for is_result, _, text in blocks
        ]
    )


def _task(task: str, is_thinking: bool) -> str:
    """Write the token that asks for a task.

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
