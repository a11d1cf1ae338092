"""A secret in a file of its own: an engine's API key, the admin token."""

from __future__ import annotations

from pathlib import Path

from router.base.errors import ConfigError


def read_secret(file: Path | None, key: str) -> str | None:
    """Read the secret that `key` of the configuration names; None: it names none.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is None:
        return None
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(f"{key}: {file}: {reason}", param=key) from exc
    if not secret:
        raise ConfigError(f"{key}: {file} is empty", param=key)
    return secret
