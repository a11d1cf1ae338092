"""Whose request it is: the tenants' file in force, looked up by key.

The file is read again when it changes. One that cannot be used changes nothing: the last good one
stays in force, the log says why, and it is counted.

The tenants' file: YAML, strict. What is wrong is refused with the field and what is allowed.

secret: 5f3c…                        # cache salts are derived from it; `openssl rand -hex 32`
tenants:
  - name: research
    keys: ["sha256:9b1c…"]           # of keys made by `warmroute tenant-key`
    models: [tiny]                   # default: all
    max_in_flight: 64                # at each router; default: no limit
    body_bytes: 8000000
    class: interactive               # interactive | batch
    weight: 2.0
    priority: 0
    cache: own                       # own | shared | the name of a group

Client keys are 256 random bits, of which only a digest is kept. A plain SHA-256 is enough. Slow
hashes (scrypt, argon2) protect passwords, which people choose and attackers guess; nothing guesses
256 random bits, however fast it may try. A key is compared by looking its digest up: what a client
can measure depends on the digest, of which it controls no bit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field

from router.base.caller import FORBIDDEN, MAX_CHARS, Caller, InFlight, cache_salt
from router.base.errors import ConfigError, Unauthorized
from router.base.system import WatchedFile
from router.config import explained, yaml_file
from router.scheduling.order import BATCH, INTERACTIVE, ServiceClass

DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
"""How a key's digest is written."""

_LONGEST_KEY: Final = 512  # characters; a longer one is not ours


def new_key() -> str:
    """Create a client key: 256 bits of the system's randomness."""
    return f"wr-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    """Digest a key, shape (32,)."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def written(digest: bytes) -> str:
    """Write a digest as the file has it."""
    return f"sha256:{digest.hex()}"


def key_in(headers: Mapping[str, str]) -> str | None:
    """Find the key a client sent: a bearer token, or Anthropic's `x-api-key`; None: it sent none.

    Args:
        headers: Case-insensitive.
    """
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "").strip()
    return key if 0 < len(key) <= _LONGEST_KEY else None


MAX_TENANTS: Final = 1000
_MAX_KEYS: Final = 16
_MIN_SECRET_CHARS: Final = 32
_MIN_SALT_CHARS: Final = 22  # 128 bits in base64
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_HAS: Final = "1 to 64 letters, digits, '.', '_' and '-'"

OWN: Final = "own"
SHARED: Final = "shared"


class TenantEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant as the file has it. None: no limit."""

    name: str
    keys: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    body_bytes: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    service_class: ServiceClass = field(name="class", default=INTERACTIVE)
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    cache: str = OWN
    salt: str | None = None


class TenantsFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tenants: tuple[TenantEntry, ...]
    secret: str | None = None


def read(path: Path) -> TenantsFile:
    """Read and check the file.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong. The message quotes no key,
            digest, salt or secret.
    """
    data = b""
    try:
        data = yaml_file.read(path)
        return parse(data)
    except ConfigError as exc:
        raise yaml_file.placed(exc, path, data) from exc


def parse(data: bytes) -> TenantsFile:
    """Read the content of a tenants' file.

    Raises:
        ConfigError: as `read`.
    """
    tree = yaml_file.parse(data)
    if not isinstance(tree, dict):
        raise ConfigError("the top level must be a mapping of tenants and secret")
    try:
        file = msgspec.convert(tree, TenantsFile)
    except msgspec.ValidationError as exc:
        raise explained(str(exc), TenantsFile) from None
    except RecursionError:
        raise ConfigError("nested too deep") from None
    _check(file)
    return file


def _check(file: TenantsFile) -> None:
    """Refuse what types cannot say.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    if not 0 < len(file.tenants) <= MAX_TENANTS:
        raise _wrong("tenants", f"name 1 to {MAX_TENANTS} tenants")
    if file.secret is not None and len(file.secret) < _MIN_SECRET_CHARS:
        raise _wrong("secret", f"needs at least {_MIN_SECRET_CHARS} characters, random ones")
    names: dict[str, str] = {}
    digests: dict[str, str] = {}
    salts: dict[str, str] = {}
    for i, tenant in enumerate(file.tenants):
        place = f"tenants[{i}]"
        if not NAME.fullmatch(tenant.name):
            raise _wrong(f"{place}.name", NAME_HAS)
        _once(names, tenant.name, f"{place}.name")
        if len(tenant.keys) > _MAX_KEYS:
            raise _wrong(f"{place}.keys", f"at most {_MAX_KEYS} keys")
        for j, digest in enumerate(tenant.keys):
            if not DIGEST.fullmatch(digest):
                raise _wrong(
                    f"{place}.keys[{j}]",
                    "must be sha256: and 64 hexadecimal digits, as `warmroute tenant-key` prints "
                    "it (the digest of a key, not the key)",
                )
            _once(digests, digest, f"{place}.keys[{j}]")
        if tenant.models is not None and not tenant.models:
            raise _wrong(f"{place}.models", "name at least one model, or leave it out: all")
        _check_cache(tenant, file.secret is not None, place)
        if tenant.salt is not None:
            _once(salts, tenant.salt, f"{place}.salt")


