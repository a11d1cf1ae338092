"""Who can send requests to the public port without a key."""

from __future__ import annotations

from router.base.addresses import address_of, unbracketed
from router.config.tree import Config


def open_to(config: Config) -> str | None:
    """Return which hosts can; None: this machine alone, or clients need a key or a certificate."""
    listen = config.listen
    if listen.tls_client_ca is not None or config.tenants.file is not None:
        return None
    host = unbracketed(listen.host)
    address = address_of(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return None
    is_any = host == "" or (address is not None and address.is_unspecified)
    return f"every host that can reach {'this machine' if is_any else host}"
