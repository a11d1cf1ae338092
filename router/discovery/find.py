"""Build the configured sources of replicas."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

from router.config import DiscoveryConfig
from router.discovery.dns_source import DnsSource
from router.discovery.kubernetes_source import KubernetesSource
from router.discovery.sources import Source


def build_sources(config: DiscoveryConfig, files: Executor) -> tuple[Source, ...]:
    """Build every source that is configured; none is asked yet.

    Args:
        files: Where files are read.
    """
    sources: list[Source] = [
        DnsSource(name, servers=config.dns_servers, pause_s=config.dns_s, files=files)
        for name in dict.fromkeys(config.dns)
    ]
    sources += [
        KubernetesSource(
            service,
            url=config.kubernetes_api,
            credentials=Path(config.kubernetes_credentials),
            files=files,
        )
        for service in dict.fromkeys(config.kubernetes)
    ]
    return tuple(sources)
