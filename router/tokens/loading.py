"""Finds a model's tokenizer and chat template, and decides whether they can be used here.

From a directory, the local hub cache or the hub, by transformers itself, without torch. What the
engine renders by code of its own that `renderers` lacks, and what would be read differently there,
is left to the engine. Sources: vLLM 0.32.0, tokenizers/registry.py, tokenizers/deepseek_v32.py,
renderers/hf.py (resolve_chat_template).

transformers and the harmony library are imported where they are used: it is more than half of what
a command takes to start.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, get_args

from router.extras import install_hint
from router.releases import V0_32, Release
from router.tokens import modes
from router.tokens.deepseek import ASSISTANT, BOS, EOS, USER
from router.tokens.encoder import TextEncoder
from router.tokens.harmony import HarmonyRenderer
from router.tokens.kimi_code import CLASS as KIMI_CLASS
from router.tokens.media_book import MediaBook, Placeholder
from router.tokens.media_names import MediaKind
from router.tokens.needs_engine import NeedsEngine
from router.tokens.panics import is_failure
from router.tokens.prompter import Prompter
from router.tokens.renderer import ChatRenderer
from router.tokens.renderers import WITHOUT_TEMPLATE

# Model types for which the engine overrides the tokenizer's class, of 0.33.0.
_OTHER_TOKENIZER_CLASS = frozenset(
    {"internlm2", "step3_vl", "step3p7", "step5", "step5_vl", "unlimited-ocr", "unlimited_ocr"}
)
_BYTES_PER_TOKEN = 6  # an id (4), its share of a block key (0.5) and of a segment (1 to 2)
_MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
# What a tokenizer class must not do its own way.
_OVERRIDABLE = ("__call__", "_encode_plus", "apply_chat_template", "get_chat_template")


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
        chat_template: The engine's `--chat-template`: a file, a template's text, or the name of one
            that the tokenizer has; None: the model's.
        tokenizer_mode: The engine's `--tokenizer-mode`; None: it was not given one.
        cache_tokens: About how many tokens of prompts to remember.
        local_files_only: Do not go to the hub.
        release: The engine's; see `router.releases`.

    Returns:
        A prompter in any case: where something is missing it hands out nothing but block keys of
        token ids, and `engine_only` says why.
    """
    # tokenizers would spread each call over all cores and wait for them: with other work on the
    # machine 13 ms instead of 2 for 2,000 tokens, and the loop's core is taken for long ones.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    max_bytes = cache_tokens * _BYTES_PER_TOKEN
    given = _read_template(chat_template)
    try:
        config = _load_config(model, local_files_only)
        mode = modes.find_mode(model, config, tokenizer_mode)
        _check_config(config, mode)
        if mode == modes.MISTRAL and not _is_given(tokenizer_mode):
            mode = _mistral_or_hf(model, local_files_only)
        if mode == modes.MISTRAL:
            return _mistral_prompter(model, given, local_files_only, max_bytes)
        if mode == modes.HF and _is_kimi(model, local_files_only):
            return _kimi_prompter(model, given, local_files_only, max_bytes, release)
        tokenizer = _load_tokenizer(model, mode, local_files_only)
        _check_tokenizer(tokenizer)
    except NeedsEngine as exc:
        return Prompter(None, None, reason=exc.detail, max_bytes=max_bytes)
    if mode in WITHOUT_TEMPLATE:
        encoder = TextEncoder(tokenizer.backend_tokenizer, f"{BOS}{EOS}{USER}{ASSISTANT}")
        return Prompter(encoder, WITHOUT_TEMPLATE[mode](given, release), max_bytes=max_bytes)
    templates = _Templates(tokenizer, _processor_template(model, local_files_only), given)
    renderer = ChatRenderer(templates.find, tokenizer.special_tokens_map, release=release)
    encoder = TextEncoder(tokenizer.backend_tokenizer, templates.hints())
    if mode == modes.HARMONY:
        return _harmony_prompter(encoder, renderer, max_bytes)
    media = _media_book(config, encoder, model_id or model)
    if media is not None:
        media.release = release
    if media is not None and "audio" in media.placeholders:
        media.sample_rate = _sample_rate(model, local_files_only)
    return Prompter(encoder, renderer, media=media, max_bytes=max_bytes)


