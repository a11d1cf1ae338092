"""Find which renderer the engine takes for a model: by its architecture, its type and its files.

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
KIMI: Final = "kimi"  # to the engine it is `hf`, with a tokenizer class of the model's own
DEEPSEEK_V32: Final = "deepseek_v32"
DEEPSEEK_V4: Final = "deepseek_v4"
DEEPSEEK_V41: Final = "deepseek_v41"

KIMI_CLASS: Final = "TikTokenTokenizer"

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
        given: The engine's `--tokenizer-mode`; None: not set.

    Includes modes that are not known here. A name on the hub of Mistral's family gets Mistral's
    mode: only its files tell whether it has such a tokenizer (`is_mistral_format`).
    """
    if config.get("model_type") == "gpt_oss":  # whatever the tokenizer's mode
        return HARMONY
    if given is not None:
        return given
    architectures = config.get("architectures") or ()
    for architecture in architectures:
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture]
    if Path(model).is_dir():
        return MISTRAL if is_mistral_format(os.listdir(model)) else HF
    return MISTRAL if any(each.startswith(_MISTRAL_FAMILY) for each in architectures) else HF


def is_mistral_format(files: Iterable[str]) -> bool:
    """Return whether a model's files make the engine take Mistral's own tokenizer."""
    names = list(files)
    return all(
        any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
        for patterns in (("consolidated*.safetensors",), ("tekken.json", "tokenizer.model.v*"))
    )


def is_kimi(tokenizer_config: dict[str, Any]) -> bool:
    """Return whether the tokenizer is Kimi's class in the model's repository."""
    classes = tokenizer_config.get("auto_map")
    if isinstance(classes, dict):
        classes = classes.get("AutoTokenizer")
    return bool(tokenizer_config.get("tokenizer_class") == KIMI_CLASS and classes)
