"""Build the template's arguments of a chat request, besides the messages.

Source: vLLM 0.32.0, entrypoints/openai/chat_completion/protocol.py (build_chat_params),
renderers/params.py (merge_kwargs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.api.openai import ChatRequest, Json
from router.base.errors import TemplateFailed
from router.tokens.conversation import build_tools, check_numbers
from router.tokens.json_memo import JsonMemo
from router.tokens.needs_engine import NeedsEngine

# Parameters of transformers' apply_chat_template. As template arguments they would change its work.
_STEERING = frozenset(
    "chat_template tokenize conversation conversations messages tools documents padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def template_arguments(request: ChatRequest, memo: JsonMemo) -> dict[str, Any]:
    """Merge the template's arguments. Later ones win; null and "auto" never do.

    The engine's defaults come first, then tools, then the request's own. The Responses route keeps
    a null or "auto" of the request's own arguments if the engine has no defaults.

    Raises:
        NeedsEngine: it is not known how the engine renders an argument.
    """
    given, defaults = request.chat_template_kwargs or {}, request.template_defaults or {}
    steering = _STEERING & (given.keys() | defaults.keys())
    if steering:
        raise NeedsEngine("field", f"chat_template_kwargs.{min(steering)}")
    if given:
        check_numbers(given)
    own = {
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "documents": _documents(request.documents) if request.documents is not None else None,
        "reasoning_effort": request.reasoning_effort,
    }
    if request.reasoning_effort is not None and "enable_thinking" not in given:
        own["enable_thinking"] = request.reasoning_effort != "none"
    merged = _merged(given, own)
    if request.renders_as == "responses":  # it merges them itself, and passes them as defaults
        defaults = _merged(defaults, merged) if defaults else merged
    tools = build_tools(request.tools, memo) if request.tools is not None else None
    return _merged({**defaults, "tools": tools}, merged)


def continued_and_begun() -> TemplateFailed:
    """Return the error for a request to continue its last message and to begin an answer."""
    return TemplateFailed(
        "`continue_final_message` and `add_generation_prompt` exclude each other: set the latter "
        "to false",
        param="continue_final_message",
    )


def _documents(documents: Sequence[Json]) -> list[Json]:
    for document in documents:
        if not all(isinstance(value, str) for value in document.values()):
            raise NeedsEngine("field", "documents")
    return list(documents)


def _merged(defaults: Json, overrides: Json) -> dict[str, Any]:
    return {
        **defaults,
        **{key: value for key, value in overrides.items() if value not in (None, "auto")},
    }
