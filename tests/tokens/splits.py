"""Tokenizers that give a text as many tokens as another one does, and other ids.

`2024` begins with `20` where digits are taken by threes from the left (`202|4`), and with `2` where
they are taken from the right (`2|024`). Releases of transformers differ so on the same files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from loadtest.tiny_model import MODEL_DIR

Side = Literal["left", "right", "none", "violin"]

_PATTERNS = {
    "left": r"\p{N}{1,3}",
    "right": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "violin": " vi(?=olin)",  # else it is as `none`: no text of a probe has the word
}


def model_with(folder: Path, digits: Side, *, template: str | None = None) -> str:
    """Copy the tiny model with digits split from one side; `template`: another chat template.

    `violin`: only that word is split in another way, into as many tokens.
    """
    shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = folder / "tokenizer.json"
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if digits != "none":
        split = {"type": "Split", "pattern": {"Regex": _PATTERNS[digits]}, "behavior": "Isolated"}
        read["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, read["pre_tokenizer"]],
        }
    file.write_text(json.dumps(read), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)
