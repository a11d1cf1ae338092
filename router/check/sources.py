"""The sources of replicas: what each finds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from router.base.errors import DiscoveryError
from router.check.finding import Finding, Subject
from router.check.seen import Deadline
from router.config import DiscoveryConfig
from router.config.hosts import HostRules
from router.discovery.find import build_sources
from router.discovery.sources import Source, why_refused
from router.replicas.registry import Registry

_DISCOVERY = Subject("discovery")


async def look(
    config: DiscoveryConfig, registry: Registry, pools: Sequence[str], deadline: Deadline
) -> list[Finding]:
    """Ask every source once, and enter the replicas in the registry."""
    files = ThreadPoolExecutor(1, thread_name_prefix="files")
    hosts = HostRules(config.hosts)
    try:
        async with asyncio.TaskGroup() as tg:
            looking = [
                tg.create_task(_look(source, hosts, registry, pools, deadline), name=source.name)
                for source in build_sources(config, files)
            ]
    finally:
        files.shutdown(wait=False, cancel_futures=True)
    return [finding for task in looking for finding in task.result()]


async def _look(
    source: Source,
    hosts: HostRules,
    registry: Registry,
    pools: Sequence[str],
    deadline: Deadline,
) -> list[Finding]:
    hint = "running routers keep the replicas of the last answer"
    try:
        async with asyncio.timeout(deadline.left_s):
            found = await source.look()
    except DiscoveryError as exc:
        return [_DISCOVERY.error(source.name, exc.message, hint)]
    except TimeoutError:
        return [_DISCOVERY.error(source.name, "no answer in time", hint)]
    reasons = [why_refused(each, hosts, pools) for each in found]
    usable = [each for each, reason in zip(found, reasons, strict=True) if reason is None]
    registry.follow(source.name, usable)
    num_ready = sum(each.is_ready for each in usable)
    num_later = len(usable) - num_ready
    text = f"{num_ready} replicas" + (f", {num_later} not ready" if num_later else "")
    left_out = [*filter(None, reasons), *registry.not_entered.values()]
    return [
        _DISCOVERY.ok(source.name, text)
        if num_ready
        else _DISCOVERY.warning(source.name, text, "is it the right source?"),
        *(_DISCOVERY.warning(source.name, f"ignored: {reason}") for reason in left_out),
    ]
