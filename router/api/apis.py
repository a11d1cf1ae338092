"""The APIs whose prompts are known here, one entry each; every other route is passed through.

An entry has the differences between APIs in reading requests and answers. Shapes of errors are in
router.api.failures, by path, because an error may come before the API is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from router.api import (
    anthropic,
    ending,
    engine_tokenize,
    openai,
    responses,
    responses_usage,
    usage,
)
from router.api.openai import ChatRequest, CompletionRequest, Json
from router.api.outline import Outline
from router.api.usage import Usage
from router.base.releases import V0_33, Release, is_at_least

Request = ChatRequest | CompletionRequest
"""The fields that decide a request's prompt, for any API."""


class Api(Struct, frozen=True, kw_only=True):
    """How one API's requests and answers are read.

    name: In records and metrics.
    parse: Returns the fields of a body that decide its prompt; raises BadRequest. None: unknown.
    empty: A conversation without text, for a body that is not parsed whole; None: such a body is
        passed through.
    tokenize_body: Builds the body for an engine's `/tokenize` from the client's own; None: it is
        built from what `parse` returned.
    usage_of_body, usage_of_stream: Read what the engine reports, from a whole answer and from the
        end of an event stream (its last `TAIL_BYTES` or more).
    end: What a stream that has come to its end has there; empty: its end alone has usage.
    last: How the last event of its streams is known. None: they may end with any.
    is_aborted: Return whether an engine gave a whole answer up (router.api.ending).
    starts_early: Its stream may begin before anything was generated (router.api.opening): the first
        token's time is that of the first event behind that. False: it is that of the first byte.
    hold_s: How long a stream's beginning without content is kept at most, so that another replica
        may answer instead.
    repeats: How often a stream's beginning repeats what was sent (instructions, tools), at most: so
        much longer it may be.
    ranks_since: The release from which on the engine computes a request at the data-parallel rank
        that the router names; None: all do. Others choose one themselves, so what is known of
        ranks' caches says little.
    counts: What is asked for is how many tokens the prompt has.
    """

    name: str
    parse: Callable[[Json], Request] | None = None
    empty: Json | None = None
    tokenize_body: Callable[[Json], dict[str, Any]] | None = None
    usage_of_body: Callable[[bytes], Usage | None] = usage.usage_of_body
    usage_of_stream: Callable[[bytes], Usage | None] = usage.usage_of_stream
    end: bytes = b"\ndata: [DONE]"  # text of an answer has no line breaks: JSON escapes them
    last: re.Pattern[bytes] | None = ending.DONE
    is_aborted: Callable[[bytes], bool] = ending.is_aborted_chat
    starts_early: bool = False
    hold_s: float = 1.0  # vLLM begins with the first token, and an error follows at once
    repeats: int = 0
    ranks_since: Release | None = None
    counts: bool = False

    def outlined(self, outline: Outline) -> Request | None:
        """View the known fields of a body that was not parsed whole; its prompt is unknown.

        Raises:
            BadRequest: as `parse`.
        """
        if self.parse is None or self.empty is None:
            return None
        return replace(self.parse({**outline.fields, **self.empty}), engine_only="size")

    def honours_rank(self, version: str | None) -> bool:
        """Return whether an engine of this version computes a request at the rank it is told."""
        return self.ranks_since is None or is_at_least(version, self.ranks_since)


CHAT: Final = Api(
    name="chat",
    parse=openai.parse_chat,
    empty={"messages": []},
    tokenize_body=engine_tokenize.tokenize_body,
)

COMPLETIONS: Final = Api(
    name="completions",
    parse=openai.parse_completion,
    empty={"prompt": ""},
    tokenize_body=engine_tokenize.tokenize_body,
)

MESSAGES: Final = Api(
    name="messages",
    parse=anthropic.parse_messages,
    empty={"messages": []},
    usage_of_body=anthropic.usage_of_message,
    usage_of_stream=anthropic.usage_of_messages,
    end=b"",
    last=ending.MESSAGE_STOP,
    is_aborted=ending.is_aborted_message,
    starts_early=True,
)

COUNT_TOKENS: Final = Api(name="other", parse=anthropic.parse_count, counts=True)
"""Answered here where the tokens are known for sure, else passed through as any other route."""

RESPONSES: Final = Api(
    name="responses",
    parse=responses.parse_responses,
    empty={"input": ""},
    tokenize_body=responses.tokenize_responses,
    usage_of_body=responses_usage.usage_of_response,
    usage_of_stream=responses_usage.usage_of_responses,
    end=b"",
    last=ending.RESPONSE_END,
    is_aborted=ending.is_aborted_whole_response,
    starts_early=True,
    hold_s=10.0,  # it says that it begins before anything is computed
    repeats=4,
    ranks_since=V0_33,
)

OTHER: Final = Api(name="other", hold_s=10.0, last=None)
"""Any other route."""

_ENDS_AS_CHATS: Final = replace(OTHER, last=ending.DONE)
"""Routes of which nothing is known but that vLLM ends their streams as those of chats."""

APIS: Final = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
"""The APIs, by the path of their POSTs."""

_SPECIAL: Final = {
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/inference/v1/generate": _ENDS_AS_CHATS,
    "/cohere/v2/chat": _ENDS_AS_CHATS,
}


def api_of(method: str, path: str) -> Api:
    """Find the API of a request."""
    if method != "POST":
        return OTHER
    return APIS.get(path) or _SPECIAL.get(path, OTHER)
