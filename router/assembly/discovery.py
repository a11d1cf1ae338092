"""Builds what finds replicas, and what follows each."""

from __future__ import annotations

from router.assembly.parts import Parts
from router.config.hosts import HostRules
from router.discovery.find import build_sources
from router.discovery.model_watch import ModelWatch
from router.discovery.probes import Probes
from router.discovery.prompter_loader import PrompterLoader
from router.discovery.rank_streams import RankStreams
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.discovery.sources import Sources
from router.discovery.watches import Watches, WatchTools


class Discovery:
    """Follows the configured replicas, and those that `replica_sources` find."""

    def __init__(self, parts: Parts) -> None:
        config, fleet, metrics = parts.config, parts.fleet, parts.metrics
        self.served_models = ServedModels(parts.engine_api, fleet=fleet, prompters=parts.prompters)
        self.sleepers = Sleepers(fleet, parts.caches, parts.upstream)
        self.loader = PrompterLoader(parts.prompters, parts.config.tokens, parts.threads.load)
        self.streams = RankStreams(
            config,
            fleet=fleet,
            caches=parts.caches,
            pools=parts.pools,
            metrics=metrics,
            names=parts.names,
        )
        self.watches = Watches(
            parts.registry,
            WatchTools(
                config=config,
                engine_api=parts.engine_api,
                fleet=fleet,
                deaths=parts.deaths,
                waiting=parts.waiting,
                models=ModelWatch(
                    config,
                    engine_api=parts.engine_api,
                    prompters=parts.prompters,
                    loader=self.loader,
                    served_models=self.served_models,
                    metrics=metrics,
                ),
                probes=Probes(
                    config.health,
                    engine_api=parts.engine_api,
                    fleet=fleet,
                    upstream=parts.upstream,
                    served_models=self.served_models,
                    sleepers=self.sleepers,
                ),
                streams=self.streams,
                pools=parts.pools,
            ),
            upstream=parts.upstream,
            metrics=metrics,
        )
        self.replica_sources = build_sources(config.discovery, parts.threads.files)
        self.sources = Sources(
            [source.name for source in self.replica_sources],
            hosts=HostRules(config.discovery.hosts),
            pools=config.mooncake.names,
            follow=self.watches.follow,
            waiting=parts.waiting,
            count=lambda source, result: metrics.discovery.labels(source, result).inc(),
        )
