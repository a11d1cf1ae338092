"""Looks at how a model's prompts become tokens: here, and as the engine does it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import orjson

from router.api.openai import parse_chat, tokenize_body
from router.check.deadline import Deadline
from router.check.seen import ModelSeen
from router.config import TokensConfig
from router.discovery.engine_api import EngineApi
from router.errors import BadRequest, RouterError, UpstreamError
from router.replicas.replica import ServedModel
from router.tokens import NeedsEngine, Prompter, load_prompter

_SAMPLE: Final = [
    {"role": "system", "content": "You are a helpful assistant.\n\nAnswer briefly."},
    {"role": "user", "content": "def f(x):\n\treturn {'naïve': x ** 2}  # 1,234 — 你好 🙂"},
    {"role": "assistant", "content": "It squares x."},
    {"role": "user", "content": "Thanks!"},
]


class Tokenizers:
    """Loads each model's tokenizer once, off the loop.

    In daemon threads: a hub that does not answer must not hold up the end of the program.
    """

    def __init__(self, config: TokensConfig, deadline: Deadline) -> None:
        self._config = config
        self._deadline = deadline
        self._loading: dict[str, asyncio.Future[Prompter]] = {}

    async def look(
        self, replica: str, url: str, model: ServedModel, *, num_adapters: int, api: EngineApi
    ) -> ModelSeen:
        """Load a model's tokenizer, and hold it against the replica's own."""
        source = self._config.models.get(model.id) or model.root or model.id
        seen = ModelSeen(
            id=model.id,
            source=source,
            max_model_len=model.max_model_len,
            num_adapters=num_adapters,
        )
        with self._deadline.waiting(f"tokenizer of {model.id}"), suppress(TimeoutError):
            async with asyncio.timeout(self._deadline.left_s):
                prompter = await asyncio.shield(self._prompter(model.id, source))
                return ModelSeen(
                    id=model.id,
                    source=source,
                    max_model_len=model.max_model_len,
                    num_adapters=num_adapters,
                    is_loaded=True,
                    engine_only=prompter.engine_only,
                    is_same=await self._is_same(replica, url, model.id, prompter, api),
                )
        return seen

    def _prompter(self, model: str, source: str) -> asyncio.Future[Prompter]:
        key = f"{model} {source}"
        if key not in self._loading:
            template = self._config.chat_templates.get(model)
            self._loading[key] = _in_thread(
                lambda: load_prompter(
                    source,
                    chat_template=template,
                )
            )
        return self._loading[key]

    async def _is_same(
        self, replica: str, url: str, model: str, prompter: Prompter, api: EngineApi
    ) -> bool | None:
        """Compare the token ids of a sample chat; None: one of the two has none."""
        if prompter.engine_only is not None:
            return None
        body = {"model": model, "messages": _SAMPLE}
        try:
            plan = prompter.plan_chat(parse_chat(body))
            ours = prompter.commit(plan, plan.encode()).ids()
            sent = orjson.dumps(tokenize_body(body))
            timeout_s = self._deadline.at_most(self._config.engine_timeout_s)
            return ours == await api.tokenize(replica, url, sent, timeout_s=timeout_s)
        except (NeedsEngine, BadRequest, UpstreamError, RouterError):
            return None


def _in_thread(load: Callable[[], Prompter]) -> asyncio.Future[Prompter]:
    """Run it in a daemon thread; whatever a model directory does to libraries is an answer."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Prompter] = loop.create_future()

    def settle(prompter: Prompter) -> None:
        if not loaded.done():
            loaded.set_result(prompter)

    def run() -> None:
        try:
            prompter = load()
        except Exception as exc:
            prompter = Prompter(None, None, reason=f"{type(exc).__name__}: {exc}")
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, prompter)

    threading.Thread(target=run, name="load", daemon=True).start()
    return loaded
