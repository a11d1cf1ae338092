"""Model directories with a tokenizer like Kimi's: `tiktoken.model`, and code of its own.

The code is Moonshot's and not kept here. To prove against it, put it into a directory, as `k2.py`
(of Kimi K2 or K2 Thinking), and `k25.py` with `tool_declaration_ts.py` (of K2.5 or later), and name
that in WARMROUTE_KIMI_CODE. Otherwise there is only what is read of it, and vLLM cannot load it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

from tests.tokens.mistral_models import words
from tests.tokens.vllm_routes import MODEL

VERSIONS = {"kimi-k2": "k2", "kimi-k2-thinking": "k2", "kimi-k2.5-tools": "k25"}
"""Which code a family's tokenizer has."""

SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Kimi's, by their place behind the vocabulary."""

_SPECIALS = frozenset(SPECIALS.values())
_CALLS = range(11, 24)  # no special tokens, only added ones

CODE = r'''
class TikTokenTokenizer(PreTrainedTokenizer):
    num_reserved_special_tokens = 256
    pat_str = "|".join([
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ])

    def __init__(self, additional_special_tokens=None, added_tokens_decoder=None, **kwargs):
        additional_special_tokens = ["<|im_end|>", "[EOT]"]
        range(num_base_tokens, num_base_tokens + self.num_reserved_special_tokens + 2)
        super().__init__(additional_special_tokens=additional_special_tokens)

    def encode(self, text):
        (400_000, 25_000, "all")

    def _tokenize(self, text):
        return self.encode(text)

    def apply_chat_template(self, conversation, tools=None, tokenize=False, **kwargs):
        tools = deep_sort_dict(tools)
        return super().apply_chat_template(conversation, tools=tools, tokenize=tokenize, **kwargs)
'''
"""Like K2's in all that is read of it."""

_NEWER = {
    " + 2)": ")",
    "tokens=additional_special_tokens)": "tokens=additional_special_tokens,\n"
    "            added_tokens_decoder=added_tokens_decoder)",
    "tokenize=False, **kwargs": "tokenize=False, thinking=True, preserve_thinking=False, **kwargs",
    "        tools = deep_sort_dict(tools)": "        tools = deep_sort_dict(tools)\n"
    "        kwargs['tools_ts_str'] = encode_tools_to_typescript_style(tools)",
}


def build_model(name: str, into: Path) -> Path:
    """Write a family's model directory, without weights."""
    version = VERSIONS[name]
    model = into / name
    model.mkdir(parents=True)
    shutil.copy(MODEL / "config.json", model)
    vocabulary = [word for word in words() if word.decode(errors="replace") not in _SPECIALS]
    lines = (f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(vocabulary))
    (model / "tiktoken.model").write_text("".join(lines))
    (model / "tokenizer_config.json").write_text(json.dumps(_config(len(vocabulary))))
    kept = os.environ.get("WARMROUTE_KIMI_CODE")
    if kept is None:
        (model / "tokenization_kimi.py").write_text(_code(version))
        return model
    shutil.copy(Path(kept, f"{version}.py"), model / "tokenization_kimi.py")
    if version != "k2":
        shutil.copy(Path(kept, "tool_declaration_ts.py"), model)
    return model


def _code(version: str) -> str:
    code = CODE
    for old, new in _NEWER.items() if version != "k2" else ():
        assert old in code
        code = code.replace(old, new)
    return code


def _config(first: int) -> dict[str, object]:
    added = {
        str(first + place): {
            "content": token,
            "special": place not in _CALLS,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for place, token in SPECIALS.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
