"""The APIs whose prompts are known here, one entry each; every other route is passed through.

An entry has the differences between APIs in reading requests and answers. Shapes of errors are in
router.api.answers, by path, because an error may come before the API is known.

Models have other names for clients that insist on names of their own. Claude Code, say, asks for
several models by names that change with its releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from router.api import answers, anthropic, engine_bodies, openai, responses
from router.api.answers import Usage
from router.api.body import Outline, with_fields
from router.api.openai import ChatRequest, CompletionRequest, Json
from router.base.engines import V0_33, Release, is_at_least

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
    is_aborted: Return whether an engine gave a whole answer up (router.api.answers).
    starts_early: Its stream may begin before anything was generated (router.api.answers): the first
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
    usage_of_body: Callable[[bytes], Usage | None] = answers.usage_of_body
    usage_of_stream: Callable[[bytes], Usage | None] = answers.usage_of_stream
    end: bytes = b"\ndata: [DONE]"  # text of an answer has no line breaks: JSON escapes them
    last: re.Pattern[bytes] | None = answers.DONE
    is_aborted: Callable[[bytes], bool] = answers.is_aborted_chat
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
    tokenize_body=engine_bodies.tokenize_body,
)

COMPLETIONS: Final = Api(
    name="completions",
    parse=openai.parse_completion,
    empty={"prompt": ""},
    tokenize_body=engine_bodies.tokenize_body,
)

MESSAGES: Final = Api(
    name="messages",
    parse=anthropic.parse_messages,
    empty={"messages": []},
    usage_of_body=anthropic.usage_of_message,
    usage_of_stream=anthropic.usage_of_messages,
    end=b"",
    last=answers.MESSAGE_STOP,
    is_aborted=answers.is_aborted_message,
    starts_early=True,
)

COUNT_TOKENS: Final = Api(name="other", parse=anthropic.parse_count, counts=True)
"""Answered here where the tokens are known for sure, else passed through as any other route."""

RESPONSES: Final = Api(
    name="responses",
    parse=responses.parse_responses,
    empty={"input": ""},
    tokenize_body=responses.tokenize_responses,
    usage_of_body=answers.usage_of_response,
    usage_of_stream=answers.usage_of_responses,
    end=b"",
    last=answers.RESPONSE_END,
    is_aborted=answers.is_aborted_whole_response,
    starts_early=True,
    hold_s=10.0,  # it says that it begins before anything is computed
    repeats=4,
    ranks_since=V0_33,
)

OTHER: Final = Api(name="other", hold_s=10.0, last=None)
"""Any other route."""

_ENDS_AS_CHATS: Final = replace(OTHER, last=answers.DONE)
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


class _Named(Struct):
    model: str | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(_Named)


class ModelAliases:
    """Writes the served model into bodies that ask for another name of it.

    Args:
        models: Name, in which `*` stands for any characters, to served model. The first that fits
            counts.

    names: Those without `*`.
    """

    __slots__ = ("_models", "names")

    def __init__(self, models: Mapping[str, str]) -> None:
        self.names = [name for name in models if "*" not in name]
        self._models = [(_pattern(name), model) for name, model in models.items()]

    def apply(self, body: bytes | None, served: Container[str]) -> bytes | None:
        """Return the body to read and to forward; without an alias it is `body` itself.

        Args:
            body: As a client sent it, decompressed. Only a JSON object has an alias.
            served: Models that are served under their own name: no alias hides them.
        """
        if not body:
            return body
        try:
            name = _DECODER.decode(body).model
        except (msgspec.DecodeError, RecursionError):
            return body  # its reader says what is wrong
        if name is UNSET or name in served:
            return body
        model = self.model_of(name)
        return body if model is None else with_fields(body, {"model": model})

    def model_of(self, name: str) -> str | None:
        """Return the served model that a name stands for; None: it is no alias."""
        return next((model for names, model in self._models if names.fullmatch(name)), None)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
