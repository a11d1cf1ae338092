"""What only several replicas can have wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from router.check.finding import Finding, Subject
from router.check.seen import ReplicaSeen
from router.config import EventsConfig
from router.replicas.replica import EventOwners, EventPorts

_REPLICAS: Final = Subject("replicas")


def with_owners(replicas: Sequence[ReplicaSeen], config: EventsConfig) -> tuple[ReplicaSeen, ...]:
    """Add to each rank whether its endpoints are another replica's."""
    ports = [_ports(each, config) for each in replicas]
    owners = EventOwners(each for each in ports if each is not None)
    return tuple(
        replace(
            each,
            ranks=tuple(
                replace(rank, foreign=owners.why_foreign(each.name, rank.rank))
                for rank in each.ranks
            ),
        )
        for each in replicas
    )


def judge(replicas: Sequence[ReplicaSeen], config: EventsConfig) -> Iterator[Finding]:
    """Compare the replicas with each other, and their endpoints with what engines report."""
    for seen in replicas:
        ports = _ports(seen, config)
        why = ports.why_doubtful() if ports is not None else None
        is_foreign = any(rank.foreign for rank in seen.ranks)
        if why is not None and not is_foreign:
            yield Subject(f"replica {seen.name}").note(
                "event ports",
                why,
                "is it a mapped port of its container, or another engine's? If its predictions are "
                "wrong (warmroute_audited_total), compare `events` with its --kv-events-config",
            )
    yield from _contracts(replicas)


def _ports(seen: ReplicaSeen, config: EventsConfig) -> EventPorts | None:
    if seen.facts is None:
        return None
    return seen.facts.event_ports(seen.name, config, seen.entry.replica)


def _contracts(replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    by_model: defaultdict[str, set[tuple[str, str, int]]] = defaultdict(set)
    for replica in replicas:
        for status in (rank.status for rank in replica.ranks if rank.is_publisher):
            if status is not None and status.is_verified:
                contract = status.contract
                for model in replica.models:
                    by_model[model.id].add((contract.algorithm, contract.seed, contract.block_size))
    for name, contracts in by_model.items():
        if len(contracts) > 1:
            ways = "; ".join(f"{a}, seed {s!r}, {b} tokens" for a, s, b in sorted(contracts))
            yield _REPLICAS.note(
                "hashes",
                f"{name}: replicas hash blocks differently ({ways}): each way costs a hash chain, "
                "and they cannot share a pool",
                "the same PYTHONHASHSEED, --prefix-caching-hash-algo and --block-size for all",
            )
