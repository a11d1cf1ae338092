"""Which streams may be continued elsewhere when their engine dies, as far as their request says.

An answer goes on from token ids, so what is said of sampling holds as if nothing had happened,
apart from what looks back at the output alone (penalties, `bad_words`, grammars) or counts draws
(`seed`): such requests are not continued. Source of the fields: vLLM 0.32.0, CompletionRequest and
ChatCompletionRequest; a field not named here is not continued.

Nor are streams with tools, even where no call has begun. A parser's state is not in the text: some
take what the engine generates *first* for a call (`current_text.startswith("[")`, "{", "<":
pythonic, llama3_json, olmo3, xlam), so prose that goes on elsewhere with such a character would be
one; strict tools are a grammar, which would begin anew; and many parsers have special tokens
written out, whose text is not their token. Which parser an engine runs it does not say. Source:
vllm/tool_parsers, 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

_DEFAULT_MAX_TOKENS: Final = 16  # of a completion that names none

_FREE: Final = frozenset(
    "model messages prompt stream stream_options max_tokens max_completion_tokens min_tokens "
    "temperature top_p top_k min_p repetition_penalty logit_bias allowed_token_ids stop "
    "seed stop_token_ids ignore_eos skip_special_tokens spaces_between_special_tokens user "
    "priority cache_salt request_id session_id return_token_ids return_tokens_as_token_ids "
    "parallel_tool_calls add_generation_prompt continue_final_message add_special_tokens documents "
    "chat_template chat_template_kwargs reasoning_effort metadata store service_tier "
    "safety_identifier prompt_cache_key stream_interval".split()
)
"""Fields whose every value is carried over: they concern the prompt, or each token by itself."""


def _is_plain(value: Any) -> bool:
    return not value  # 0, false, "", [], {}: nothing was asked for


_RULES: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "n": ("choices", lambda value: value == 1),
    "best_of": ("choices", lambda value: value == 1),
    "tools": ("tools", _is_plain),
    "tool_choice": ("tools", lambda value: value in ("none", "auto")),
    "response_format": ("structured", lambda value: value == {"type": "text"}),
    "structured_outputs": ("structured", _is_plain),
    "logprobs": ("logprobs", lambda value: value is False),
    "top_logprobs": ("logprobs", lambda value: value == 0),
    "presence_penalty": ("sampling", _is_plain),
    "frequency_penalty": ("sampling", _is_plain),
    "bad_words": ("sampling", _is_plain),
    "use_beam_search": ("sampling", _is_plain),
    "echo": ("echo", _is_plain),
    "include_stop_str_in_output": ("stop", _is_plain),
    "include_reasoning": ("reasoning", lambda value: value is True),
}
"""Fields of which only a value that changes nothing is carried over, and the reason if not."""

_UNKNOWN: Final = ("field", lambda _: False)


class NotContinued(Exception):
    """A broken stream cannot go on; `reason` is one of a few words, for metrics and log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Terms(Struct, frozen=True, kw_only=True):
    """What a request that may be continued asked for, as far as its continuation must know.

    max_tokens: None: up to the engine. max_field: which field says it.
    """

    is_chat: bool
    max_tokens: int | None
    max_field: str
    min_tokens: int
    has_stop: bool
    skips_special_tokens: bool
    includes_usage: bool
    has_continuous_usage: bool
    returns_ids: bool


def terms_of(body: Mapping[str, Any], *, is_chat: bool) -> Terms | str:
    """Read the terms of a streaming request, or why its stream cannot be continued."""
    for field, value in body.items():
        if value is None or field in _FREE:
            continue
        reason, is_allowed = _RULES.get(field, _UNKNOWN)
        if not is_allowed(value):
            return reason
    if body.get("seed") is not None and body.get("temperature") != 0:
        return "sampling"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return "choices"
    max_field = "max_tokens"
    if is_chat and body.get("max_completion_tokens") is not None:
        max_field = "max_completion_tokens"
    max_tokens = body.get(max_field, None if is_chat else _DEFAULT_MAX_TOKENS)
    min_tokens = body.get("min_tokens") or 0
    if not isinstance(max_tokens, int | None) or not isinstance(min_tokens, int):
        return "field"  # "12" is a number to the engine
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    return Terms(
        is_chat=is_chat,
        max_tokens=max_tokens,
        max_field=max_field,
        min_tokens=min_tokens,
        has_stop=bool(body.get("stop")),
        skips_special_tokens=body.get("skip_special_tokens") is not False,
        includes_usage=bool(options.get("include_usage")),
        has_continuous_usage=bool(options.get("continuous_usage_stats")),
        returns_ids=bool(body.get("return_token_ids")),
    )
