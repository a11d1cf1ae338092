"""A model's tokenizer: whether its prompts become tokens here, and the same as in the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from router.check.deadline import Deadline
from router.check.finding import Finding, Subject
from router.config import TokensConfig
from router.discovery.engine_api import EngineApi
from router.discovery.id_comparison import compare
from router.discovery.prompter_loader import configured_prompter
from router.errors import RouterError
from router.releases import Release, rules_of
from router.replicas.replica import ServedModel
from router.tokens import NeedsEngine, Prompter
from router.tokens.id_probe import Difference


class ModelSeen(Struct, frozen=True, kw_only=True):
    """One base model of a replica, and how its prompts become tokens."""

    id: str
    source: str  # of tokenizer and template
    max_model_len: int | None = None
    num_adapters: int = 0
    is_loaded: bool = False  # False: there was no time
    engine_only: str | None = None  # why it cannot be tokenized here; None: it can
    is_compared: bool = False  # its ids of sample texts and chats, with the engine's
    difference: Difference | None = None  # between them; None: there is none


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
        self,
        replica: str,
        url: str,
        model: ServedModel,
        *,
        version: str | None,
        num_adapters: int,
        api: EngineApi,
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
                release = rules_of(version)
                prompter = await asyncio.shield(self._prompter(model, seen.source, release))
                seen = replace(seen, is_loaded=True, engine_only=prompter.engine_only)
                return await self._compared(seen, replica, url, prompter, api)
        return seen

    def _prompter(
        self, model: ServedModel, source: str, release: Release
    ) -> asyncio.Future[Prompter]:
        key = f"{model.id} {source} {release}"
        if key not in self._loading:
            model_id = model.root or model.id
            self._loading[key] = _in_thread(
                lambda: configured_prompter(model.id, source, model_id, self._config, release)
            )
        return self._loading[key]

    async def _compared(
        self, seen: ModelSeen, replica: str, url: str, prompter: Prompter, api: EngineApi
    ) -> ModelSeen:
        """Compare token ids with the replica's, where both sides have them."""
        if prompter.engine_only is not None:
            return seen

        async def ask(body: bytes) -> list[int]:
            timeout_s = self._deadline.at_most(self._config.engine_timeout_s)
            return await api.tokenize(replica, url, body, timeout_s=timeout_s)

        try:
            difference = await compare(ask, prompter, seen.id)
        except (NeedsEngine, RouterError):
            return seen
        return replace(seen, is_compared=True, difference=difference)


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
            "is the hub slow or unreachable? Name a directory: --tokens-models "
            f"{seen.id}=DIRECTORY; or use a longer --wait",
        )
    elif seen.engine_only is not None:
        yield subject.warning(
            "tokenizer",
            f"it cannot be loaded: {seen.engine_only}; the engine tokenizes each prompt, over HTTP",
            f"name a directory with its files: --tokens-models {seen.id}=DIRECTORY",
        )
    elif seen.difference is not None:
        text = f"{seen.source}: token ids differ from the engine's: {seen.difference}"
        yield subject.error("tokenizer", text, seen.difference.hint)
    elif not seen.is_compared:
        yield subject.note(
            "tokenizer",
            f"local, {seen.source}; its token ids are not compared with the engine's yet",
            "the router compares them when /tokenize answers; until then it sends no token ids",
        )
    else:
        text = f"local, {seen.source} (sample texts and chats have the engine's token ids)"
        yield subject.ok("tokenizer", text)
