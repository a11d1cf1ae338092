"""Which renderer the engine takes for a model: by its architecture, its type and its files.

Sources: vLLM 0.32.0, config/model.py (tokenizer_mode), tokenizers/registry.py
(resolve_tokenizer_args), renderers/online_renderer.py (use_harmony).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

HF: Final = "hf"
HARMONY: Final = "harmony"
MISTRAL: Final = "mistral"
DEEPSEEK_V32: Final = "deepseek_v32"
DEEPSEEK_V4: Final = "deepseek_v4"
DEEPSEEK_V41: Final = "deepseek_v41"

_BY_ARCHITECTURE = {
    "MoonshotKimiaForCausalLM": "kimi_audio",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "DeepseekV4ForCausalLM": DEEPSEEK_V4,
    "DeepseekV4ForConditionalGeneration": DEEPSEEK_V4,
    "DeepseekV41ForCausalLM": DEEPSEEK_V41,
    "GptOssForCausalLM": HARMONY,
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
    "Alpamayo2Super": "alpamayo2_super",  # 0.33
}
_MISTRAL_FAMILY = ("Mistral", "Mixtral", "Ministral", "Pixtral", "Voxtral", "Magistral")


def find_mode(model: str, config: dict[str, Any], given: str | None = None) -> str:
    """Return the mode in which the engine renders a model's chats.

    Args:
        model: A directory or a name on the hub.
        config: Its config.json.
        given: The engine's `--tokenizer-mode`; None: it was not given one.

    Not only modes that are rendered here. A name on the hub of Mistral's family is taken for one
    with Mistral's own tokenizer: whether it is, its files say (`is_mistral_format`).
    """
    if config.get("model_type") == "gpt_oss":  # whatever the tokenizer's mode
        return HARMONY
    if given is not None and given.lower() != "auto":
        return given.lower()
    for architecture in config.get("architectures") or ():
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture]
    if Path(model).is_dir():
        return MISTRAL if is_mistral_format(os.listdir(model)) else HF
    families = [each for each in config.get("architectures") or () if _is_mistral_family(each)]
    return MISTRAL if families else HF


def is_mistral_format(files: Iterable[str]) -> bool:
    """Return whether a model's files make the engine take Mistral's own tokenizer."""
    names = list(files)
    return all(
        any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
        for patterns in (("consolidated*.safetensors",), ("tekken.json", "tokenizer.model.v*"))
    )


def _is_mistral_family(architecture: str) -> bool:
    return architecture.startswith(_MISTRAL_FAMILY)
