"""Cache diagnostics as the APIs have them: what a client asks, and how it is answered.

A client names the answer before, and learns where its prompt differs from the one of that answer.
Native values only; an engine's own causes (evicted, restarted) have no name in these APIs.

    difference                  Messages                      Responses
    none                        null                          cache_hit; unavailable if the cache
                                                              had less than both have in common
    tools, their order          tools_changed                 tools_changed
    system prompt               system_changed                input_changed
    an earlier message          messages_changed              input_changed
    history compacted           messages_changed              context_compacted
    model, adapter              model_changed                 model_changed
    salt, template, not known   unavailable                   unavailable
    the answer is not known     previous_message_not_found    comparison_response_not_found

Source: anthropic 2.14.0, types/diagnostics.py and types/cache_miss_*.py; openai 3.51.0,
types/responses/response.py (PromptCacheDiagnostics).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from router.records.computed import Part

Difference = Part | Literal["model", "salt", "unknown", "not_found"]

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"

_ASKED: Final = {
    MESSAGES: ("diagnostics", "previous_message_id"),
    RESPONSES: ("prompt_cache_options", "comparison_response_id"),
}
"""Route -> a request's field, and the member of it that names the answer before."""


class Question(Struct, frozen=True):
    """A client asks where its prompt differs from an earlier one.

    earlier: The id of the answer before. None: it is the first turn.
    is_asked: False: it did not ask, and is answered with what it sent last in its session.
    """

    earlier: str | None = None
    is_asked: bool = True


UNASKED: Final = Question(is_asked=False)


class Comparison(Struct, frozen=True, kw_only=True):
    """Where a prompt differs from an earlier one. Tokens are estimates, in whole blocks.

    difference: The first one. None: it goes on from the earlier prompt.
    num_common: Leading tokens of both.
    num_missed: Tokens of the earlier prompt behind those.
    """

    difference: Difference | None = None
    num_common: int = 0
    num_missed: int = 0


NOT_FOUND: Final = Comparison(difference="not_found")

_OF_MESSAGES: Final[dict[Difference, str]] = {
    "tools": "tools_changed",
    "tool_order": "tools_changed",
    "system": "system_changed",
    "message": "messages_changed",
    "compacted": "messages_changed",
    "model": "model_changed",
}
_OF_RESPONSES: Final[dict[Difference, str]] = {
    "tools": "tools_changed",
    "tool_order": "tools_changed",
    "system": "input_changed",
    "message": "input_changed",
    "compacted": "context_compacted",
    "model": "model_changed",
}


def question_in(path: str, body: Mapping[str, Any]) -> Question | None:
    """Find what a client asks. None: nothing, or in a way that engines ignore, too."""
    names = _ASKED.get(path)
    if names is None:
        return None
    options = body.get(names[0])
    if type(options) is not dict:
        return None
    earlier = options.get(names[1])
    return Question(earlier) if earlier is None or type(earlier) is str else None


def message_diagnostics(found: Comparison | None) -> dict[str, Any] | None:
    """Write `diagnostics` of a message; `found` None: there is no turn before."""
    if found is None or found.difference is None:
        return None
    if found.difference == "not_found":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    kind = _OF_MESSAGES.get(found.difference)
    if kind is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    reason = {"type": kind, "cache_missed_input_tokens": found.num_missed}
    return {"cache_miss_reason": reason}


def response_diagnostics(found: Comparison, *, is_reused: bool) -> dict[str, Any]:
    """Write `prompt_cache_diagnostics` of a response.

    Args:
        found: The comparison.
        is_reused: The engine took from a cache what both prompts have in common.
    """
    if found.difference is None:
        return {"type": "cache_hit" if is_reused else "unavailable"}
    if found.difference == "not_found":
        return {"type": "comparison_response_not_found"}
    reason = _OF_RESPONSES.get(found.difference)
    if reason is None:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": found.num_missed,
        "comparison_reusable_tokens": found.num_common,
    }
