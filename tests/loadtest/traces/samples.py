"""Lines of traces, good ones, to be varied by tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def mooncake(
    timestamp: float, input_length: int, hash_ids: list[int], **fields: Any
) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": 40,
        "hash_ids": hash_ids,
        **fields,
    }


def bailian(chat_id: int, parent: int, timestamp: float, **fields: Any) -> dict[str, Any]:
    return {
        "chat_id": chat_id,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": 33,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": [7, 8, chat_id],
        **fields,
    }


def write(path: Path, lines: list[Any]) -> Path:
    """Write JSON Lines; bytes go in as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path
