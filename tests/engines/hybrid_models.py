"""Models without weights: tiny tokenizer, several KV groups or heads; prompts for recordings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from loadtest.tiny_model import MODEL_DIR

WINDOW_TOKENS: Final = 96

_WINDOWS: Final[dict[str, Any]] = {  # two groups of windows, one of full attention
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 64,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
_CONVOLUTIONS: Final[dict[str, Any]] = {  # to vLLM a kind of Mamba; blocks of half the size
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 64,
    "norm_eps": 1e-5,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 32,
    "block_norm_eps": 1e-5,
    "block_use_swiglu": True,
    "block_ffn_dim_multiplier": 1.0,
}
_MTP: Final[dict[str, Any]] = {  # windows and full attention, and a layer that drafts
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "num_hidden_layers": 3,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense", "dense"],
    "num_nextn_predict_layers": 1,
}
_DRAFTS: Final[dict[str, Any]] = {  # of EAGLE: a layer that is fed the target's hidden states
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
}
_TWO_HEADS: Final[dict[str, Any]] = {"num_key_value_heads": 2}  # one for each of two ranks
_EXPERTS: Final[dict[str, Any]] = {"num_experts": 2}
"""To vLLM a model of experts, which alone may have ranks behind ports of their own; its layers are
dense, for the CPU build cannot hand tokens to experts of another rank (0.32.0, `all_gatherv`)."""
CONFIGS: Final = {"windows": _WINDOWS, "convolutions": _CONVOLUTIONS}
_OTHERS: Final = {
    "two-heads": _TWO_HEADS,
    "experts": _EXPERTS,
    "drafts": _DRAFTS,
    "mtp-dense": {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    },
    "mtp-windows": _MTP,
}


def make_model(kind: str, directory: Path) -> Path:
    """Write a model directory for `--load-format dummy`; return it. `drafts`: to draft for one."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    changes = (CONFIGS | _OTHERS)[kind]
    (directory / "config.json").write_text(json.dumps(config | changes))
    for file in MODEL_DIR.glob("*token*.json*"):
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_bytes(
        (MODEL_DIR / "chat_template.jinja").read_bytes()
    )
    return directory


def prompt_of(request: dict[str, Any], table: list[dict[str, Any]]) -> list[int]:
    """Draw the tokens of a prompt, the same for the same parts, behind an earlier answer."""
    tokens = []
    if "answer" in request:
        earlier = table[request["answer"]]
        tokens = prompt_of(earlier, table) + earlier["answered"]
    for name, num_tokens in request["parts"]:
        tokens += random.Random(name).choices(range(300, 8000), k=num_tokens)
    return tokens
