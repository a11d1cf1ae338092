"""What replicas serve, kept up to date while they run: adapters are loaded and unloaded.

    when                             replicas that are asked
    every `health.load_interval_s`   each (router.discovery.watches)
    after an order of ours           those that it went to (router.http.admin)
    a model that no replica serves   all, before the answer is 404: at most once a second
    an engine's 404 for a model      that engine, before the client gets the 404

Source: vLLM 0.32 openai/models/serving.py: `/v1/models` has bases first, then adapters with their
base as `parent` and their path as `root`; a reload under the same name may change the path.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from time import monotonic
from typing import Final

from router.base.errors import UpstreamError
from router.discovery.engine_api import EngineApi
from router.replicas.fleet import Fleet
from router.replicas.replica import Replica, ServedModel
from router.tokens import Prompters

logger = logging.getLogger(__name__)

ROUND_S: Final = 1.0
"""All replicas are asked about unknown models at most this often; requests in between wait."""

AGAIN_S: Final = 0.1
"""A replica's answer counts for this long, for requests that got a 404 there."""

_DEADLINE_S: Final = 2.0  # of one round
_MOST_WAITING: Final = 100  # beyond, an unknown model is unknown at once
_AT_ONCE: Final = 32  # replicas that are asked at the same time


class ServedModels:
    """Asks replicas what they serve, and tells the fleet."""

    def __init__(self, api: EngineApi, *, fleet: Fleet, prompters: Prompters) -> None:
        self._api = api
        self._fleet = fleet
        self._prompters = prompters
        self._paths: dict[str, dict[str, str]] = {}
        self._asked_s: dict[str, float] = {}  # by `has`
        self._asking: dict[str, asyncio.Lock] = {}
        self._others: set[str] = set()  # replicas at whose address another process answered
        self._rounds = asyncio.Lock()
        self._round_began_s = -ROUND_S
        self._num_waiting = 0

    def lora_paths(self, replica: Replica) -> dict[str, str]:
        """Return a replica's adapters with their paths; the mapping follows what it loads."""
        self._others.discard(replica.name)
        paths = self._paths.setdefault(replica.name, {})
        paths.clear()
        paths.update(_paths(replica.models))
        return paths

    def num_serving(self, model: str) -> int:
        """Count the replicas that serve a model."""
        return sum(replica.serves(model) for replica in self._fleet.members.replicas)

    def forget(self, name: str) -> None:
        """Drop a replica that is gone."""
        self._others.discard(name)
        self._paths.pop(name, None)
        self._asked_s.pop(name, None)
        self._asking.pop(name, None)

    async def refresh(self, name: str) -> bool:
        """Ask one replica; False: it serves other base models now, so it is another process.

        Raises:
            UpstreamError: it did not say.
        """
        replica = self._find(name)
        if replica is None:
            return True
        models = await self._api.models(name, replica.url)
        known = self._find(name)
        if known is None or known.url != replica.url or models == known.models:
            return True
        if _bases(models) != _bases(known.models):
            return False
        self._fleet.members.set_models(name, models)
        self._prompters.adapt({m.id: m.parent for m in models if m.parent is not None})
        if (paths := self._paths.get(name)) is not None:
            paths.clear()
            paths.update(_paths(models))
        logger.info(
            "adapters changed",
            extra={"replica": name, "adapters": ",".join(_paths(models)) or "none"},
        )
        return True

    async def look_for(self, model: str) -> None:
        """Ask all replicas for a model that none is known to serve; failures are ignored."""
        if self._num_waiting >= _MOST_WAITING:
            return
        asked_s = monotonic()
        self._num_waiting += 1
        try:
            async with self._rounds:
                if self._round_began_s >= asked_s:
                    return  # while it waited
                await asyncio.sleep(max(0.0, self._round_began_s + ROUND_S - monotonic()))
                if self._fleet.members.served.get(model) is None:
                    self._round_began_s = monotonic()
                    await self._ask_all()
        finally:
            self._num_waiting -= 1

    async def _ask_all(self) -> None:
        places = asyncio.Semaphore(_AT_ONCE)

        async def ask(name: str) -> None:
            async with places:
                with suppress(UpstreamError):
                    await self.refresh(name)

        now_s = monotonic()
        names = [
            r.name
            for r in self._fleet.members.replicas
            if self._fleet.members.listens(r.name, now_s)
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEADLINE_S):
                await asyncio.gather(*map(ask, names))

    async def has(self, name: str, model: str) -> bool:
        """Ask a replica whether it still serves a model; if it does not answer, assume so.

        A recent answer is used again: a client may cause many such questions. If it has other base
        models, its watch looks at once what is there.
        """
        async with self._asking.setdefault(name, asyncio.Lock()):  # those meanwhile wait for it
            if monotonic() - self._asked_s.get(name, -ROUND_S) >= AGAIN_S:
                with suppress(UpstreamError):
                    if not await self.refresh(name) and self._find(name) is not None:
                        self._others.add(name)
                        self._fleet.members.signs(name).on_doubt()
                self._asked_s[name] = monotonic()
        replica = self._find(name)
        return replica is not None and name not in self._others and replica.serves(model)

    def _find(self, name: str) -> Replica | None:
        try:
            return self._fleet.members.replica(name)
        except KeyError:
            return None


def _bases(models: tuple[ServedModel, ...]) -> list[ServedModel]:
    return [model for model in models if model.parent is None]


def _paths(models: tuple[ServedModel, ...]) -> dict[str, str]:
    return {model.id: model.root for model in models if model.parent and model.root}