def _media_book(config: dict[str, Any], encoder: TextEncoder, model_id: str) -> MediaBook | None:
    """Start the book of a model whose images or sounds stand behind one special token each.

    None: it has none. Models that think, and speak by another model, describe the former apart.
    """
    thinker = config.get("thinker_config")
    configs = (config, thinker if isinstance(thinker, dict) else {})
    placeholders: dict[MediaKind, Placeholder] = {}
    for kind in _MEDIA_KINDS:
        ids = [each.get(f"{kind}_token_{end}") for each in configs for end in ("id", "index")]
        token_id = next((each for each in ids if type(each) is int and 0 <= each < 1 << 32), None)
        token = encoder.token_apart(token_id) if token_id is not None else None
        if token_id is not None and token is not None:
            if all(token_id != known.token_id for known in placeholders.values()):
                placeholders[kind] = Placeholder(token, token_id)
    return MediaBook(placeholders, model_id) if placeholders else None


def _sample_rate(model: str, local_files_only: bool) -> int | None:
    """Read the rate of the sound that a model hears; None: its files do not say."""
    from transformers.utils.hub import cached_file

    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            found = cached_file(model, name, local_files_only=local_files_only)
            described = json.loads(Path(found or "").read_text(encoding="utf-8"))
            described = described.get("feature_extractor", described)
            rate = described.get("sampling_rate")
        except (OSError, ValueError, AttributeError):  # there is none, or not as it should be
            continue
        if type(rate) is int:
            return rate
    return None


def _missing(library: str, extra: str) -> str:
    return f"{library} is not installed. {install_hint(extra)}"


def _harmony_prompter(encoder: TextEncoder, unused: ChatRenderer, max_bytes: int) -> Prompter:
    if importlib.util.find_spec("openai_harmony") is None:
        reason = _missing("openai_harmony", "harmony")
        return Prompter(encoder, None, asks_engine=False, reason=reason, max_bytes=max_bytes)
    from router.tokens.harmony_encoder import HarmonyEncoder

    return Prompter(
        encoder,
        HarmonyRenderer(unused.wants_system_first),
        chat_encoder=HarmonyEncoder(),
        asks_engine=False,
        max_bytes=max_bytes,
    )


def _is_given(tokenizer_mode: str | None) -> bool:
    return tokenizer_mode is not None and tokenizer_mode.lower() != "auto"


def _mistral_or_hf(model: str, local_files_only: bool) -> str:
    """Find by a model's files whether the engine takes Mistral's own tokenizer.

    Raises:
        NeedsEngine: they cannot be listed.
    """
    if Path(model).is_dir():
        return modes.MISTRAL
    from huggingface_hub import HfApi

    why = "renderer mistral or hf: name it in tokens.tokenizer_modes"
    if local_files_only:
        raise NeedsEngine("model", why)
    try:
        files = HfApi().list_repo_files(model)
    except Exception as exc:  # no network, no such name, whatever the hub answers
        raise NeedsEngine("model", why) from exc
    return modes.MISTRAL if modes.is_mistral_format(files) else modes.HF


def _mistral_prompter(
    model: str, template: str | None, local_files_only: bool, max_bytes: int
) -> Prompter:
    """Make the prompter of a model with Mistral's own tokenizer.

    Raises:
        NeedsEngine: the library or the tokenizer is missing, or cannot be used here.
    """
    if importlib.util.find_spec("mistral_common") is None:
        raise NeedsEngine("model", _missing("mistral_common", "mistral"))
    from router.tokens.mistral import MAX_INLINE_ITEMS, MistralRenderer
    from router.tokens.mistral_encoder import MistralEncoder, MistralTextEncoder, load_tokenizer

    tokenizer = load_tokenizer(model, local_files_only=local_files_only)
    texts = MistralTextEncoder(tokenizer)
    return Prompter(
        texts,
        MistralRenderer(tokenizer, template),
        chat_encoder=MistralEncoder(texts),
        max_inline_items=MAX_INLINE_ITEMS,
        max_bytes=max_bytes,
    )


