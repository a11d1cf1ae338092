"""The admin API's token: where it is kept, created at the first start, read by `warmroute`.

One file for all routers of a user on a machine, so that `warmroute replicas` finds it without being
asked to. A router that is given `admin.token_file` uses that one; it is never created, so that a
misspelled name does not become a new secret.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from router.base.errors import ConfigError
from router.config import Config

_NUM_BYTES: Final = 32
_KEY: Final = "admin.token_file"


def default_file(environ: Mapping[str, str]) -> Path:
    """Return the file of this user: in $XDG_STATE_HOME, else ~/.local/state (XDG directories)."""
    state = environ.get("XDG_STATE_HOME")
    home = Path(environ.get("HOME") or "/")
    return (Path(state) if state else home / ".local" / "state") / "warmroute" / "admin-token"


def with_token(config: Config, environ: Mapping[str, str]) -> Config:
    """Add the user's own token if there is none, created (mode 0600) if it is not there.

    Raises:
        ConfigError: it cannot be created or read, or others can read it.
    """
    if config.admin.open or config.admin.token_file is not None:
        return config
    file = default_file(environ)
    try:
        _make(file)
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as exc:
        raise ConfigError(
            f"{_KEY}: the token of the admin API cannot be written to {file}: {exc.strerror}; name "
            "a file with a token (admin.token_file), or set XDG_STATE_HOME",
            param=_KEY,
        ) from exc
    if mode & 0o077:
        raise ConfigError(
            f"{_KEY}: other users can read {file} (mode {mode:04o}); run chmod 600, or delete it "
            "to get a new one",
            param=_KEY,
        )
    return replace(config, admin=replace(config.admin, token_file=file))


def _make(file: Path) -> None:
    """Write a new token if there is none; of several routers that start at once, one does."""
    if file.exists():
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(_NUM_BYTES) + "\n")
        with suppress(FileExistsError):
            os.link(draft, file)  # whole or not at all, and never over another's
    finally:
        draft.unlink()
