"""A model's tokenizer: whether its prompts become tokens here, and the same as in the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from router.api.openai import parse_chat, tokenize_body
from router.check.deadline import Deadline
from router.check.finding import Finding, Subject
from router.config import TokensConfig
from router.discovery.engine_api import EngineApi
from router.errors import RouterError
from router.replicas.replica import ServedModel
from router.tokens import NeedsEngine, Prompter, load_prompter

_SAMPLE: Final = [
    {"role": "system", "content": "You are a helpful assistant.\n\nAnswer briefly."},
    {"role": "user", "content": "def f(x):\n\treturn {'naïve': x ** 2}  # 1,234 — 你好 🙂"},
    {"role": "assistant", "content": "It squares x."},
    {"role": "user", "content": "Thanks!"},
]


class ModelSeen(Struct, frozen=True, kw_only=True):
    """One base model of a replica, and how its prompts become tokens."""

    id: str
    source: str  # of tokenizer and template
    max_model_len: int | None = None
    num_adapters: int = 0
    is_loaded: bool = False  # False: there was no time
    engine_only: str | None = None  # why it cannot be tokenized here; None: it can
    # Whether the engine tokenizes a sample chat to the same ids; None: not compared.
    is_same: bool | None = None


# -- look ----------------------------------------------------------------------------------------


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
        """Load a model's tokenizer, and compare it with the replica's own."""
        seen = ModelSeen(
            id=model.id,
            source=self._config.models.get(model.id) or model.root or model.id,
            max_model_len=model.max_model_len,
            num_adapters=num_adapters,
        )
        with self._deadline.waiting(f"tokenizer of {model.id}"), suppress(TimeoutError):
            async with asyncio.timeout(self._deadline.left_s):
                prompter = await asyncio.shield(self._prompter(model.id, seen.source))
                return replace(
                    seen,
                    is_loaded=True,
                    engine_only=prompter.engine_only,
                    is_same=await self._is_same(replica, url, model.id, prompter, api),
                )
        return seen

    def _prompter(self, model: str, source: str) -> asyncio.Future[Prompter]:
        key = f"{model} {source}"
        if key not in self._loading:
            template = self._config.chat_templates.get(model)
            mode = self._config.tokenizer_modes.get(model)
            self._loading[key] = _in_thread(
                lambda: load_prompter(source, chat_template=template, tokenizer_mode=mode)
            )
        return self._loading[key]

    async def _is_same(
        self, replica: str, url: str, model: str, prompter: Prompter, api: EngineApi
    ) -> bool | None:
        """Compare the token ids of a sample chat; None: one side has none."""
        if prompter.engine_only is not None or not prompter.asks_engine:
            return None
        body = {"model": model, "messages": _SAMPLE}
        try:
            plan = prompter.plan_chat(parse_chat(body))
            ours = prompter.commit(plan, plan.encode()).ids()
            sent = orjson.dumps(tokenize_body(body))
            timeout_s = self._deadline.at_most(self._config.engine_timeout_s)
            return ours == await api.tokenize(replica, url, sent, timeout_s=timeout_s)
        except (NeedsEngine, RouterError):
            return None


def _in_thread(load: Callable[[], Prompter]) -> asyncio.Future[Prompter]:
    """Load in a daemon thread; whatever a library raises for a model directory is an answer."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Prompter] = loop.create_future()

    def finish(prompter: Prompter) -> None:
        if not loaded.done():
            loaded.set_result(prompter)

    def run() -> None:
        try:
            prompter = load()
        except Exception as exc:
            prompter = Prompter(None, None, reason=f"{type(exc).__name__}: {exc}")
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, prompter)

    threading.Thread(target=run, name="load", daemon=True).start()
    return loaded


# -- judge ---------------------------------------------------------------------------------------


def judge(subject: Subject, seen: ModelSeen) -> Iterator[Finding]:
    """Judge a model of the replica that is `subject`."""
    longest = f", up to {seen.max_model_len:,} tokens" if seen.max_model_len else ""
    adapters = f", {seen.num_adapters} adapters" if seen.num_adapters else ""
    yield subject.ok("model", f"{seen.id}{longest}{adapters}")
    if not seen.is_loaded:
        yield subject.warning(
            "tokenizer",
            f"{seen.source}: not loaded in time",
            f"a slow or unreachable hub? Name a directory: --tokens-models {seen.id}=DIRECTORY; "
            "or --wait longer",
        )
    elif seen.engine_only is not None:
        yield subject.note(
            "tokenizer",
            f"the engine's, over HTTP for each prompt: {seen.engine_only}",
            f"where the files are elsewhere: --tokens-models {seen.id}=DIRECTORY",
        )
    elif seen.is_same is False:
        yield subject.error(
            "tokenizer",
            f"{seen.source}: other tokens than the engine's for a sample chat",
            "was the engine started with --chat-template or another --tokenizer? "
            f"--tokens-chat-templates {seen.id}=FILE, --tokens-models {seen.id}=DIRECTORY",
        )
    else:
        proof = "as the engine's, by a sample chat" if seen.is_same else "not compared"
        yield subject.ok("tokenizer", f"local, {seen.source} ({proof})")
