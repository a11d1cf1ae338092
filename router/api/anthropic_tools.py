"""Anthropic's tools as the chat tools that vLLM makes of them.

Blocks of system messages may add tools and remove them: a template sees one list, that of the end
of the conversation. Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (_resolve_tools,
_convert_tools, _convert_tool_choice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from router.api.anthropic_types import (
    TOOL_CHANGES,
    Block,
    Tool,
    ToolChoice,
    ToolDefinition,
    Unknown,
)
from router.api.openai import Json

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def tool_changes(content: str | Sequence[Block]) -> list[Block]:
    """Return the blocks of a system message that add a tool or remove one."""
    if isinstance(content, str):
        return []
    return [block for block in content if block.type in TOOL_CHANGES]


def chat_tools(declared: Sequence[Tool] | None, changes: Sequence[Block]) -> list[Json] | None:
    """Convert the tools in effect at the end of the conversation; None: there are none.

    Raises:
        Unknown: a change that the engine refuses.
    """
    if changes:
        declared = _changed(declared or (), changes)
    return [_chat_tool(tool) for tool in declared] if declared is not None else None


def _changed(declared: Sequence[Tool], changes: Sequence[Block]) -> list[Tool]:
    """Make the changes, one after another; a tool keeps its first place."""
    tools = {tool.name: tool for tool in declared}
    removed: set[str] = set()
    for block in changes:
        change, is_removal = block.tool, block.type == "tool_removal"
        if isinstance(change, ToolDefinition):
            name = change.definition.name
            tools[name] = change.definition
        else:
            name = change.name if change is not None else ""
            if name not in tools or change is None:
                raise Unknown("tools")
            if not is_removal:
                tools[name] = replace(tools[name], defer_loading=None)
        if not is_removal:
            removed.discard(name)
        elif isinstance(change, ToolDefinition):
            raise Unknown("tools")
        else:
            removed.add(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _chat_tool(tool: Tool) -> dict[str, Any]:
    schema = tool.input_schema
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": function}


def chat_tool_choice(choice: ToolChoice | None, tools: Sequence[Json] | None) -> str | Json | None:
    """Convert the choice; with tools it is `auto` unless said otherwise.

    Raises:
        Unknown: one tool is to be called, and is none of those.
    """
    if choice is None:
        return "auto" if tools is not None else None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not any(tool["function"]["name"] == choice.name for tool in tools or ()):
        raise Unknown("tool_choice")
    return {"type": "function", "function": {"name": choice.name}}
