"""Settings of prefill and decode apart; and what roles must have to make a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from router.base.engines import BOOTSTRAP_PORT, Transfer
from router.base.errors import ConfigError
from router.config.ranges import Seconds
from router.config.replicas import ReplicaConfig, pool_of


class PrefillConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    transfer: Annotated[
        Transfer,
        Meta(
            description="how KV blocks get from prefill to decode replicas: store (the Mooncake "
            "pool), mooncake (MooncakeConnector, peer to peer) or nixl "
            "(docs/guides/prefill-decode.md)"
        ),
    ] = "store"
    timeout_s: Annotated[
        Seconds,
        Meta(
            description="deadline for a prefill replica; after it the decode replica computes the "
            "prompt"
        ),
    ] = 60.0
    store_wait_s: Annotated[
        Seconds,
        Meta(
            description="longest wait until a prefilled prompt is in the pool; engines answer "
            "before they have stored all of it"
        ),
    ] = 0.1


def check_roles(
    replicas: Sequence[ReplicaConfig],
    config: PrefillConfig,
    pools: Sequence[str],
    *,
    may_grow: bool,
) -> None:
    """Refuse roles that lack their partner, and bootstrap addresses of what has none.

    Args:
        pools: Names of the Mooncake pools; the store of one is not another's.
        may_grow: Partners may come later.

    Raises:
        ConfigError: the message and `param` name the field.
    """

    def way(replica: ReplicaConfig) -> tuple[Transfer, str | None]:
        transfer = replica.transfer or config.transfer
        return transfer, pool_of(replica, pools) if transfer == "store" else None

    roles = {(replica.role, way(replica)) for replica in replicas}
    for i, replica in enumerate(replicas):
        transfer, pool = way(replica)
        key = f"replicas[{i}]"
        if replica.bootstrap is not None and (replica.role, transfer) != ("prefill", "mooncake"):
            raise ConfigError(
                f"{key}.bootstrap: only for role prefill and transfer mooncake (this replica: "
                f"{replica.role}, {transfer})",
                param=f"{key}.bootstrap",
            )
        if may_grow or replica.role == "both":
            continue
        partner = "decode" if replica.role == "prefill" else "prefill"
        if (partner, (transfer, pool)) not in roles:
            where = f"transfer {transfer}" + (f" in pool {pool}" if pool else "")
            raise ConfigError(
                f"{key}.role: {replica.role} needs a partner: set role: {partner} for another "
                f"replica with {where}, or role: both for this one",
                param=f"{key}.role",
            )


def bootstrap_of(replica: ReplicaConfig) -> str:
    """Return where a prefill replica of transfer mooncake tells its engine's name."""
    if replica.bootstrap is not None:
        return replica.bootstrap.rstrip("/")
    host = urlsplit(replica.url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{BOOTSTRAP_PORT}"
