"""The outcome "only the engine can make this prompt": never a guess in its place."""

from __future__ import annotations


class NeedsEngine(Exception):
    """Ask the engine for this prompt's tokens, or forward without knowing them.

    Not an error of the client or the engine, and no RouterError: the data path catches it.
    `reason` comes from a small closed set per release (a metric's label); `detail` is for the log
    and holds no prompt text.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
