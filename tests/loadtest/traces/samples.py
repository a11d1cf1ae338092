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


def messages(*texts: str, **fields: Any) -> dict[str, Any]:
    """A request of messages, user and assistant in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": said, "output_length": 1, **fields}


def write(path: Path, lines: list[Any]) -> Path:
    """Write JSON Lines; bytes go in as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path
