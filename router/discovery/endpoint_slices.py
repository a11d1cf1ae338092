"""Kubernetes EndpointSlices: the replicas behind a Service. Pure.

Source: the API reference of discovery.k8s.io/v1, and its advice to consumers. A Service has several
slices of at most 1,000 endpoints for each family of addresses. While slices are rearranged, an
endpoint may be in several of them. Only the first of its addresses counts.

    condition     missing means   here
    ready         true            false: it stays known, and gets no requests
    serving       as ready        ignored: without `terminating` it is as `ready`
    terminating   false           true: it is left out, so it drains, whether it serves or not

A replica has the name of its pod. So an address that another pod gets is another replica. A pod
with addresses of both families is one replica, at its IPv4 address. The control plane copies labels
of the Service to its slices: `warmroute.io/role` is the replicas' role, `warmroute.io/pool` the
name of their Mooncake pool. `warmroute.io/cost-per-hour` is what an hour of one costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Final, get_args

from msgspec import Struct, ValidationError, convert, field

from router.base.engines import Role
from router.base.errors import DiscoveryError
from router.config import ReplicaConfig
from router.config.replicas import CostPerHour
from router.replicas.replica import Found

SERVICE_LABEL: Final = "kubernetes.io/service-name"
ROLE_LABEL: Final = "warmroute.io/role"
POOL_LABEL: Final = "warmroute.io/pool"
COST_LABEL: Final = "warmroute.io/cost-per-hour"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Conditions(Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class Target(Struct, frozen=True):
    kind: str | None = None
    name: str | None = None


class Endpoint(Struct, frozen=True):
    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None
    target: Target | None = field(name="targetRef", default=None)


class Port(Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class Metadata(Struct, frozen=True):
    name: str
    labels: dict[str, str] | None = None


class Slice(Struct, frozen=True):
    """An EndpointSlice, without the fields that are not used."""

    metadata: Metadata
    family: str = field(name="addressType", default="IPv4")
    endpoints: tuple[Endpoint, ...] | None = None  # None: none, as Go writes it
    ports: tuple[Port, ...] | None = None

    def is_of(self, service: str) -> bool:
        """Return whether it belongs to a Service."""
        return (self.metadata.labels or {}).get(SERVICE_LABEL) == service


def replicas_in(slices: Iterable[Slice], port: str | None) -> list[Found]:
    """Merge the slices of a Service into its replicas, in the order of their addresses.

    Args:
        slices: All there are.
        port: A port's name or number; None: the only one.

    Raises:
        DiscoveryError: the port is ambiguous, or a label is senseless.
    """
    best: dict[str, tuple[tuple[bool, bool, str], Found]] = {}
    for part in sorted(slices, key=lambda part: part.metadata.name):
        for key, family, found in _replicas(part, port):
            # Of two that are the same: one that is ready, at its IPv4 address.
            rank = (not found.is_ready, family != "IPv4", found.replica.url)
            if key not in best or rank < best[key][0]:
                best[key] = rank, found
    by_url = {found.replica.url: found for _, found in best.values()}
    return [by_url[url] for url in sorted(by_url)]


def _replicas(part: Slice, port: str | None) -> Iterator[tuple[str, str, Found]]:
    """Yield a slice's replicas with a key that equal ones share, and their family."""
    if part.family not in ("IPv4", "IPv6") or not part.endpoints:
        return
    number, role = _port(part, port), _role(part)
    pool, cost = (part.metadata.labels or {}).get(POOL_LABEL), _cost(part)
    for endpoint in part.endpoints:
        conditions = endpoint.conditions or Conditions()
        if conditions.terminating or not endpoint.addresses:
            continue
        address = _address(endpoint.addresses[0], part)
        host = f"[{address}]" if part.family == "IPv6" else address
        pod = _pod(endpoint)
        url = f"http://{host}:{number}"
        replica = ReplicaConfig(url=url, name=pod, role=role, pool=pool, cost_per_hour=cost)
        yield (
            pod or address,
            part.family,
            Found(replica=replica, is_ready=conditions.ready is not False),
        )


def _address(text: str, part: Slice) -> str:
    try:
        return str(ip_address(text))
    except ValueError as exc:
        raise DiscoveryError(
            f"EndpointSlice {part.metadata.name}: {text[:64]!r} is not an address"
        ) from exc


def _pod(endpoint: Endpoint) -> str | None:
    target = endpoint.target
    if target is None or target.kind != "Pod" or not _NAME.fullmatch(target.name or ""):
        return None
    return target.name


def _port(part: Slice, wanted: str | None) -> int:
    ports = part.ports or ()
    if wanted is not None and wanted.isdigit():
        return int(wanted)
    matching = [p.port for p in ports if wanted is None or p.name == wanted]
    if len(matching) == 1 and matching[0] is not None:
        return matching[0]
    names = ", ".join(f"{p.name or 'without a name'} ({p.port})" for p in ports) or "none"
    asked = f"no port {wanted!r}" if wanted is not None else "not one port but several, or none"
    raise DiscoveryError(
        f"EndpointSlice {part.metadata.name}: {asked}; it has: {names[:200]}. "
        "Write NAMESPACE/SERVICE:PORT"
    )


def _role(part: Slice) -> Role:
    text = (part.metadata.labels or {}).get(ROLE_LABEL, "both")
    for role in get_args(Role):
        if role == text:
            found: Role = role
            return found
    raise DiscoveryError(
        f"EndpointSlice {part.metadata.name}: label {ROLE_LABEL}: {text[:64]!r} is not both, "
        "prefill or decode"
    )


def _cost(part: Slice) -> float | None:
    text = (part.metadata.labels or {}).get(COST_LABEL)
    if text is None:
        return None
    try:
        return convert(text, CostPerHour, strict=False)
    except ValidationError as exc:
        raise DiscoveryError(
            f"EndpointSlice {part.metadata.name}: label {COST_LABEL}: {text[:64]!r} is not a "
            "number above 0, such as 2.5"
        ) from exc
