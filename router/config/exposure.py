"""Who can send requests to the public port without a key."""

from __future__ import annotations

import logging
import sys

from router.base.addresses import address_of, bound_url, unbracketed
from router.config.tree import Config

logger = logging.getLogger(__name__)


def announce(config: Config, data_url: str, admin_url: str) -> None:
    """Announce where a router listens, and who can send it requests without a key."""
    url = bound_url(data_url, config.listen.host)
    print(f"warmroute listens on {url} (admin: {admin_url})", file=sys.stderr, flush=True)
    if (reached_by := open_to(config)) is not None:
        logger.warning("clients need no key", extra={"open_to": reached_by})


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
