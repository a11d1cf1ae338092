"""The request for a turn: its prompt, and fields that set the length of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from loadtest.runner.options import ReplayOptions
from loadtest.runner.prompts import Prompts
from loadtest.workload import Turn

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_MAX_AHEAD: Final = 64  # requests kept; in a closed loop others may come first
_MARGIN_S: Final = 0.005  # before a turn is due nothing else is begun
_INLINE_TOKENS: Final = 2_000  # longer prompts are made off the loop


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


class Ahead:
    """Makes requests of a workload, some of them ahead of time, so that sending is not late."""

    __slots__ = ("_made", "_requests", "_s_per_token", "_turns")

    def __init__(self, requests: Requests, turns: Sequence[Turn]) -> None:
        self._requests = requests
        self._turns = turns
        self._made: dict[int, Request] = {}
        self._s_per_token = 0.0

    async def take(self, index: int) -> Request:
        """Hand over the request of a turn, made before or now."""
        return self._made.pop(index, None) or await self._make(index)

    async def make_one(self, upcoming: Iterable[int], left_s: float | None) -> bool:
        """Make one request ahead of time; return whether one was made.

        Args:
            upcoming: Places of the next turns, the first one first.
            left_s: Seconds until the next turn is due; None: that is not known.
        """
        if len(self._made) >= _MAX_AHEAD:
            return False
        for index in upcoming:
            if index in self._made:
                continue
            expected_s = 2 * self._s_per_token * self._turns[index].num_input_tokens
            if left_s is not None and expected_s + _MARGIN_S > left_s:
                return False
            self._made[index] = await self._make(index)
            await asyncio.sleep(0)
            return True
        return False

    async def _make(self, index: int) -> Request:
        """Write a request; a long one in a thread, so that answers are timed meanwhile."""
        turn = self._turns[index]
        begin_s = time.monotonic()
        if turn.num_input_tokens <= _INLINE_TOKENS:
            request = self._requests.make(turn)
        else:
            request = await asyncio.to_thread(self._requests.make, turn)
        took_s = (time.monotonic() - begin_s) / max(1, turn.num_input_tokens)
        self._s_per_token += 0.2 * (took_s - self._s_per_token)
        return request


def num_output_tokens(turn: Turn, options: ReplayOptions) -> int:
    """Return how many tokens a turn asks for; an engine computes at least one."""
    wanted = max(1, turn.num_output_tokens)
    return wanted if options.max_tokens is None else min(wanted, options.max_tokens)
