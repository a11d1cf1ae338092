"""The outcome that only the engine can make a prompt: nothing is guessed instead."""

from __future__ import annotations


class NeedsEngine(Exception):
    """Ask the engine for this prompt's tokens, or forward without knowing them.

    Not an error of the client or the engine, and no RouterError: the request path catches it.

    reason: Of a small closed set per release: a metric's label.
    detail: For the log; contains no prompt text.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
