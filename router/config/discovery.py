"""Settings of discovery: where replicas are found besides those of the configuration."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Final

from msgspec import Meta, Struct

from router.base.errors import ConfigError
from router.config.ranges import NEAR_HOSTS, Seconds

_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1123
_SERVICE: Final = re.compile(rf"(?:{_LABEL}/)?{_LABEL}(?::(?:[0-9]{{1,5}}|{_LABEL}))?")


class DiscoveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dns: Annotated[
        tuple[str, ...],
        Meta(
            description="HOST:PORT: each address of that name is a replica. Or the name of SRV "
            "records, _http._tcp.NAME"
        ),
    ] = ()
    dns_s: Annotated[Seconds, Meta(description="pause between two DNS look-ups")] = 10.0
    dns_servers: Annotated[
        tuple[str, ...],
        Meta(description="DNS servers to ask, ADDRESS:PORT; default: those of /etc/resolv.conf"),
    ] = ()
    kubernetes: Annotated[
        tuple[str, ...],
        Meta(
            description="[NAMESPACE/]SERVICE[:PORT]: each endpoint of that Service is a replica; "
            "PORT is a name or a number"
        ),
    ] = ()
    kubernetes_api: Annotated[str, Meta(description="base URL of the Kubernetes API server")] = (
        "https://kubernetes.default.svc"
    )
    kubernetes_credentials: Annotated[
        str,
        Meta(
            min_length=1,
            description="folder with the service account's token, ca.crt and namespace",
        ),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"
    follow_config: Annotated[
        bool,
        Meta(description="read the configuration file again when it changes, as on SIGHUP"),
    ] = False
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts that discovered replicas may have, as in admin.replica_hosts; never "
            "link-local"
        ),
    ] = NEAR_HOSTS

    @property
    def is_configured(self) -> bool:
        """Whether replicas are looked for anywhere."""
        return bool(self.dns or self.kubernetes)


def check_discovery(config: DiscoveryConfig) -> None:
    """Refuse names that cannot be resolved.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    for i, name in enumerate(config.dns):
        if not name.startswith("_"):
            _check_place(f"discovery.dns[{i}]", name, "HOST:PORT, or _SERVICE._tcp.NAME")
        elif not re.fullmatch(r"_[\w-]{1,62}\._(tcp|udp)(\.[\w-]{1,63})+\.?", name, re.ASCII):
            key = f"discovery.dns[{i}]"
            raise ConfigError(f"{key}: {name!r} is not _SERVICE._tcp.NAME", param=key)
    for i, service in enumerate(config.kubernetes):
        if not _SERVICE.fullmatch(service):
            key = f"discovery.kubernetes[{i}]"
            raise ConfigError(f"{key}: {service!r} is not [NAMESPACE/]SERVICE[:PORT]", param=key)
    if not _is_safe(config.kubernetes_api):
        key = "discovery.kubernetes_api"
        raise ConfigError(
            f"{key}: {config.kubernetes_api!r} is not https://HOST:PORT, or http:// on loopback: "
            "the token is sent there",
            param=key,
        )
    for i, server in enumerate(config.dns_servers):
        key = f"discovery.dns_servers[{i}]"
        host, _ = _check_place(key, server, "ADDRESS:PORT")
        try:
            ip_address(host)
        except ValueError as exc:
            raise ConfigError(f"{key}: {host!r} is not an address", param=key) from exc


def host_and_port(text: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 address is in brackets.

    Raises:
        ValueError: it is not HOST:PORT.
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]{1,253}):([0-9]{1,5})", text, re.ASCII)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError(text)
    return found[1].strip("[]"), int(found[2])


def _is_safe(url: str) -> bool:
    """Return whether a token may be sent to a base URL."""
    found = re.fullmatch(r"(https?)://(\[[0-9A-Fa-f:]+\]|[\w.-]+)(:[0-9]{1,5})?/?", url, re.ASCII)
    if found is None:
        return False
    host = found[2].strip("[]")
    return found[1] == "https" or host in ("localhost", "::1") or host.startswith("127.")


def _check_place(key: str, text: str, shape: str) -> tuple[str, int]:
    try:
        return host_and_port(text)
    except ValueError as exc:
        raise ConfigError(f"{key}: {text!r} is not {shape}", param=key) from exc
