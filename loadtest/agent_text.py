"""What coding agents say: a shared preamble, tool definitions, and code from real sources.

The text is cut from Python's standard library, so that it tokenizes as code does. The same seed
gives the same text on the same Python release (the sources differ between releases).
"""

from __future__ import annotations

import json
import random
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

CHARS_PER_TOKEN: Final = 3.9
"""Characters per token of these sources, measured with tiny_model (8,192 words)."""

_TOOLS: Final = (
    ("shell", "Run a command and return its output.", {"command": "string", "timeout_s": "number"}),
    ("read_file", "Read a file, or a range of its lines.", {"path": "string", "offset": "integer"}),
    ("apply_patch", "Apply a unified diff to the work tree.", {"patch": "string"}),
    ("grep", "Search files by regular expression.", {"pattern": "string", "path": "string"}),
    ("run_tests", "Run the test suite, or a part of it.", {"selector": "string"}),
    ("task", "Hand a part of the work to a sub-agent.", {"prompt": "string", "role": "string"}),
)
_PROSE_CHARS_PER_TOKEN: Final = 3.3  # the same without its indentation
_TOOL_TOKENS: Final = 80  # a definition without its manual, as the template renders it
_TOOLS_SHARE: Final = 0.3  # of the shared tokens; the rest is the system prompt

_PATHS: Final = ("src/core/engine.py", "tests/test_engine.py", "lib/net/session.py", "setup.cfg")
_TASKS: Final = (
    "The regression test fails on the release branch; find out why and mend it.",
    "Make the parser accept empty sections, with tests, without breaking the old format.",
    "Requests hang when the peer closes early. Reproduce it, then fix the cause.",
    "Replace the hand-written cache by a bounded one and keep the public interface.",
)


@lru_cache(maxsize=1)
def _library() -> str:
    """Join the standard library's top-level modules, in a fixed order (about 5 MB)."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    modules = (path.read_text(encoding="utf-8", errors="replace") for path in stdlib.glob("*.py"))
    return "\n".join(sorted(modules))


def code(rng: random.Random, num_tokens: int) -> str:
    """Cut about `num_tokens` tokens of source code, from the beginning of some line."""
    library = _library()
    num_chars = min(int(num_tokens * CHARS_PER_TOKEN), len(library) // 2)
    start = library.index("\n", rng.randrange(len(library) // 2)) + 1
    return library[start : start + num_chars]


def preamble(num_tokens: int, variant: str) -> tuple[str, list[dict[str, Any]]]:
    """Build the system prompt and the tool definitions, together about `num_tokens` tokens.

    Every session of the same variant has the same ones; two variants share no block, because
    the variant stands in front.
    """
    rng = random.Random("preamble")
    num_tools_tokens = int(num_tokens * _TOOLS_SHARE)
    num_tools = max(1, min(len(_TOOLS), num_tools_tokens // _TOOL_TOKENS))
    num_manual_tokens = max(0, num_tools_tokens // num_tools - _TOOL_TOKENS)
    tools = [_tool(rng, *spec, num_manual_tokens) for spec in _TOOLS[:num_tools]]
    head = f"You are a coding agent, build {variant}. Work until the task is done, then stop.\n\n"
    num_left = num_tokens - num_tools * (_TOOL_TOKENS + num_manual_tokens) - 25
    return head + code(rng, max(0, num_left)), tools


def task(rng: random.Random, num_tokens: int) -> str:
    """Write what the user wants, with the code in question."""
    return f"{rng.choice(_TASKS)}\n\n```\n{code(rng, num_tokens - 25)}\n```"


def sub_task(rng: random.Random, number: int) -> str:
    """Write what a parent asks of its sub-agent."""
    return f"Sub-task {number}: look into {rng.choice(_PATHS)} alone. {rng.choice(_TASKS)}"


def tool_call(rng: random.Random, name: str, number: int, call_id: str) -> dict[str, Any]:
    """Write an assistant's call of a tool in the OpenAI shape; arguments are JSON in a string."""
    arguments: dict[str, Any]
    match name:
        case "shell":
            arguments = {"command": f"sed -n {number},{number + 80}p {rng.choice(_PATHS)}"}
        case "task":
            arguments = {"prompt": sub_task(rng, number), "role": "explorer"}
        case _:
            arguments = {"path": rng.choice(_PATHS), "offset": number}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def _tool(
    rng: random.Random,
    name: str,
    summary: str,
    parameters: dict[str, str],
    num_manual_tokens: int,
) -> dict[str, Any]:
    manual = " ".join(code(rng, num_manual_tokens).split())
    manual = manual[: int(num_manual_tokens * _PROSE_CHARS_PER_TOKEN)]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{summary} {manual}".strip(),
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }
