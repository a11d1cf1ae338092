"""Read a model's files: its configuration, tokenizer and chat template.

From a directory, the local hub cache or the hub, by transformers itself, without torch. The import
of transformers takes more than half of a command's start, so it is where it is used.
Source: vLLM 0.32.0, renderers/hf.py (resolve_chat_template).
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from router.base.engines import V0_32, Release
from router.tokens.needs_engine import NeedsEngine, is_failure

# Methods that a tokenizer class must not override.
_OVERRIDABLE = ("__call__", "_encode_plus", "apply_chat_template", "get_chat_template")


class ModelFiles:
    """A model, and the options that its engine has for tokenizer and template.

    Args:
        name: A directory, or a name on the hub.
        chat_template: The engine's `--chat-template`: a file, a template's text, or the name of a
            template of the tokenizer. None: the model's own.
        tokenizer_mode: The engine's `--tokenizer-mode`; None: not set.
        local_files_only: Do not go to the hub.
        release: The engine's; see `router.base.engines`.

    template: The text or the name of the given template; None: none is given.
    mode: The given mode; None: the engine chooses one by the model's files.

    Raises:
        OSError: `chat_template` is a Path that cannot be read.
    """

    def __init__(
        self,
        name: str,
        *,
        chat_template: str | Path | None = None,
        tokenizer_mode: str | None = None,
        local_files_only: bool = False,
        release: Release = V0_32,
    ) -> None:
        self.name = name
        self.template = _read_template(chat_template)
        mode = (tokenizer_mode or "auto").lower()
        self.mode = None if mode == "auto" else mode
        self.local_files_only = local_files_only
        self.release = release

    @cached_property
    def config(self) -> dict[str, Any]:
        """Load config.json; a directory in Mistral's own format needs none.

        Raises:
            NeedsEngine: it is missing or broken.
        """
        from transformers import PretrainedConfig

        if Path(self.name, "params.json").is_file() and not Path(self.name, "config.json").exists():
            return {}
        try:
            config, _ = PretrainedConfig.get_config_dict(
                self.name, local_files_only=self.local_files_only
            )
        except Exception as exc:  # whatever a broken or foreign model directory raises
            raise NeedsEngine("model", f"{type(exc).__name__}: {exc}") from exc
        found: dict[str, Any] = config
        return found

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """Load tokenizer_config.json; {} if it cannot be read."""
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        try:
            config: dict[str, Any] = get_tokenizer_config(
                self.name, local_files_only=self.local_files_only
            )
        except Exception:  # loading the tokenizer tells what is wrong
            return {}
        return config

    def tokenizer(self, *, has_class: bool = True) -> Any:
        """Load the tokenizer.

        Args:
            has_class: Load the class that the model names; False: tokenizer.json alone.

        Raises:
            NeedsEngine: it cannot be loaded, or it works differently from what is known here.
        """
        tokenizer = load_tokenizer(self.name, has_class, self.local_files_only)
        check_tokenizer(tokenizer)
        return tokenizer

    def templates(self, tokenizer: Any) -> Templates:
        """Find the chat templates; `tokenizer`: the loaded one."""
        described = self.read_json("chat_template.json")
        processor = str(described.get("chat_template")) if described is not None else None
        return Templates(tokenizer, processor, self.template)

    def path(self, file: str) -> Path:
        """Return where one of the model's files is.

        Raises:
            OSError: there is none, or the hub does not answer.
        """
        from transformers.utils.hub import cached_file

        found = cached_file(self.name, file, local_files_only=self.local_files_only)
        if found is None:
            raise FileNotFoundError(file)
        return Path(found)

    def read_json(self, file: str) -> dict[str, Any] | None:
        """Read a JSON object; None: it is missing or broken."""
        try:
            found = json.loads(self.path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def load_tokenizer(name: str, has_class: bool, local_files_only: bool) -> Any:
    """Load a tokenizer; see `ModelFiles.tokenizer`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"truncation_side": "left", "local_files_only": local_files_only}
    try:
        if has_class:
            return AutoTokenizer.from_pretrained(name, mistral_format=False, **options)
        return PreTrainedTokenizerFast.from_pretrained(name, **options)
    except BaseException as exc:  # as above, panics of Rust included
        if not is_failure(exc):
            raise
        raise NeedsEngine("model", f"{type(exc).__name__}: {exc}") from exc


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that is written in Python, or has rules of its own.

    Raises:
        NeedsEngine: it is one.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NeedsEngine("model", f"{kind.__name__} is not a fast tokenizer")
    for name in _OVERRIDABLE:
        if getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None):
            raise NeedsEngine("model", f"{kind.__name__} has its own {name}")
    if getattr(tokenizer, "split_special_tokens", False):
        raise NeedsEngine("model", "the tokenizer splits special tokens")


class Templates:
    """The chat templates in the engine's order: the given one, the processor's, the tokenizer's."""

    __slots__ = ("_given", "_processor", "_tokenizer")

    def __init__(self, tokenizer: Any, processor: str | None, given: str | None) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._given = given

    def find(self, with_tools: bool) -> str:
        """Return the template's text.

        Raises:
            LookupError: there is none, or it is not certain which one the engine takes.
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
        """Return a text that contains the tokens at which prompts are cut."""
        try:
            return self.find(with_tools=True)
        except LookupError:
            return ""


def _read_template(given: str | Path | None) -> str | None:
    """Read `--chat-template`: a file if there is one of this name, else the template itself."""
    if given is None or isinstance(given, Path):
        return given.read_text() if given is not None else None
    try:
        return Path(given).read_text()
    except (OSError, ValueError):  # too long for a path, a NUL in it: the text of a template
        return given
