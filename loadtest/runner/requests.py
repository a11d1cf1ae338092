"""The request for a turn: its prompt, and fields that set the length of its answer."""

from __future__ import annotations

from typing import Any, Final

import orjson
from msgspec import Struct

from loadtest.runner.options import ReplayOptions
from loadtest.runner.prompts import Prompts
from loadtest.workload import Turn

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


class Request(Struct, frozen=True, gc=False):
    """One request, ready to be sent."""

    path: str
    body: bytes


class Requests:
    """Writes requests for one model."""

    __slots__ = ("_fields", "_options", "_prompts")

    def __init__(self, prompts: Prompts, model: str, options: ReplayOptions) -> None:
        self._prompts = prompts
        self._options = options
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            self._fields["ignore_eos"] = True  # not OpenAI's; vLLM, SGLang and others know it
        self._fields |= options.extra_body

    def make(self, turn: Turn) -> Request:
        """Write a turn's request."""
        body = self._prompts.body(turn)
        path = CHAT if "messages" in body else COMPLETIONS
        return Request(
            path,
            orjson.dumps(
                {"max_tokens": num_output_tokens(turn, self._options), **self._fields, **body}
            ),
        )


def num_output_tokens(turn: Turn, options: ReplayOptions) -> int:
    """Return how many tokens a turn asks for; an engine computes at least one."""
    wanted = max(1, turn.num_output_tokens)
    return wanted if options.max_tokens is None else min(wanted, options.max_tokens)
