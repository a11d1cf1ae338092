"""Recognize failures of libraries written in Rust: their panics are no `Exception`."""

from __future__ import annotations


def is_failure(exc: BaseException) -> bool:
    """Return whether a library failed, panics included; False: an interrupt or a cancellation."""
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"
