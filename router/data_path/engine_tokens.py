"""A prompt's token ids as an engine's `/tokenize` has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import orjson

from router.api.openai import CompletionRequest, tokenize_chat
from router.data_path.job import Job
from router.discovery.engine_api import EngineApi
from router.errors import BadRequest, UpstreamError
from router.tokens import NeedsEngine, Prompter

logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 2 << 20  # of a body that is written anew for an engine

EngineAddress = Callable[[str], tuple[str, str] | None]
"""Model -> name and base URL of a replica that may be asked; None: none is up."""


class EngineTokenizer:
    """Asks a replica."""

    def __init__(self, api: EngineApi, address: EngineAddress, *, timeout_s: float) -> None:
        self._api = api
        self._address = address
        self._timeout_s = timeout_s

    async def ids_of(self, model: str, body: bytes) -> list[int] | None:
        """Ask for the ids of a body that was made for it, likewise."""
        address = self._address(model)
        if address is None:
            return None
        try:
            return await self._api.tokenize(*address, body, timeout_s=self._timeout_s)
        except (BadRequest, UpstreamError) as exc:
            logger.warning("no engine tokenized", extra={"model": model, "reason": exc.message})
            return None

    async def ids(self, job: Job, prompter: Prompter) -> list[int] | None:
        """Ask within a deadline; late or failing means unknown (None), never an error."""
        address = self._address(job.model or "")
        if address is None or job.inbound.body is None:
            return None
        if len(job.inbound.body) > _MAX_BYTES:
            return None
        if job.completion is not None and not _is_one_text(job.completion):
            return None  # `/tokenize` takes one text
        try:
            body = orjson.dumps(_body(job, prompter))
            return await self._api.tokenize(*address, body, timeout_s=self._timeout_s)
        except (BadRequest, orjson.JSONEncodeError):  # orjson writes 254 levels and reads 1,024
            return None  # forwarded, it will be refused in the engine's own words
        except NeedsEngine:  # what that route would have to be sent depends on the template
            return None
        except UpstreamError as exc:
            logger.warning("no engine tokenized", extra={"model": job.model, "reason": exc.message})
            return None


def _body(job: Job, prompter: Prompter) -> dict[str, Any]:
    """Build what is asked.

    Raises:
        NeedsEngine: as `Prompter.adapted`.
    """
    write = job.inbound.api.tokenize_body
    if write is not None:
        return write(orjson.loads(job.inbound.body or b""))
    assert job.chat is not None
    return tokenize_chat(prompter.adapted(job.chat))


def _is_one_text(request: CompletionRequest) -> bool:
    return len(request.prompts) == 1 and isinstance(request.prompts[0], str)
