"""Requests for the engine model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadtest.emulator.generation import Generation
from router.base.contracts import ExtraKeys, HashContract


def generation(
    contract: HashContract,
    tokens: Sequence[int],
    reply: Sequence[int] = (0,),
    *,
    lora: tuple[int, str] | None = None,
    cache_salt: str | None = None,
) -> Generation:
    """Make a request as the emulator does: its blocks named by the contract, the reply's too."""
    extra = ExtraKeys(lora=None if lora is None else (lora[1], ""), cache_salt=cache_salt)
    token_ids = [*tokens, *reply]
    return Generation(
        token_ids,
        contract.digests(None, token_ids, extra),
        len(tokens),
        asyncio.Event(),
        lora=lora,
        cache_salt=cache_salt,
    )
