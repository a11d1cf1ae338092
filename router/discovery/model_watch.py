"""Detect what the models of one replica need, beside its health: tokenizers, token ids.

Token ids that an engine makes of texts and chats are compared with ours, by its `/tokenize`. It
renders with the engine's own defaults (template, its arguments, content format). No
other route shows them. Source: vLLM 0.32.0, entrypoints/serve/tokenize/serving.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import orjson

from router.api.engine_bodies import tokenize_body
from router.api.openai import parse_chat
from router.base.errors import BadRequest, RouterError, TemplateFailed
from router.config import Config
from router.discovery.engine_api import EngineApi
from router.discovery.prompter_loader import PrompterLoader
from router.discovery.served_models import ServedModels
from router.metrics import Metrics
from router.replicas.replica import Replica
from router.tokens import NeedsEngine, Prompter, Prompters
from router.tokens.trust import ALL_TEXTS, CHATS, TEXTS, Difference, of_chat, of_refused, of_text

Ask = Callable[[bytes], Awaitable[list[int]]]
"""`/tokenize` of one replica; raises as `EngineApi.tokenize`."""


async def compare(ask: Ask, prompter: Prompter, model: str) -> Difference | None:
    """Compare ids of texts, then of chats; None: all are the same.

    Raises:
        NeedsEngine: they cannot be made here (now).
        BadRequest, UpstreamError: the engine does not tokenize.
    """
    difference = await _texts(ask, prompter, model)
    if difference is not None or not prompter.asks_engine:
        return difference
    for chat in CHATS:
        difference = await _chat(ask, prompter, {"model": model, **chat})
        if difference is not None:
            return difference
    return None


async def _texts(ask: Ask, prompter: Prompter, model: str) -> Difference | None:
    if await _text(ask, prompter, model, "all", ALL_TEXTS) is None:
        return None
    for kind, texts in TEXTS.items():
        for text in texts:
            difference = await _text(ask, prompter, model, kind, text)
            if difference is not None:
                return difference
    return await _text(ask, prompter, model, "all", ALL_TEXTS)


async def _text(
    ask: Ask, prompter: Prompter, model: str, kind: str, text: str
) -> Difference | None:
    ours = prompter.reference.text_ids(text)
    theirs = await ask(orjson.dumps({"model": model, "prompt": text}))
    if theirs == ours:
        return None
    shown = prompter.reference.shown
    return of_text(kind, text, shown(theirs, text), shown(ours, text))


async def _chat(ask: Ask, prompter: Prompter, body: dict[str, Any]) -> Difference | None:
    """Compare a chat's ids; a chat that either side refuses is left out."""
    request, ours = parse_chat(body), None
    try:
        with suppress(TemplateFailed):  # it takes no system message, no tools
            ours = prompter.reference.chat_ids(request)
        theirs = await ask(orjson.dumps(tokenize_body(body)))
    except (BadRequest, NeedsEngine):
        return None
    if ours is None:
        return of_refused()
    if theirs == ours:
        return None
    return of_chat(theirs, ours)


logger = logging.getLogger(__name__)

_FIRST_S: Final = 0.01
"""The first pause before ids are compared; it doubles while a tokenizer is loading."""

_ASK_AGAIN_S: Final = 30.0


class ModelWatch:
    """Learns it, and drops it with the process."""

    def __init__(
        self,
        config: Config,
        *,
        engine_api: EngineApi,
        prompters: Prompters,
        loader: PrompterLoader,
        served_models: ServedModels,
        metrics: Metrics,
    ) -> None:
        self._timeout_s = config.tokens.engine_timeout_s
        self._metrics = metrics
        self._interval_s = config.health.interval_s
        self._engine_api = engine_api
        self._prompters = prompters
        self._loader = loader
        self._served_models = served_models

    def lora_paths(self, replica: Replica) -> Mapping[str, str]:
        """Return where its adapters are, by name; read live."""
        return self._served_models.lora_paths(replica)

    def begin(self, replica: Replica, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Load what its models need, and start the task that compares its token ids."""
        self._loader.load(replica)
        return group.create_task(self._compare_ids(replica), name=f"compare ids {replica.name}")

    def forget(self, name: str) -> None:
        """Drop what was learned about a replica: it is gone, or another process."""
        self._prompters.forget(name)
        self._served_models.forget(name)

    async def _compare_ids(self, replica: Replica) -> None:
        """Compare the replica's token ids with ours; again if ours are made in another way."""
        models = [model.id for model in replica.models if model.parent is None]
        pause_s = _FIRST_S
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))
            if any(self._prompters.get(model) is None for model in models):
                pause_s = min(2 * pause_s, self._interval_s)
                continue
            is_done = await self._compare(replica, models)
            pause_s = self._interval_s if is_done else max(self._interval_s, _ASK_AGAIN_S)

    async def _compare(self, replica: Replica, models: Sequence[str]) -> bool:
        """Compare ids that were not compared yet; False: some cannot be made now."""
        ask = partial(self._tokenize, replica)
        is_done = True
        for model in models:
            prompter = self._prompters.get(model)
            if prompter is None or prompter.trust.has_compared(replica.name):
                continue
            try:
                difference = await compare(ask, prompter, model)
            except (NeedsEngine, RouterError):
                is_done = False
            else:
                self._observe_ids(replica, model, prompter, difference)
        return is_done

    async def _tokenize(self, replica: Replica, body: bytes) -> list[int]:
        return await self._engine_api.tokenize(
            replica.name, replica.url, body, timeout_s=self._timeout_s
        )

    def _observe_ids(
        self, replica: Replica, model: str, prompter: Prompter, difference: Difference | None
    ) -> None:
        """Record a comparison; log once a process what differs, and what to do."""
        fields = {"model": model, "replica": replica.name}
        num_serving = self._served_models.num_serving(model)
        prompter.trust.observe_ids(replica.name, difference, num_serving=num_serving)
        if difference is None:
            logger.info("token ids are the engine's", extra=fields)
            return
        self._metrics.token_mismatches.labels(model, "ids").inc()
        is_ended = prompter.trust.reason is not None
        logger.error(
            "token ids differ from the engine's: none are sent"
            + (", and the engine tokenizes" if is_ended else " to this replica"),
            extra={**fields, "difference": difference.what, "hint": difference.hint},
        )
