"""Load the tokenizers and templates of the models that replicas serve, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from datetime import date, datetime
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

from msgspec.structs import replace

from router.api.openai import parse_chat
from router.base.engines import Release, rules_of
from router.base.errors import RouterError
from router.config import TokensConfig
from router.replicas.replica import Replica
from router.tokens import NeedsEngine, Prompter, Prompters, load_prompter
from router.tokens.needs_engine import is_failure

logger = logging.getLogger(__name__)


class PrompterLoader:
    """Loads each model once.

    Args:
        loaders: Where models are loaded: a hub may be slow.
    """

    def __init__(self, prompters: Prompters, config: TokensConfig, loaders: Executor) -> None:
        self._prompters = prompters
        self._config = config
        self._loaders = loaders
        self._loads: dict[str, Callable[[], None]] = {}  # by model, once it was loaded

    def load(self, replica: Replica) -> None:
        """Load tokenizers and templates that are not loading yet; readiness waits.

        Loading goes on if the replica is removed meanwhile: others may serve the model, too.
        """
        self._prompters.adapt({m.id: m.parent for m in replica.models if m.parent is not None})
        tokens = self._config
        for model in replica.models:
            release = rules_of(replica.version)
            if model.parent is not None or not self._prompters.start_loading(model.id, release):
                continue
            source = tokens.models.get(model.id) or model.root or model.id
            model_id = model.root or model.id
            warm = partial(_warm_prompter, model.id, source, model_id, tokens, release)
            self._loads[model.id] = partial(self._load, model.id, source, warm)
            self._loads[model.id]()

    def reload(self, model: str) -> None:
        """Load a model's tokenizer and templates again; the old ones are used until then."""
        if (load := self._loads.get(model)) is not None:
            load()

    def _load(self, model: str, source: str, warm: Callable[[], Prompter]) -> None:
        loading = asyncio.get_running_loop().run_in_executor(self._loaders, warm)
        loading.add_done_callback(partial(self._loaded, model, source, time.monotonic()))

    def _loaded(
        self, model: str, source: str, started_s: float, loading: asyncio.Future[Prompter]
    ) -> None:
        """Use a model's prompter from now on."""
        if loading.cancelled():  # the router ends
            return
        prompter = loading.result()
        self._prompters.finish_loading(model, prompter)
        seconds = round(time.monotonic() - started_s, 1)
        fields = {"model": model, "source": source, "seconds": seconds}
        if prompter.engine_only is None:
            logger.info("tokenizer ready", extra=fields)
            self._quicken(model, prompter)
        else:
            logger.warning(
                "tokenizer cannot be loaded: the engine must tokenize",
                extra={**fields, "reason": prompter.engine_only},
            )

    def _quicken(self, model: str, prompter: Prompter) -> None:
        """Use fastokens for a model as soon as it is loaded and proven; requests do not wait."""
        if self._config.encoder == "tokenizers":
            logger.info("tokenizers stays", extra={"model": model, "reason": "tokens.encoder"})
            return
        quicken = prompter.encoder.quicken
        try:
            proving = asyncio.get_running_loop().run_in_executor(self._loaders, quicken)
        except RuntimeError:  # it was loaded as the router ended, and the threads are gone
            return
        proving.add_done_callback(partial(self._quickened, model, time.monotonic()))

    def _quickened(self, model: str, started_s: float, proving: asyncio.Future[str | None]) -> None:
        if proving.cancelled():
            return
        seconds = round(time.monotonic() - started_s, 1)
        bug = proving.exception()
        reason = proving.result() if bug is None else type(bug).__name__
        if reason is None:
            logger.info("fastokens proven", extra={"model": model, "seconds": seconds})
        else:
            logger.info("tokenizers stays", extra={"model": model, "reason": reason})


def _warm_prompter(
    model: str, source: str, model_id: str, config: TokensConfig, release: Release
) -> Prompter:
    """Load a model's prompter and use it once, so that the first request compiles no template.

    Whatever a model directory does to the libraries that read it, the engine can still tokenize.
    """
    request = parse_chat({"model": source, "messages": [{"role": "user", "content": "warm up"}]})
    try:
        prompter = configured_prompter(model, source, model_id, config, release)
        with suppress(NeedsEngine, RouterError):
            prompter.plan_chat(request).encode()
            prompter.adapted(replace(request, has_inline_system=True, is_thinking_disabled=True))
    except BaseException as exc:
        if not is_failure(exc):
            raise
        return Prompter.missing(f"{type(exc).__name__}: {exc}")
    return prompter


def configured_prompter(
    model: str, source: str, model_id: str, config: TokensConfig, release: Release
) -> Prompter:
    """Load a model's prompter, with what the engine was given as flags; see `load_prompter`."""
    if _is_missing_folder(source):
        return Prompter.missing(f"there is no folder {source!r} on this machine")
    prompter = load_prompter(
        source,
        model_id=model_id,
        chat_template=config.chat_templates.get(model),
        tokenizer_mode=config.tokenizer_modes.get(model),
        cache_tokens=config.cache_tokens,
        release=release,
    )
    renderer = prompter.renderer
    renderer.efforts = config.reasoning_effort_maps.get(model, {})
    renderer.defaults = config.chat_template_kwargs.get(model) or None
    content_format = config.content_formats.get(model, "auto")
    if content_format != "auto":
        renderer.use_format(content_format)
    renderer.today = _clock(model, config)
    return prompter


def _is_missing_folder(source: str) -> bool:
    """Return whether a tokenizer's source is a path with nothing there: hub names are no paths."""
    return source.startswith(("/", "./", "../", "~")) and not Path(source).exists()


def _clock(model: str, config: TokensConfig) -> Callable[[], date]:
    """Return what tells the date that a model's engines put into prompts."""
    pinned = config.start_dates.get(model)
    if pinned is not None:
        start = date.fromisoformat(pinned)
        return lambda: start
    zone = ZoneInfo(config.time_zone)
    return lambda: datetime.now(zone).date()
