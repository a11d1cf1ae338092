"""Prompts that are too long for a model: whether they are refused, or not tokenized.

Sizes prove that a prompt is too long. Every token id is one token, and a message or a tool is at
least one token. A token has at most as many characters as the longest one in the vocabulary. Other
prompts pass, and the engine counts. Errors have vLLM's words (0.32.0, renderers/params.py,
TokenizeParams).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from router.api.openai import ChatRequest, CompletionRequest
from router.base.errors import BadRequest

_TRUNCATED: Final = "truncate_prompt_tokens"
_MAX_BYTES_PER_TOKEN: Final = 8  # in the mean of a whole prompt; text has about 4
_MAX_TOKENS: Final = 1_000_000  # where the engine does not say what it takes at most


class Limit(Struct, frozen=True, kw_only=True):
    """How long a request's prompt may be.

    What is refused costs nothing more. Another prompt that is far too long is not tokenized, since
    that would keep others waiting (about 0.2 s a megabyte): the engine will refuse it.

    max_tokens: What the model takes (`max_model_len`). None: not known.
    max_chars_per_token: Of its vocabulary. None: not known here.
    is_proven: The tokens here are known to be the engine's, so a text may be refused by them.
    is_cut: The engine truncates the prompt instead of refusing it.
    """

    max_tokens: int | None = None
    max_chars_per_token: int | None = None
    is_proven: bool = False
    is_cut: bool = False

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Refuse a request by its sizes, before anything is made of it.

        Raises:
            BadRequest: it is surely too long.
        """
        most = self.max_tokens
        if most is None or self.is_cut:
            return
        if isinstance(request, ChatRequest):
            for param, items in (("messages", request.messages), ("tools", request.tools)):
                if items is not None and len(items) > most:
                    raise _too_many_items(param, len(items), most)
            return
        ids = max((len(each) for each in request.prompts if not isinstance(each, str)), default=0)
        if ids > most:
            raise _too_many_tokens(ids, most)
        chars = max((len(each) for each in request.prompts if isinstance(each, str)), default=0)
        if self.max_chars_per_token is not None and chars > most * self.max_chars_per_token:
            raise _too_many_chars(chars, most, self.max_chars_per_token)

    @property
    def max_chars(self) -> int:
        """The characters of the longest text that is tokenized here."""
        return (self.max_tokens or _MAX_TOKENS) * _MAX_BYTES_PER_TOKEN

    def takes_text(self, num_chars: int) -> bool:
        """Return whether a prompt of so many characters is tokenized here.

        Raises:
            BadRequest: it is surely too long, and may be refused.
        """
        most, per_token = self.max_tokens, self.max_chars_per_token
        if self.is_proven and most is not None and per_token is not None:
            if num_chars > most * per_token:
                raise _too_many_chars(num_chars, most, per_token)
        return num_chars <= self.max_chars

    def takes_tokens(self, num_tokens: int) -> bool:
        """Return whether so many tokens are worth knowing; of a prompt that is cut one less.

        Raises:
            BadRequest: they are too many, and may be refused.
        """
        most = self.max_tokens
        if num_tokens <= (most or _MAX_TOKENS) - self.is_cut:
            return True
        if self.is_proven and most is not None:
            raise _too_many_tokens(num_tokens, most)
        return False


def is_cut(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether an engine truncates a request's prompt instead of refusing it."""
    if isinstance(request, ChatRequest):
        return request.truncates
    return request.engine_only == _TRUNCATED


def _too_many_items(param: str, num_items: int, max_tokens: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, `{param}` "
        f"has {num_items} items. Please reduce their number.",
        param=param,
    )


def _too_many_tokens(num_tokens: int, max_tokens: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
        f"contains {num_tokens} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
    )


def _too_many_chars(num_chars: int, max_tokens: int, max_chars_per_token: int) -> BadRequest:
    most = max_tokens * max_chars_per_token
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
        f"contains {num_chars} characters (more than {most} characters, which is the upper "
        f"bound for {max_tokens} input tokens). Please reduce the length of the input prompt.",
        param="input_text",
    )
