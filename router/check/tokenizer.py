"""A model's tokenizer: whether it loads here, and makes the engine's token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from msgspec.structs import replace

from router.base.engines import Release, rules_of
from router.base.errors import RouterError
from router.base.loop_turns import in_thread
from router.check.finding import Finding, Subject
from router.check.seen import Deadline, ModelSeen
from router.config import Config
from router.discovery.engine_api import EngineApi
from router.discovery.model_watch import compare
from router.discovery.prompter_loader import configured_prompter
from router.replicas.replica import Entry, ServedModel
from router.tokens import NeedsEngine, Prompter

# -- look ----------------------------------------------------------------------------------------


class Tokenizers:
    """Loads each model's tokenizer once, off the loop.

    In daemon threads: a hub that does not answer must not delay the end of the program.
    """

    def __init__(self, config: Config, api: EngineApi, deadline: Deadline) -> None:
        self._config = config.tokens
        self._is_as_user = config.forward.later_system_as_user
        self._api = api
        self._deadline = deadline
        self._loading: dict[str, asyncio.Future[Prompter]] = {}

    async def look(self, entry: Entry, model: ServedModel, version: str | None) -> ModelSeen:
        """Load a model's tokenizer, and compare it with the replica's own."""
        source = self._config.models.get(model.id) or model.root or model.id
        seen = ModelSeen(served=model, source=source)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._deadline.left_s):
                prompter = await asyncio.shield(self._load(model, source, rules_of(version)))
                seen = replace(seen, is_loaded=True, engine_only=prompter.engine_only)
                if prompter.engine_only is None:
                    with suppress(NeedsEngine):
                        joins = prompter.renderer.wants_system_first()
                        seen = replace(seen, joins_system=joins and not self._is_as_user)
                    seen = await self._compare(seen, entry, prompter)
        return seen

    def _load(self, model: ServedModel, source: str, release: Release) -> asyncio.Future[Prompter]:
        key = f"{model.id} {source} {release}"
        if key not in self._loading:
            model_id = model.root or model.id

            def load() -> Prompter:
                try:
                    return configured_prompter(model.id, source, model_id, self._config, release)
                except Exception as exc:  # of a library: why it does not load
                    return Prompter.missing(f"{type(exc).__name__}: {exc}")

            self._loading[key] = in_thread(load, name="load")
        return self._loading[key]

    async def _compare(self, seen: ModelSeen, entry: Entry, prompter: Prompter) -> ModelSeen:
        url = entry.replica.url.rstrip("/")

        async def ask(body: bytes) -> list[int]:
            timeout_s = self._deadline.at_most(self._config.engine_timeout_s)
            return await self._api.tokenize(entry.name, url, body, timeout_s=timeout_s)

        try:
            difference = await compare(ask, prompter, seen.id)
        except (NeedsEngine, RouterError):
            return seen
        return replace(seen, is_compared=True, difference=difference)


# -- judge ---------------------------------------------------------------------------------------


def judge(subject: Subject, seen: ModelSeen) -> Iterator[Finding]:
    """Judge the tokenizer and the chat template of one of a replica's models."""
    yield _tokenizer(subject, seen)
    if seen.joins_system:
        yield subject.note(
            "system messages",
            "the chat template takes them in front only: /v1/messages moves later ones there, so "
            "the whole prompt is computed again after each",
            'Claude Code: set "totalTokensReminder": "off", or forward.later_system_as_user here '
            "(docs/guides/agents.md#claude-code)",
        )


def _tokenizer(subject: Subject, seen: ModelSeen) -> Finding:
    directory = f"--tokens-models {seen.id}=DIRECTORY"
    if not seen.is_loaded:
        return subject.warning(
            "tokenizer",
            f"{seen.source}: not loaded in time",
            f"is the hub slow or unreachable? Name a directory: {directory}; or use a longer "
            "--wait",
        )
    if seen.engine_only is not None:
        return subject.warning(
            "tokenizer",
            f"it cannot be loaded: {seen.engine_only}; the engine tokenizes each prompt, over HTTP",
            f"name a directory with its files: {directory}",
        )
    if seen.difference is not None:
        text = f"{seen.source}: token ids differ from the engine's: {seen.difference}"
        return subject.error("tokenizer", text, seen.difference.hint)
    if not seen.is_compared:
        return subject.note(
            "tokenizer",
            f"local, {seen.source}; its token ids are not compared with the engine's yet",
            "the router compares them when /tokenize answers; until then it sends no token ids",
        )
    return subject.ok(
        "tokenizer", f"local, {seen.source} (sample texts and chats have the engine's token ids)"
    )
