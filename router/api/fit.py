"""Prompts that are certainly too long for a model: they are not tokenized or forwarded.

Sizes prove it. Every token id is one token, and a message or a tool is at least one token. A token
has at most as many characters as the longest one in the vocabulary. Other prompts pass, and the
engine counts. Errors have vLLM's words (0.32.0, renderers/params.py, TokenizeParams).
"""

from __future__ import annotations

from msgspec import Struct

from router.api.openai import ChatRequest, CompletionRequest
from router.base.errors import BadRequest

_TRUNCATED = "truncate_prompt_tokens"


class Sizes(Struct, frozen=True, kw_only=True):
    """How much there is of what costs tokens; ids and characters of the longest prompt."""

    num_messages: int = 0
    num_tools: int = 0
    num_prompt_ids: int = 0
    num_prompt_chars: int = 0


def sizes_of(prompt: ChatRequest | CompletionRequest) -> Sizes:
    """Take the sizes of a request."""
    if isinstance(prompt, ChatRequest):
        if prompt.truncates:
            return Sizes()
        return Sizes(num_messages=len(prompt.messages), num_tools=len(prompt.tools or ()))
    if prompt.engine_only == _TRUNCATED:
        return Sizes()
    ids = max((len(each) for each in prompt.prompts if not isinstance(each, str)), default=0)
    chars = max((len(each) for each in prompt.prompts if isinstance(each, str)), default=0)
    return Sizes(num_prompt_ids=ids, num_prompt_chars=chars)


def check_fits(sizes: Sizes, max_tokens: int, max_chars_per_token: int | None) -> None:
    """Refuse what cannot fit.

    Args:
        sizes: Of the request.
        max_tokens: What the model takes (`max_model_len`).
        max_chars_per_token: Of its vocabulary; None: not known here.

    Raises:
        BadRequest: it is surely too long.
    """
    for param, count in (("messages", sizes.num_messages), ("tools", sizes.num_tools)):
        if count > max_tokens:
            raise BadRequest(
                f"This model's maximum context length is {max_tokens} tokens. However, `{param}` "
                f"has {count} items. Please reduce their number.",
                param=param,
            )
    if sizes.num_prompt_ids > max_tokens:
        raise too_many_tokens(sizes.num_prompt_ids, max_tokens)
    if max_chars_per_token is not None:
        check_text_fits(sizes.num_prompt_chars, max_tokens, max_chars_per_token)


def too_many_tokens(num_tokens: int, max_tokens: int) -> BadRequest:
    """Return the error of a prompt of so many tokens."""
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
        f"contains {num_tokens} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
    )


def check_text_fits(num_chars: int, max_tokens: int, max_chars_per_token: int) -> None:
    """Refuse a text that cannot fit.

    Raises:
        BadRequest: it is surely too long.
    """
    most = max_tokens * max_chars_per_token
    if num_chars > most:
        raise BadRequest(
            f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
            f"contains {num_chars} characters (more than {most} characters, which is the upper "
            f"bound for {max_tokens} input tokens). Please reduce the length of the input prompt.",
            param="input_text",
        )
