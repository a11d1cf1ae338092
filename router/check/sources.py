"""The sources of replicas: what each finds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from router.base.errors import DiscoveryError
from router.check.deadline import Deadline
from router.check.finding import Finding, Subject
from router.config import DiscoveryConfig
from router.config.hosts import HostRules
from router.discovery.find import build_sources
from router.discovery.sources import Source, why_refused
from router.replicas.registry import Registry

_DISCOVERY = Subject("discovery")


class SourceSeen(Struct, frozen=True, kw_only=True):
    """A source of replicas. `error` says why nothing else is known."""

    name: str
    error: str | None = None
    num_ready: int = 0
    num_not_ready: int = 0
    not_followed: tuple[str, ...] = ()  # why replicas are ignored


# -- look ----------------------------------------------------------------------------------------


async def look(
    config: DiscoveryConfig, registry: Registry, pools: Sequence[str], deadline: Deadline
) -> tuple[SourceSeen, ...]:
    """Ask every source once, and enter the replicas in the registry."""
    files = ThreadPoolExecutor(1, thread_name_prefix="files")
    try:
        with deadline.waiting("discovery"):
            async with asyncio.TaskGroup() as tg:
                looking = [
                    tg.create_task(
                        _look(source, HostRules(config.hosts), registry, pools, deadline),
                        name=source.name,
                    )
                    for source in build_sources(config, files)
                ]
    finally:
        files.shutdown(wait=False, cancel_futures=True)
    return tuple(task.result() for task in looking)


async def _look(
    source: Source,
    hosts: HostRules,
    registry: Registry,
    pools: Sequence[str],
    deadline: Deadline,
) -> SourceSeen:
    try:
        async with asyncio.timeout(deadline.left_s):
            found = await source.look()
    except DiscoveryError as exc:
        return SourceSeen(name=source.name, error=exc.message)
    except TimeoutError:
        return SourceSeen(name=source.name, error="no answer in time")
    reasons = [why_refused(each, hosts, pools) for each in found]
    usable = [each for each, reason in zip(found, reasons, strict=True) if reason is None]
    registry.follow(source.name, usable)
    num_ready = sum(each.is_ready for each in usable)
    return SourceSeen(
        name=source.name,
        num_ready=num_ready,
        num_not_ready=len(usable) - num_ready,
        not_followed=(*filter(None, reasons), *registry.not_entered.values()),
    )


# -- judge ---------------------------------------------------------------------------------------


def judge(sources: Sequence[SourceSeen]) -> Iterator[Finding]:
    """Judge the sources."""
    for seen in sources:
        if seen.error is not None:
            yield _DISCOVERY.error(
                seen.name, seen.error, "running routers keep the replicas of the last answer"
            )
            continue
        later = f", {seen.num_not_ready} not ready" if seen.num_not_ready else ""
        text = f"{seen.num_ready} replicas{later}"
        if seen.num_ready:
            yield _DISCOVERY.ok(seen.name, text)
        else:
            yield _DISCOVERY.warning(seen.name, text, "is it the right source?")
        for reason in seen.not_followed:
            yield _DISCOVERY.warning(seen.name, f"ignored: {reason}")
