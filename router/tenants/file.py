"""The tenants' file: YAML, strict. What is wrong is refused with the field and what is allowed.

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
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field

from router.base.errors import ConfigError
from router.base.salts import FORBIDDEN, MAX_CHARS
from router.config import explained, yaml_file
from router.scheduling.classes import INTERACTIVE, ServiceClass
from router.tenants.client_keys import DIGEST

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
