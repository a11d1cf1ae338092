"""The outcomes that leave a prompt to the engine: nothing is guessed instead.

Libraries written in Rust may panic, and a panic is no `Exception`: `is_failure` recognizes both.
"""

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


def is_failure(exc: BaseException) -> bool:
    """Return whether a library failed, panics included; False: an interrupt or a cancellation."""
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"
