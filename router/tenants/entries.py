"""New keys for tenants, and their entries in the tenants' file."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from router.base.errors import ConfigError
from router.tenants.client_keys import digest_of, new_key, written
from router.tenants.file import NAME, NAME_HAS, parse, read

_HEAD = """\
# Tenants of warmroute (docs/guides/tenants.md). Keep it secret: cache salts are derived from it.
secret: {secret}
tenants:
"""


def make(name: str) -> tuple[str, str]:
    """Create a key for a tenant; return it and its entry for the file.

    Raises:
        ConfigError: the name is not allowed.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"a tenant's name has {NAME_HAS}", param="name")
    key = new_key()
    entry = f"  - name: {name}\n    keys:\n      - {written(digest_of(key))}\n"
    return key, entry


def add(path: Path, name: str) -> str:
    """Create a key for a new tenant, add its entry to the file, and return the key.

    The file is created if there is none, readable by its owner only, and replaced as a whole. Its
    comments and its order stay: the entry goes to its end.

    Raises:
        ConfigError: the file, or what it would become, cannot be used; it is as it was.
    """
    key, entry = make(name)
    if not path.exists():
        _replace(path, _HEAD.format(secret=secrets.token_hex(32)) + entry, mode=0o600)
        return key
    known = read(path)
    if any(tenant.name == name for tenant in known.tenants):
        raise ConfigError(
            f"{path}: {name!r} is there already; make a key without --file and add its digest to "
            "that tenant's keys",
            param="name",
        )
    text = path.read_text(encoding="utf-8").rstrip("\n") + "\n" + entry
    try:
        extended = parse(text.encode())
    except ConfigError:
        extended = None
    is_same = extended is not None and extended.secret == known.secret
    if extended is None or not is_same or extended.tenants[:-1] != known.tenants:
        raise ConfigError(
            f"{path}: does not end with a list of tenants in block style; make a key without "
            "--file and add its entry yourself"
        )
    _replace(path, text, mode=path.stat().st_mode & 0o777)
    return key


def _replace(path: Path, text: str, *, mode: int) -> None:
    """Write a file whole, so that no router reads half of it.

    Raises:
        ConfigError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
            stream.write(text)
        os.replace(new, path)
    except OSError as exc:
        new.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {exc.strerror}") from exc
