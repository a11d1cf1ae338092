"""One request on an emulated rank: a request of the engine model with its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadtest.engine_model.scheduler import Request


class Generation(Request):
    """A generation; `ready` is set whenever a token has come, or the engine has failed it.

    Several generations may share one `ready`; readers count the tokens that they have passed on.

    Args:
        token_ids: Prompt and reply: what the model says is known from the start.
        lora: Number and name of its adapter.
    """

    __slots__ = ("cache_salt", "failed", "lora", "ready", "token_ids")

    def __init__(
        self,
        token_ids: list[int],
        keys: Sequence[bytes],
        num_prompt_tokens: int,
        ready: asyncio.Event,
        *,
        lora: tuple[int, str] | None = None,
        cache_salt: str | None = None,
        arrival_s: float = 0.0,
    ) -> None:
        num_reply_tokens = len(token_ids) - num_prompt_tokens
        super().__init__(keys, num_prompt_tokens, num_reply_tokens, arrival_s=arrival_s)
        self.token_ids = token_ids
        self.ready = ready
        self.failed = False
        self.lora = lora
        self.cache_salt = cache_salt
