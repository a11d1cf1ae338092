"""What a body of `/v1/messages` may hold, as far as the prompt depends on it.

Typed as vLLM's models are, without its leniency (a number for a text, "yes" for true): what does
not fit is the engine's to take or to refuse. Other fields are ignored, there and here. Source:
vLLM 0.32.0, entrypoints/anthropic/protocol.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

TOOL_CHANGES: Final = ("tool_addition", "tool_removal")
"""Types of blocks that only system messages may have."""


class Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolReference(Struct, tag_field="type", tag="tool_reference"):
    name: str


class ToolDefinition(Struct, tag_field="type", tag="tool_definition"):
    definition: Tool


class Block(Struct):
    """Any content block: which fields mean something depends on its type."""

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool: ToolReference | ToolDefinition | None = None


class Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_Display = Literal["summarized", "omitted", "updates"]


class ThinkingEnabled(Struct, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1024)]
    display: _Display | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled"):
    pass


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive"):
    display: _Display | None = None


class OutputFormat(Struct):
    schema: dict[str, Any] | None = None
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Options(Struct):
    """All that the prompt depends on but the messages, which are read one by one."""

    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Unknown(Exception):
    """What the engine makes of a body is not known here; the message is a word for it."""
