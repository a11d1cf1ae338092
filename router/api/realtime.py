"""The route `/v1/realtime`, and its error event.

Source: vLLM 0.32.0, entrypoints/speech_to_text/realtime (protocol.py). Messages are not read. As in
OpenAI's API the query names the model: `?model=`.
"""

from __future__ import annotations

from typing import Final

import orjson

PATH: Final = "/v1/realtime"


def error_text(message: str, code: str) -> str:
    """Write an error as the engine does."""
    return orjson.dumps({"type": "error", "error": message, "code": code}).decode()
