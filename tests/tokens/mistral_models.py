"""Model directories with tokenizers of Mistral's own, and conversations that suit them.

The SentencePiece ones come with Mistral's library. Of the tekken ones it has only two of version 3,
which take two seconds to load: here are small ones of each version, with the tiny model's words.
"""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.conversations import Conversation, Turn
from tests.tokens.vllm_routes import MODEL

VERSIONS = {
    "mistral-v1": 1,
    "mistral-v2": 2,
    "mistral-v3": 3,
    "mistral-v7": 7,
    "mistral-tekken-v3": 3,
    "mistral-tekken-v7": 7,
    "mistral-tekken-v11": 11,
    "mistral-tekken-v13": 13,
    "mistral-tekken-v15": 15,
    "mistral-nemo": 3,
}
"""Versions of the rules, by family; `mistral-nemo` is a real tekken."""

_FILES = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v2": "mistral_instruct_tokenizer_240216.model.v2",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral-v7": "mistral_instruct_tokenizer_241114.model.v7",
    "mistral-nemo": "tekken_240718.json",
}
_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [AUDIO] [BEGIN_AUDIO] "
    "[TRANSCRIBE] [THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]"
).split()
_SETTINGS = {
    "reasoning_effort": {
        "type": "enum",
        "values": ["none", "high"],
        "accepts_none": True,
        "default": "none",
    }
}


def build_model(name: str, into: Path) -> Path:
    """Write a family's model directory, without weights."""
    model = into / name
    model.mkdir(parents=True)
    shutil.copy(MODEL / "config.json", model)
    if name not in _FILES:
        (model / "tekken.json").write_text(json.dumps(_tekken(VERSIONS[name])))
        return model
    import mistral_common

    source = Path(mistral_common.__file__).parent / "data" / _FILES[name]
    (model / (source.name if source.suffix != ".json" else "tekken.json")).symlink_to(source)
    return model


def suited(name: str, conversation: Conversation, index: int) -> Conversation:
    """Change a conversation into one that the family's rules take; every fourth stays as it is.

    These rules are strict: of the others, they would refuse nearly all.
    """
    version = VERSIONS.get(name)
    if version is None or index % 4 == 0:
        return conversation
    turns: list[Turn] = []
    for turn in conversation.turns:
        before = turns[-1].role if turns else "system"
        if turn.role == "system" and before in ("assistant", "tool"):
            continue
        if version == 1 and (turn.role == "tool" or turn.calls):
            continue
        changed = replace(
            turn,
            thinking=turn.thinking if version >= 13 else None,
            calls=tuple(replace(call, id=_call_id(call.id, index)) for call in turn.calls),
            call_id=_call_id(turn.call_id, index),
        )
        if version < 7 and changed.calls:
            changed = replace(changed, texts=None)
        if index % 2 and changed.texts:  # parts are what the Responses route has no rule for
            changed = replace(changed, texts=("\n".join(changed.texts),))
        turns.append(changed)
    effort = conversation.effort if version < 15 or index % 3 else "high"
    is_plain = conversation.is_plain or bool(index % 2)
    return replace(conversation, turns=tuple(turns), kwargs=None, effort=effort, is_plain=is_plain)


def _call_id(name: str, index: int) -> str:
    """Make an id of nine characters; some with more in front, which the chat route cuts off."""
    short = "".join(each for each in name if each.isalnum()).rjust(9, "x")[-9:]
    return f"chatcmpl-tool-{short}" if name and index % 5 == 0 else short


def words() -> list[bytes]:
    """Return the tiny model's tokens by rank, all bytes first."""
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    in_bytes = _byte_level()
    found = [bytes([number]) for number in range(256)]
    known = set(found)
    for word in sorted(vocabulary, key=vocabulary.__getitem__):
        data = bytes(in_bytes[each] for each in word) if set(word) <= in_bytes.keys() else b""
        if data and data not in known:
            known.add(data)
            found.append(data)
    return found


def _tekken(version: int) -> dict[str, Any]:
    vocabulary = words()
    specials = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(_SPECIALS)
    ]
    made: dict[str, Any] = {
        "config": {
            "pattern": _PATTERN,
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": len(vocabulary) + len(_SPECIALS),
            "default_num_special_tokens": len(_SPECIALS),
            "version": f"v{version}",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(vocabulary)
        ],
        "special_tokens": specials,
    }
    return made | ({"model_settings_builder": _SETTINGS} if version >= 15 else {})


def _byte_level() -> dict[str, int]:
    """Map the characters by which GPT-2's tokenizers write bytes to the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in plain]
    return {
        **{chr(number): number for number in plain},
        **{chr(256 + index): number for index, number in enumerate(others)},
    }
