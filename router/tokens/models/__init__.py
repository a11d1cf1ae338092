"""Model families that engines render with code of their own, not with a Jinja template alone.

Each module here has one function `load`, and is imported for a model of its family only: its
library is an optional extra. To add a family, write such a module with a `Renderer`, whose `parts`
writes a prompt, and add a row to `FAMILIES`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol, cast

from router.base.system import install_hint
from router.tokens.model_files import ModelFiles
from router.tokens.models import modes
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompter import Prompter


class ModelFamily(NamedTuple):
    """Where a family is: a module here, and the library of the extra that it needs."""

    module: str
    library: str | None = None
    extra: str = ""


FAMILIES: Final[Mapping[str, ModelFamily]] = {
    modes.DEEPSEEK_V32: ModelFamily("deepseek_v32"),
    modes.DEEPSEEK_V4: ModelFamily("deepseek_v4"),
    modes.DEEPSEEK_V41: ModelFamily("deepseek_v4"),
    modes.HARMONY: ModelFamily("harmony"),  # texts need no library
    modes.KIMI: ModelFamily("kimi", "tiktoken", "kimi"),
    modes.MISTRAL: ModelFamily("mistral", "mistral_common", "mistral"),
}
"""The families, by mode; see `modes`."""


class _Module(Protocol):
    def load(self, files: ModelFiles, max_bytes: int) -> Prompter: ...


def find_family(files: ModelFiles) -> ModelFamily | None:
    """Find the family of a model; None: it has a tokenizer.json and a Jinja template.

    Raises:
        NeedsEngine: the family is not known here, or does not follow from the model's files.
    """
    mode = modes.find_mode(files.name, files.config, files.mode)
    if mode == modes.MISTRAL and files.mode is None and not Path(files.name).is_dir():
        mode = _ask_hub(files)
    if mode == modes.HF and modes.is_kimi(files.tokenizer_config):
        mode = modes.KIMI
    if mode != modes.HF and mode not in FAMILIES:
        raise NeedsEngine("model", f"renderer {mode}")
    return FAMILIES.get(mode)


def load(family: ModelFamily, files: ModelFiles, max_bytes: int) -> Prompter:
    """Load a model of a family.

    Raises:
        NeedsEngine: the library or the tokenizer is missing, or cannot be used here.
    """
    if family.library is not None:
        lacking = missing(family.library, family.extra)
        if lacking is not None:
            raise NeedsEngine("model", lacking)
    module = cast(_Module, importlib.import_module(f"{__name__}.{family.module}"))
    return module.load(files, max_bytes)


def missing(library: str, extra: str) -> str | None:
    """Return what to install if a library is missing; None: it is there."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed. {install_hint(extra)}"


def _ask_hub(files: ModelFiles) -> str:
    """Find by a model's files on the hub whether the engine takes Mistral's own tokenizer.

    Raises:
        NeedsEngine: they cannot be listed.
    """
    from huggingface_hub import HfApi

    why = "renderer mistral or hf: name it in tokens.tokenizer_modes"
    if files.local_files_only:
        raise NeedsEngine("model", why)
    try:
        names = HfApi().list_repo_files(files.name)
    except Exception as exc:  # no network, no such name, whatever the hub answers
        raise NeedsEngine("model", why) from exc
    return modes.MISTRAL if modes.is_mistral_format(names) else modes.HF
