"""A scripted model, for agents that cannot use pseudo-words.

A script is a JSON list. Its n-th step answers a request with tools whose conversation has n answers
of the model so far. The last step answers all later requests. A request without tools (for a title
or a summary) gets a reply as `--reply` says.

    [{"call": "Bash", "arguments": {"command": "ls"}}, {"text": "There is one file."}]

A step with `asked` is for conversations that have this text in a message of the user. Others, such
as those of sub-agents, get the last step in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from loadtest.emulator.wire import ApiError


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    """One answer: a text, or a call of a function with arguments."""

    text: str | None = None
    call: str | None = None
    arguments: Mapping[str, Any] = {}
    asked: str | None = None


class Script:
    """The answers of a conversation, in their order."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    @classmethod
    def load(cls, path: Path) -> Script:
        """Read a script.

        Raises:
            ValueError: The file cannot be read, or is no script; the text names the step.
        """
        try:
            steps: list[Step] = msgspec.json.decode(path.read_bytes(), type=list[Step])
        except (OSError, msgspec.DecodeError) as exc:
            raise ValueError(f"--script {path}: {exc}") from exc
        if not steps:
            raise ValueError(f"--script {path}: it must have a step")
        for number, step in enumerate(steps):
            if (step.text is None) is (step.call is None):
                raise ValueError(f"--script {path}: $[{number}] must have `text` or `call`")
        return cls(steps)

    def step(self, body: Mapping[str, Any]) -> Step | None:
        """Return the answer to a chat; None: the script does not answer it.

        Raises:
            ApiError: The chat does not have the function that the script calls.
        """
        tools = body.get("tools")
        if not tools:
            return None
        messages = body.get("messages") or ()
        num_answers = sum(message.get("role") == "assistant" for message in messages)
        step: Step = self._steps[min(num_answers, len(self._steps) - 1)]
        if step.asked is not None and not _is_asked(step.asked, messages):
            step = self._steps[-1]
        names = [tool["function"].get("name") for tool in tools]
        if step.call is not None and step.call not in names:
            raise ApiError(400, f"the script calls {step.call!r}; there are {', '.join(names)}")
        return step


def _is_asked(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        message.get("role") == "user" and text in str(message.get("content"))
        for message in messages
    )
