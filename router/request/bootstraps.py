"""The names of engines that prefill for others peer to peer, from their bootstrap servers.

A name belongs to a process: it is asked again after a while, and after any failure. Source:
vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_utils.py, 0.32.0.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

from router.base.errors import UpstreamBroken, UpstreamError
from router.discovery.engine_api import EngineApi
from router.replicas.replica import Candidate

_KEPT_S: Final = 10.0
_SILENT_S: Final = 5.0  # one that did not answer is not asked again so soon


class Bootstraps:
    """Asks bootstrap servers, one question for all requests of a while."""

    def __init__(self, api: EngineApi) -> None:
        self._api = api
        self._known: dict[str, tuple[str, float, dict[int, str]]] = {}
        self._silent_until_s: dict[str, float] = {}

    async def engine_id(self, candidate: Candidate) -> str:
        """Find the name of a candidate's engine.

        Raises:
            UpstreamError: its bootstrap server does not answer, or does not know its rank.
        """
        replica, rank = candidate.replica, candidate.rank or 0
        assert replica.bootstrap is not None
        url, until_s, ids = self._known.get(replica.name, ("", 0.0, {}))
        if url != replica.bootstrap or monotonic() >= until_s or rank not in ids:
            ids = await self._ask(replica.name, replica.bootstrap)
            self._known[replica.name] = replica.bootstrap, monotonic() + _KEPT_S, ids
        if rank not in ids:
            raise UpstreamBroken(replica.name, f"{replica.bootstrap}/query has no rank {rank}")
        return ids[rank]

    async def _ask(self, name: str, url: str) -> dict[int, str]:
        if monotonic() < self._silent_until_s.get(name, 0.0):
            raise UpstreamBroken(name, f"{url} did not answer a moment ago")
        try:
            return await self._api.engine_ids(name, url)
        except UpstreamError:
            self._silent_until_s[name] = monotonic() + _SILENT_S
            raise

    def forget(self, replica: str) -> None:
        """Forget a replica's names: it may be another process."""
        self._known.pop(replica, None)
