"""A prompt's token ids as an engine's `/tokenize` has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import orjson

from router.api.engine_bodies import tokenize_chat
from router.api.openai import CompletionRequest
from router.base.errors import BadRequest, RouterError, UpstreamError
from router.discovery.engine_api import EngineApi
from router.request.results import Read
from router.tokens import NeedsEngine, Prompter

logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 2 << 20  # of a body that is written again for an engine

EngineAddress = Callable[[str], tuple[str, str] | None]
"""Model -> name and base URL of a replica that may be asked; None: none is up."""


class EngineTokenizer:
    """Asks a replica."""

    def __init__(self, api: EngineApi, address: EngineAddress, *, timeout_s: float) -> None:
        self._api = api
        self._address = address
        self._timeout_s = timeout_s

    async def ids_of(self, model: str, body: bytes) -> list[int] | None:
        """Ask for the ids of a body that was made for it, in the same way."""
        try:
            return await self._ask(model, body)
        except BadRequest as exc:
            _log_failure(model, exc)
            return None

    async def ids(self, read: Read, prompter: Prompter) -> list[int] | None:
        """Ask within a deadline; late or failing means unknown (None), never an error."""
        if read.inbound.body is None or len(read.inbound.body) > _MAX_BYTES:
            return None
        if read.completion is not None and not _is_one_text(read.completion):
            return None  # `/tokenize` takes one text
        try:
            return await self._ask(read.model or "", orjson.dumps(_body(read, prompter)))
        except (BadRequest, orjson.JSONEncodeError):  # orjson writes 254 levels and reads 1,024
            return None  # forwarded, it will be refused in the engine's own words
        except NeedsEngine:  # what that route would have to be sent depends on the template
            return None

    async def _ask(self, model: str, body: bytes) -> list[int] | None:
        """Ask a replica; None: none is up, or it did not answer.

        Raises:
            BadRequest: it refuses the body.
        """
        address = self._address(model)
        if address is None:
            return None
        try:
            return await self._api.tokenize(*address, body, timeout_s=self._timeout_s)
        except UpstreamError as exc:
            _log_failure(model, exc)
            return None


def _log_failure(model: str, error: RouterError) -> None:
    logger.warning("no engine tokenized", extra={"model": model, "reason": error.message})


def _body(read: Read, prompter: Prompter) -> dict[str, Any]:
    """Build what is asked.

    Raises:
        NeedsEngine: as `Prompter.adapted`.
    """
    write = read.inbound.api.tokenize_body
    if write is not None:
        return write(orjson.loads(read.inbound.body or b""))
    assert read.chat is not None
    return tokenize_chat(prompter.adapted(read.chat))


def _is_one_text(request: CompletionRequest) -> bool:
    return len(request.prompts) == 1 and isinstance(request.prompts[0], str)