def _is_kimi(model: str, local_files_only: bool) -> bool:
    """Return whether the tokenizer is Kimi's class in the model's repository."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        config = get_tokenizer_config(model, local_files_only=local_files_only)
    except Exception:  # what is wrong, loading it says
        return False
    classes = config.get("auto_map")
    if isinstance(classes, dict):
        classes = classes.get("AutoTokenizer")
    return bool(config.get("tokenizer_class") == KIMI_CLASS and classes)


def _kimi_prompter(
    model: str, template: str | None, local_files_only: bool, max_bytes: int, release: Release
) -> Prompter:
    """Make the prompter of a model with Kimi's tokenizer.

    Raises:
        NeedsEngine: the library or the tokenizer is missing, or cannot be used here.
    """
    if importlib.util.find_spec("tiktoken") is None:
        raise NeedsEngine("model", _missing("tiktoken", "kimi"))
    from router.tokens.kimi import KimiArguments, KimiEncoder, load_kimi

    tokenizer, code = load_kimi(model, local_files_only=local_files_only)
    templates = _Templates(tokenizer, _processor_template(model, local_files_only), template)
    return Prompter(
        KimiEncoder(tokenizer, templates.hints()),
        ChatRenderer(templates.find, tokenizer.special_tokens_map, KimiArguments(code), release),
        max_bytes=max_bytes,
    )


def _load_config(model: str, local_files_only: bool) -> dict[str, Any]:
    """Load a model's config.json; a directory in Mistral's own format needs none."""
    from transformers import PretrainedConfig

    if Path(model, "params.json").is_file() and not Path(model, "config.json").exists():
        return {}
    try:
        config, _ = PretrainedConfig.get_config_dict(model, local_files_only=local_files_only)
    except Exception as exc:  # whatever a broken or foreign model directory raises
        raise NeedsEngine("model", f"{type(exc).__name__}: {exc}") from exc
    found: dict[str, Any] = config
    return found


def _load_tokenizer(model: str, mode: str, local_files_only: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"truncation_side": "left", "local_files_only": local_files_only}
    try:
        if mode in WITHOUT_TEMPLATE:
            return PreTrainedTokenizerFast.from_pretrained(model, **options)
        return AutoTokenizer.from_pretrained(model, mistral_format=False, **options)
    except BaseException as exc:  # as above, panics of Rust included
        if not is_failure(exc):
            raise
        raise NeedsEngine("model", f"{type(exc).__name__}: {exc}") from exc


def _check_tokenizer(tokenizer: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NeedsEngine("model", f"{kind.__name__} is not a fast tokenizer")
    for name in _OVERRIDABLE:
        if getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None):
            raise NeedsEngine("model", f"{kind.__name__} has its own {name}")
    if getattr(tokenizer, "split_special_tokens", False):
        raise NeedsEngine("model", "the tokenizer splits special tokens")


def _check_config(config: dict[str, Any], mode: str) -> None:
    if mode not in (modes.HF, modes.HARMONY, modes.MISTRAL, *WITHOUT_TEMPLATE):
        raise NeedsEngine("model", f"renderer {mode}")
    if config.get("model_type") in _OTHER_TOKENIZER_CLASS:
        raise NeedsEngine("model", f"tokenizer class of {config['model_type']}")
    if config.get("is_encoder_decoder"):
        raise NeedsEngine("model", "encoder-decoder")


class _Templates:
    """Finds the template as the engine does: the given one, the processor's, the tokenizer's."""

    __slots__ = ("_given", "_processor", "_tokenizer")

    def __init__(self, tokenizer: Any, processor: str | None, given: str | None) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._given = given

    def find(self, with_tools: bool) -> str:
        """Return the template's text.

        Raises:
            LookupError: there is none, or which one the engine takes is not certain.
        """
        tools: list[Any] | None = [] if with_tools else None
        try:
            text: str = self._tokenizer.get_chat_template(self._given, tools=tools)
        except ValueError as exc:
            raise LookupError(str(exc)) from exc
        if self._given is None and not with_tools and self._processor not in (None, text):
            raise LookupError("the processor's chat template is not the tokenizer's")
        return text

    def hints(self) -> str:
        """Return a text in which boundary tokens are to be looked for."""
        try:
            return self.find(with_tools=True)
        except LookupError:
            return ""


def _read_template(given: str | Path | None) -> str | None:
    """Read `--chat-template`: a file if there is one of this name, else the template itself.

    Raises:
        OSError: a Path that cannot be read.
    """
    if given is None or isinstance(given, Path):
        return given.read_text() if given is not None else None
    try:
        return Path(given).read_text()
    except (OSError, ValueError):  # too long for a path, a NUL in it: the text of a template
        return given


def _processor_template(model: str, local_files_only: bool) -> str | None:
    """Read the template that a multimodal model's processor would bring; None: there is none."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(model, "chat_template.json", local_files_only=local_files_only)
        if found is None:
            return None
        return str(json.loads(Path(found).read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError):  # there is none, or the hub does not answer
        return None
