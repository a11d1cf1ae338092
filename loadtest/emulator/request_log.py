"""A log of generations: one JSON line at the start and one at the end of each, never buffered.

It shows afterwards how often a request was computed, even if the process was killed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from loadtest.emulator.generation import Generation


class RequestLog:
    """Appends to a file that several lives of a replica share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def started(self, request_id: str) -> None:
        """Record the start of a request, by its `X-Request-Id`."""
        self._write({"request": request_id, "is_end": False})

    def ended(self, request_id: str, generations: Sequence[Generation], is_whole: bool) -> None:
        """Record the end; `is_whole`: the last byte was handed to the connection."""
        self._write(
            {
                "request": request_id,
                "is_end": True,
                "is_whole": is_whole,
                "num_tokens": sum(request.num_output_tokens for request in generations),
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, orjson.dumps(line) + b"\n")
