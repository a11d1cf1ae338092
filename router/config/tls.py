"""TLS contexts, from files that are checked at the start, and read again after a change."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final

from router.base.errors import ConfigError
from router.config import AdminConfig, ForwardConfig, ListenConfig

_NO_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"}
)
"""OpenSSL's reasons where the other side answered something else than TLS."""


class Tls:
    """A TLS context from files: `context` is for the next handshake.

    Args:
        files: By the key that names each.
        load: Builds the context from the files as they are now.

    Raises:
        ConfigError: a file cannot be used; it is named.
    """

    def __init__(self, files: Mapping[str, Path], load: Callable[[], ssl.SSLContext]) -> None:
        self.files = files
        self._load = load
        self.context = load()

    def read(self) -> Callable[[], None]:
        """Read the files as they are now; return what puts them into force.

        Open connections keep what they began with.

        Raises:
            ConfigError: one cannot be used; the last good ones stay in force.
        """
        return partial(self._use, self._load())

    def _use(self, context: ssl.SSLContext) -> None:
        self.context = context


def server_tls(files: ListenConfig | AdminConfig, section: str) -> Tls | None:
    """Read a port's certificate; None: it speaks plain HTTP.

    Args:
        files: The section of the configuration.
        section: The key before the files' names: `listen`, `admin`.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    if files.tls_cert is None:
        for key in ("tls_key", "tls_client_ca"):
            if getattr(files, key) is not None:
                raise ConfigError(
                    f"{section}.{key}: needs {section}.tls_cert, too", param=f"{section}.{key}"
                )
        return None
    return Tls(_named(files, section), partial(_server_context, files, section))


def _named(section: object, prefix: str) -> dict[str, Path]:
    """Return the files of a section for TLS, by their keys."""
    names = ("tls_cert", "tls_key", "tls_client_ca", "ca_file", "client_cert", "client_key")
    files = {name: getattr(section, name, None) for name in names}
    return {f"{prefix}.{name}": file for name, file in files.items() if file is not None}


def _server_context(files: ListenConfig | AdminConfig, section: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, files.tls_cert, files.tls_key, f"{section}.tls")
    if files.tls_client_ca is not None:
        _load_ca(context, files.tls_client_ca, f"{section}.tls_client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(config: ForwardConfig) -> Tls | None:
    """Read what https replicas need: trusted authorities, our own certificate.

    None: nothing is configured, the system's authorities are trusted.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    if config.ca_file is None and config.client_cert is None and config.client_key is None:
        return None
    if config.client_key is not None and config.client_cert is None:
        raise ConfigError(
            "forward.client_key: needs forward.client_cert, too", param="forward.client_key"
        )
    return Tls(_named(config, "forward"), partial(_client_context, config))


def _client_context(config: ForwardConfig) -> ssl.SSLContext:
    if config.ca_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts this authority alone
        _load_ca(context, config.ca_file, "forward.ca_file")
    else:
        context = ssl.create_default_context()
    if config.client_cert is not None:
        _load_pair(context, config.client_cert, config.client_key, "forward.client")
    return context


@cache
def system_tls() -> ssl.SSLContext:
    """Return the context that trusts the system's authorities; one for all, it takes 50 ms."""
    return ssl.create_default_context()


def refusal(exc: BaseException) -> str | None:
    """Return why a TLS connection was not made; None: `exc` has another reason."""
    seen: BaseException | None = exc
    while seen is not None:
        inner = getattr(seen, "certificate_error", None) or getattr(seen, "os_error", None)
        if inner is None and isinstance(seen, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {seen.verify_message}"
        if inner is None and isinstance(seen, ssl.SSLError):
            reason = seen.reason or type(seen).__name__
            plain = "; does it speak plain HTTP? Then write http://"
            return f"no TLS with it: {reason}{plain if reason in _NO_TLS else ''}"
        seen = inner or seen.__cause__ or seen.__context__
    return None


def _load_pair(context: ssl.SSLContext, cert: Path | None, key: Path | None, prefix: str) -> None:
    """Load a certificate with its chain, and its key (None: it is in the same file)."""
    assert cert is not None
    for name, file in ((f"{prefix}_cert", cert), (f"{prefix}_key", key or cert)):
        _readable(file, name)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            why = f"is not the key of {prefix}_cert"
        else:
            why = _why_no_pair(cert, key)
        name = f"{prefix}_{'key' if exc.reason == 'KEY_VALUES_MISMATCH' else 'cert'}"
        raise ConfigError(f"{name}: {why}", param=name) from exc
    except _Encrypted as exc:
        name = f"{prefix}_key" if key is not None else f"{prefix}_cert"
        raise ConfigError(f"{name}: the key is encrypted", param=name) from exc


def _why_no_pair(cert: Path, key: Path | None) -> str:
    if b"-----BEGIN CERTIFICATE-----" not in cert.read_bytes():
        return f"{cert} has no PEM certificate"
    if key is None:
        return f"{cert} has no PEM key that can be read; the key file can be named apart"
    return f"no certificate and key in PEM can be read from {cert} and {key}"


def _load_ca(context: ssl.SSLContext, file: Path, name: str) -> None:
    _readable(file, name)
    try:
        context.load_verify_locations(cafile=file)
    except ssl.SSLError as exc:
        raise ConfigError(f"{name}: no certificates in it", param=name) from exc


def _readable(file: Path, name: str) -> None:
    try:
        file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{name}: {exc.strerror or exc}", param=name) from exc


class _Encrypted(Exception):
    """The key needs a password, and there is none."""


def _no_password() -> str:
    raise _Encrypted
