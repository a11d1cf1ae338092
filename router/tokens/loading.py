"""Load a model's tokenizer and chat template, and decide whether they can be used here.

A model is left to the engine if the engine has code for it that is not known here, or reads its
files differently.
Sources: vLLM 0.32.0, tokenizers/registry.py, tokenizers/deepseek_v32.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from router.base.engines import V0_32, Release
from router.tokens import models
from router.tokens.encoder import TextEncoder
from router.tokens.media import MediaBook, MediaKind, Placeholder
from router.tokens.model_files import ModelFiles
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompter import Prompter
from router.tokens.templates import ChatRenderer

# Model types for which the engine overrides the tokenizer's class, of 0.33.0.
_OTHER_TOKENIZER_CLASS = frozenset(
    {"internlm2", "step3_vl", "step3p7", "step5", "step5_vl", "unlimited-ocr", "unlimited_ocr"}
)
_BYTES_PER_TOKEN = 6  # an id (4), its share of a block key (0.5) and of a segment (1 to 2)
_MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)


def load_prompter(
    model: str,
    *,
    model_id: str | None = None,
    chat_template: str | Path | None = None,
    tokenizer_mode: str | None = None,
    cache_tokens: int = 20_000_000,
    local_files_only: bool = False,
    release: Release = V0_32,
) -> Prompter:
    """Load what renders and tokenizes for a model; blocking, up to seconds: off the loop.

    Args:
        model: A directory, or a name on the hub (as the engine's `/v1/models` gives in `root`).
        model_id: The engine's `--model`, as `/v1/models` gives in `root`; None: it is `model`.
        cache_tokens: About how many tokens of prompts to remember.
        chat_template, tokenizer_mode, local_files_only, release: See `ModelFiles`.

    Returns:
        A prompter in any case. If something is missing, it only makes block keys of token ids, and
        `engine_only` says why.
    """
    # tokenizers would spread each call over all cores and wait for them. With other work on the
    # machine 2,000 tokens then take 13 ms instead of 2, and long ones occupy the loop's core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    max_bytes = cache_tokens * _BYTES_PER_TOKEN
    files = ModelFiles(
        model,
        chat_template=chat_template,
        tokenizer_mode=tokenizer_mode,
        local_files_only=local_files_only,
        release=release,
    )
    try:
        _check_config(files.config)
        family = models.find_family(files)
        if family is not None:
            return models.load(family, files, max_bytes)
        tokenizer = files.tokenizer()
    except NeedsEngine as exc:
        return Prompter.missing(exc.detail, max_bytes=max_bytes)
    templates = files.templates(tokenizer)
    encoder = TextEncoder(tokenizer.backend_tokenizer, templates.hints())
    return Prompter(
        encoder,
        ChatRenderer(templates.find, tokenizer.special_tokens_map, release=release),
        media=_media_book(files, encoder, model_id or model),
        max_bytes=max_bytes,
    )


def _check_config(config: dict[str, Any]) -> None:
    """Refuse models whose tokens cannot be made here.

    Raises:
        NeedsEngine: it is one.
    """
    if config.get("model_type") in _OTHER_TOKENIZER_CLASS:
        raise NeedsEngine("model", f"tokenizer class of {config['model_type']}")
    if config.get("is_encoder_decoder"):
        raise NeedsEngine("model", "encoder-decoder")


def _media_book(files: ModelFiles, encoder: TextEncoder, model_id: str) -> MediaBook | None:
    """Start the book of a model whose images or videos stand behind one special token each.

    None: it has none. Models that think, and speak by another model, describe the former apart.
    """
    thinker = files.config.get("thinker_config")
    configs = (files.config, thinker if isinstance(thinker, dict) else {})
    placeholders: dict[MediaKind, Placeholder] = {}
    for kind in _MEDIA_KINDS:
        ids = [each.get(f"{kind}_token_{end}") for each in configs for end in ("id", "index")]
        token_id = next((each for each in ids if type(each) is int and 0 <= each < 1 << 32), None)
        token = encoder.token_apart(token_id) if token_id is not None else None
        if token_id is not None and token is not None:
            if all(token_id != known.token_id for known in placeholders.values()):
                placeholders[kind] = Placeholder(token, token_id)
    if not placeholders:
        return None
    return MediaBook(placeholders, model_id, files.release)
