"""DeepSeek V3.2: from a conversation to the prompt's text.

Thinking is kept only behind the last user's message. The last message's role decides which earlier
messages count as history. Source: vLLM 0.32.0, tokenizers/deepseek_v32_encoding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from router.tokens.conversation import Conversation
from router.tokens.model_files import ModelFiles
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
    Printers,
    calls_block,
    last_user,
    load_deepseek,
    refused,
)
from router.tokens.prompter import Prompter
from router.tokens.template_probes import ContentFormat

_CALLS = "function_calls"
_KEPT_ROLES = frozenset({"user", "system", "tool", "assistant"})

_TOOLS: Final = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
{THINK}...thinking about results{END_THINK}
Here are the functions available in JSONSchema format:
<functions>
"""  # noqa: E501
_TOOLS_END: Final = "\n</functions>\n"


def load(files: ModelFiles, max_bytes: int) -> Prompter:
    """Load a model's tokenizer and its rules; see `models`."""
    return load_deepseek(files, DeepSeekV32Renderer, max_bytes)


class DeepSeekV32Renderer(DeepSeekRenderer):
    """Renders chat requests of DeepSeek V3.2."""

    content_format: ContentFormat = "string"

    __slots__ = ()

    def write(
        self, conversation: Conversation, tools: Sequence[Message] | None, arguments: dict[str, Any]
    ) -> str:
        is_thinking = bool(arguments.get("thinking") or arguments.get("enable_thinking"))
        messages = list(conversation)
        if tools:
            messages.insert(0, {"role": "system", "tools": tools})
        user = last_user(messages)
        if is_thinking and messages[-1]["role"] == "user":
            # History loses other roles; the engine then runs past its end.
            other = [m["role"] for m in messages[:user] if m["role"] not in _KEPT_ROLES]
            if other:
                raise refused(f"role {other[0]!r} before the last user's message")
        return BOS + "".join(
            [
                _message(messages, index, user, is_thinking, self.printers)
                for index in range(len(messages))
            ]
        )


def _message(
    messages: list[Message], index: int, user: int, is_thinking: bool, printers: Printers
) -> str:
    message = messages[index]
    role = message["role"]
    content = message.get("content") or ""
    if role == "user" or role == "developer":
        if role == "developer":
            if not content:
                raise refused("developer message without content")
            content = f"\n\n# The user's message is: {content}"
        opening = THINK if is_thinking and index == user else END_THINK
        return f"{USER}{content}{ASSISTANT}{opening}"
    if role == "assistant":
        return _assistant(message, content, is_thinking and index > user, printers)
    if role == "tool":
        return _result(messages, index, content, THINK if is_thinking and index >= user else "")
    if role == "system":
        tools = message.get("tools")
        return content if not tools else f"{content}\n\n{_tools(tools, printers)}"
    raise refused(f"role {role!r}")


def _assistant(message: Message, content: str, shows_thinking: bool, printers: Printers) -> str:
    calls = message.get("tool_calls")
    thinking = ""
    if shows_thinking:
        reasoning = message.get("reasoning")
        if not reasoning and not calls:
            raise refused("assistant message without thinking or calls behind the last user's")
        thinking = (reasoning or "") + END_THINK
    block = calls_block(calls, _CALLS, printers) if calls else ""
    return f"{thinking}{content}{block}{EOS}"


def _result(messages: list[Message], index: int, content: str, opening: str) -> str:
    """Write a tool's result: one of as many as the assistant before called for."""
    asked = index - 1
    while asked >= 0 and messages[asked]["role"] == "tool":
        asked -= 1
    # Of a first message, the engine takes the last one as the one before.
    asking = messages[asked]
    if index > 0 and (asked < 0 or asking["role"] != "assistant"):
        raise refused("result without a call")
    number, calls = index - asked, asking.get("tool_calls") or ()
    if number > len(calls):
        raise refused("result without a call")
    text = "\n\n<function_results>" if number == 1 else ""
    text += f"\n<result>{content}</result>"
    if number == len(calls):
        text += f"\n</function_results>\n\n{opening or END_THINK}"
    return text


def _tools(tools: Sequence[Message], printers: Printers) -> str:
    return _TOOLS + "\n".join([printers.tool(tool) for tool in tools]) + _TOOLS_END
