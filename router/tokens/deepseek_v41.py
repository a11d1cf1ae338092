"""DeepSeek V4.1: from a conversation to the prompt's text.

As V4, but a token stands before system messages, and one within the conversation opens an answer as
a user's does; the effort is a number; the tags of calls have a space in them. Contents are those of
the request: no billing header is taken out of them. Source: vLLM 0.32.0,
tokenizers/deepseek_v41.py and deepseek_v41_encoding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from router.api.openai import Json
from router.errors import TemplateFailed
from router.releases import V0_33
from router.tokens.content_format import ContentFormat
from router.tokens.conversation import Conversation, build_conversation
from router.tokens.deepseek import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    DeepSeekRenderer,
    Message,
    Printers,
    calls_block,
    refused,
)
from router.tokens.deepseek_v4 import (
    TOOLS_END,
    merged,
    print_blocks,
    print_task,
    sort_results,
    tools_head,
    wants_thinking,
    with_tools,
)
from router.tokens.json_memo import JsonMemo
from router.tokens.needs_engine import NeedsEngine

_SYSTEM: Final = "<｜System｜>"
_PREFIX: Final = " "
_CALLS: Final = "calls"
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_EFFORTS: Final = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_TOOLS: Final = tools_head(_PREFIX, _CALLS)


class DeepSeekV41Renderer(DeepSeekRenderer):
    """Renders chat requests of DeepSeek V4.1."""

    content_format: ContentFormat = "openai"
    tag_prefix = _PREFIX

    __slots__ = ()

    def read(self, messages: Sequence[Json], memo: JsonMemo) -> Conversation:
        conversation = build_conversation(messages, self.content_format, memo)
        for message, given in zip(conversation, messages, strict=True):
            if message["role"] not in _ROLES:
                raise refused(f"role {message['role']!r}")
            content = given.get("content") or ""
            if isinstance(content, list):
                content = "\n\n".join([part["text"] for part in content])
            elif given.get("content") == []:  # the engine cannot copy what it makes of it
                raise NeedsEngine("message", "content without a part")
            message["content"] = content
        return conversation

    def encode(
        self,
        conversation: Conversation,
        tools: Sequence[Message] | None,
        arguments: dict[str, Any],
        printers: Printers,
    ) -> str:
        effort = _effort(arguments)
        messages = merged(with_tools(conversation, tools))
        sort_results(messages)
        drops = bool(arguments.get("drop_thinking", True)) and not tools
        if effort is not None and drops:
            user = self._last_user(messages)
            messages = [
                message
                for index, message in enumerate(messages)
                if index >= user or message["role"] != "developer"
            ]
        user = self._last_user(messages)
        pieces = [BOS]
        if effort is not None:
            pieces.append(
                f"{_SYSTEM}Reasoning Effort: {effort} "
                "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
            )
        for index, message in enumerate(messages):
            if message["role"] == "system" and (index > 0 or effort is None):
                pieces.append(_SYSTEM)
            shows = effort is not None and (not drops or index > user)
            pieces.append(_message(messages, index, shows, printers))
            following = messages[index + 1]["role"] if index + 1 < len(messages) else "assistant"
            if following == "assistant":
                opens = effort is not None and (not drops or index >= user)
                pieces.append(_transition(message, index, effort is not None, opens))
        return "".join(pieces)

    def _last_user(self, messages: Sequence[Message]) -> int:
        """Find the last message that asks for an answer; -1: there is none.

        From 0.33 on, tool results alone ask for none.
        """
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            role = message["role"]
            if role == "user" and self._release >= V0_33:
                if all(is_result for is_result, _, _ in message["blocks"]):
                    continue
            if role in ("user", "developer") or (role == "system" and index > 0):
                return index
        return -1


def _effort(arguments: dict[str, Any]) -> int | None:
    """Return how hard the model is to think; None: not at all.

    Raises:
        TemplateFailed: an effort that the rules do not know.
    """
    effort = arguments.get("reasoning_effort")
    if effort == "none":
        return None
    if effort is None:
        effort = "high"
    if isinstance(effort, str) and effort in _EFFORTS:
        effort = _EFFORTS[effort]
    if type(effort) is not int or not 1 <= effort <= 100:
        raise TemplateFailed(
            "DeepSeek V4.1 takes a `reasoning_effort` of none, low, high, xhigh, max or 1 to 100",
            param="reasoning_effort",
        )
    return effort if wants_thinking(arguments) else None


def _message(messages: list[Message], index: int, shows_thinking: bool, printers: Printers) -> str:
    message = messages[index]
    role = message["role"]
    if role == "user":
        return USER + print_blocks(message["blocks"])
    content: str = message.get("content") or ""
    if role == "system":
        tools = message.get("tools")
        if not tools:
            return content
        return f"{content}\n\n{_TOOLS}" + "\n".join(map(printers.tool, tools)) + TOOLS_END
    if role == "developer":
        if not content:
            raise refused("developer message without content")
        return USER + content
    thinking = ""
    if shows_thinking and not (index > 0 and messages[index - 1].get("task") is not None):
        thinking = (message.get("reasoning") or "") + END_THINK
    calls = message.get("tool_calls")
    block = calls_block(calls, _CALLS, printers, _PREFIX) if calls else ""
    return f"{thinking}{content}{block}{EOS}"


def _transition(message: Message, index: int, is_thinking: bool, opens_thinking: bool) -> str:
    """Write what opens an answer, behind the last message and before an assistant's."""
    role, task = message["role"], message.get("task")
    if task is not None:
        return print_task(task, is_thinking)
    if role == "assistant" or (role == "system" and index == 0):
        return ""
    return ASSISTANT + (THINK if opens_thinking else END_THINK)