def _check_cache(tenant: TenantEntry, has_secret: bool, place: str) -> None:
    if not NAME.fullmatch(tenant.cache):
        raise _wrong(
            f"{place}.cache",
            f"{OWN}, {SHARED}, or the name of a group: 1 to 64 letters, digits, '.', '_', '-'",
        )
    if tenant.salt is not None:
        if tenant.cache != OWN:
            raise _wrong(f"{place}.salt", f"is for cache: {OWN} alone")
        is_long = _MIN_SALT_CHARS <= len(tenant.salt) <= MAX_CHARS
        if not is_long or FORBIDDEN & set(tenant.salt):
            raise _wrong(
                f"{place}.salt",
                f"{_MIN_SALT_CHARS} to {MAX_CHARS} random characters, "
                "none of them '@', '/', '\\' or NUL",
            )
    elif tenant.cache != SHARED and not has_secret:
        raise _wrong(
            "secret",
            f"is needed for {place}.cache: {tenant.cache}; set it to the output of "
            f"`openssl rand -hex 32`, or say cache: {SHARED}",
        )


def _once(seen: dict[str, str], value: str, place: str) -> None:
    if value in seen:
        raise _wrong(place, f"is {seen[value]}, too: each once")
    seen[value] = place


def _wrong(place: str, what: str) -> ConfigError:
    return ConfigError(f"{place}: {what}", param=place)


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


logger = logging.getLogger(__name__)

MAX_LABELS: Final = 100
OTHER: Final = "other"
"""The label of tenants beyond the first `MAX_LABELS` that this process has known."""


class Tenants:
    """The tenants of the file in force.

    Args:
        path: The tenants' file.
        on_reload: Called with `ok` or `bad` for each version of the file that was read.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path, *, on_reload: Callable[[str], None] = lambda _: None) -> None:
        self._path = path
        self._on_reload = on_reload
        self._by_digest: dict[bytes, Caller] = {}
        self._by_name: dict[str, Caller] = {}
        self._in_flight: dict[str, InFlight] = {}  # by name; they outlive the file's versions
        self._labels: dict[str, None] = {}  # names that have a label of their own, for good
        self._watched = WatchedFile(path)
        self._apply(read(path))

    def __len__(self) -> int:
        return len(self._by_name)

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Find whose key a request carries.

        Raises:
            Unauthorized: it has none, or one that is unknown.
        """
        key = key_in(headers)
        if key is None:
            raise Unauthorized(
                "You didn't provide an API key: send `Authorization: Bearer KEY` or `x-api-key`."
            )
        caller = self._by_digest.get(digest_of(key))
        if caller is None:
            raise Unauthorized("Incorrect API key provided.")
        return caller

    @property
    def names(self) -> tuple[str, ...]:
        """Name all tenants."""
        return tuple(self._by_name)

    def named(self, name: str) -> Caller | None:
        """Find a tenant by its name, for operators."""
        return self._by_name.get(name)

    # -- the file ----------------------------------------------------------------------------

    def look(self) -> TenantsFile | ConfigError | None:
        """Read the file if it has changed, and is not being written; None: nothing new.

        Blocking: not for the event loop. A change counts once two looks have seen the same.
        """
        if not self._watched.has_changed():
            return None
        try:
            return read(self._path)
        except ConfigError as error:
            return error

    def follow(self, found: TenantsFile | ConfigError | None) -> None:
        """Apply what `look` found."""
        if found is None:
            return
        if isinstance(found, ConfigError):
            self._on_reload("bad")
            logger.error(
                "tenants file is invalid; the last one stays in force",
                extra={"reason": found.message},
            )
            return
        self._apply(found)
        self._on_reload("ok")
        logger.info("tenants file read again", extra={"tenants": len(self)})

    def _apply(self, file: TenantsFile) -> None:
        known = self._in_flight
        self._in_flight = {
            entry.name: known.get(entry.name) or InFlight() for entry in file.tenants
        }
        self._by_digest, self._by_name = {}, {}
        for entry in file.tenants:
            caller = self._by_name[entry.name] = self._caller(entry, file.secret)
            for digest in entry.keys:
                found = DIGEST.fullmatch(digest)
                assert found is not None
                self._by_digest[bytes.fromhex(found[1])] = caller

    def _caller(self, entry: TenantEntry, secret: str | None) -> Caller:
        """Return a tenant as requests see it."""
        salt = _salt(entry, secret)
        self._in_flight[entry.name].most = entry.max_in_flight
        shared = cache_salt(secret, SHARED) if secret is not None else None
        return Caller(
            name=entry.name,
            label=self._label(entry.name),
            salt=salt,
            users_salt=salt or shared,
            models=frozenset(entry.models) if entry.models is not None else None,
            body_bytes=entry.body_bytes,
            is_batch=entry.service_class == BATCH,
            weight=entry.weight,
            priority=entry.priority,
            in_flight=self._in_flight[entry.name],
        )

    def _label(self, name: str) -> str:
        """Label a tenant in metrics: by name, as long as there are few."""
        if name not in self._labels and len(self._labels) < MAX_LABELS:
            self._labels[name] = None
        return name if name in self._labels else OTHER


def _salt(entry: TenantEntry, secret: str | None) -> str | None:
    if entry.salt is not None:
        return entry.salt
    if entry.cache == SHARED:
        return None
    assert secret is not None  # the file was checked
    is_own = entry.cache == OWN
    return cache_salt(secret, f"tenant/{entry.name}" if is_own else f"group/{entry.cache}")
