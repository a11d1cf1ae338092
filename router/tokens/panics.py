"""Failures of libraries that are written in Rust: a panic is raised as no `Exception`."""

from __future__ import annotations


def is_failure(exc: BaseException) -> bool:
    """Return whether a library failed, panics included; False: an interrupt, a cancellation."""
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"
