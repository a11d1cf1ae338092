"""Which renderer the engine takes for a model: by its architecture, its type and its files.

Sources: vLLM 0.32.0, config/model.py (tokenizer_mode), tokenizers/registry.py
(resolve_tokenizer_args), renderers/online_renderer.py (use_harmony).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

HF: Final = "hf"
HARMONY: Final = "harmony"
MISTRAL: Final = "mistral"
DEEPSEEK_V32: Final = "deepseek_v32"
DEEPSEEK_V4: Final = "deepseek_v4"

_BY_ARCHITECTURE = {
    "MoonshotKimiaForCausalLM": "kimi_audio",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "DeepseekV4ForCausalLM": DEEPSEEK_V4,
    "DeepseekV4ForConditionalGeneration": DEEPSEEK_V4,
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "GptOssForCausalLM": HARMONY,
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
}
_MISTRAL_FAMILY = ("Mistral", "Mixtral", "Ministral", "Pixtral", "Voxtral", "Magistral")


def find_mode(model: str, config: dict[str, Any], given: str | None = None) -> str:
    """Return the mode in which the engine renders a model's chats.

    Args:
        model: A directory or a name on the hub.
        config: Its config.json.
        given: The engine's `--tokenizer-mode`; None: it was not given one.

    Not only modes that are rendered here.
    """
    if config.get("model_type") == "gpt_oss":  # whatever the tokenizer's mode
        return HARMONY
    if given is not None and given.lower() != "auto":
        return given.lower()
    for architecture in config.get("architectures") or ():
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture]
        if architecture.startswith(_MISTRAL_FAMILY) and _may_be_mistral_format(model):
            return MISTRAL
    return HF


def _may_be_mistral_format(model: str) -> bool:
    """Return whether the engine may take Mistral's own tokenizer; a hub name cannot be listed."""
    directory = Path(model)
    if not directory.is_dir():
        return True
    own = [*directory.glob("tekken.json"), *directory.glob("tokenizer.model.v*")]
    return bool(own) and any(directory.glob("consolidated*.safetensors"))
