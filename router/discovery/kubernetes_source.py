"""Replicas from Kubernetes: the endpoints of a Service, by its EndpointSlices.

    LIST -> watch from its version -> [changes] -> the watch ends -> LIST ...

A watch lasts two minutes, then everything is listed again. So the list is never wrong for longer,
whether an event is lost, a watch goes silent, or a version is too old (410). This costs the API
server one small LIST in two minutes for each router and Service. Nothing is written, so routers
need no leader.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from router.base.backoff import Backoff
from router.base.errors import DiscoveryError
from router.discovery.endpoint_slices import Slice, replicas_in
from router.discovery.kubernetes_api import ANSWER_S, Expired, KubernetesApi, SliceChange
from router.discovery.sources import Sources
from router.replicas.replica import Found

_WATCH_S: Final = 120.0
_PAUSES_S: Final = (0.5, 30.0)
_STEADY_S: Final = 10.0  # a watch that lasted this long was no failure


class KubernetesSource:
    """A Service that is watched.

    Args:
        service: [NAMESPACE/]SERVICE[:PORT].
        url: Base URL of the API server.
        credentials: The folder with `token`, `ca.crt` and `namespace`.
        watch_s: For how long a watch is asked for.
        answer_s: For how long an answer of the server is waited for.
        pauses_s: The first and the longest pause after a failure.
    """

    def __init__(
        self,
        service: str,
        *,
        url: str,
        credentials: Path,
        files: Executor,
        watch_s: float = _WATCH_S,
        answer_s: float = ANSWER_S,
        pauses_s: tuple[float, float] = _PAUSES_S,
    ) -> None:
        self.name = f"kubernetes {service}"
        place, _, port = service.partition(":")
        self._namespace, _, self._service = place.rpartition("/")
        self._port = port or None
        self._watch_s = watch_s
        self._pauses_s = pauses_s
        self._api = KubernetesApi(url, credentials, files, answer_s=answer_s)

    async def look(self) -> Sequence[Found]:
        slices, _ = await self._api.list_slices(await self._in(), self._service)
        return replicas_in(slices.values(), self._port)

    async def run(self, sink: Sources) -> None:
        backoff = Backoff(*self._pauses_s)
        while True:
            begun_s = time.monotonic()
            try:
                await self._list_and_watch(sink)
            except Expired:
                pass
            except DiscoveryError as exc:
                sink.failed(self.name, exc.message)
            if time.monotonic() - begun_s >= _STEADY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _list_and_watch(self, sink: Sources) -> None:
        namespace = await self._in()
        slices, version = await self._api.list_slices(namespace, self._service)

        def report() -> None:
            sink.found(self.name, replicas_in(slices.values(), self._port))

        def take(changes: list[SliceChange]) -> None:
            for change in changes:
                self._apply(change, slices)
            report()

        await self._api.watch(
            namespace,
            self._service,
            version,
            for_s=self._watch_s * random.uniform(0.8, 1.0),
            opened=report,  # not before: a role that may list but not watch must be noticed
            take=take,
        )

    def _apply(self, change: SliceChange, slices: dict[str, Slice]) -> None:
        name = change.part.metadata.name
        if change.is_deleted or not change.part.is_of(self._service):
            slices.pop(name, None)
        else:
            slices[name] = change.part

    async def _in(self) -> str:
        return self._namespace or await self._api.namespace()
