"""Matches found in Redis (`index.mode: redis`), in one round trip for what is new there.

Redis is asked about candidates that this router does not know completely: it cannot reach their
event port, or it joined after the engine dropped its history. A late or failed look-up means that
the local view counts. No request waits longer than the deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from policies.view import CandidateId
from router.base.contracts import HashContract
from router.base.errors import StoreError
from router.base.messages import StreamId
from router.cluster.candidate_names import CandidateNames
from router.cluster.log_tails import LogTails
from router.index.block_index import BlockMatch
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.replicas.replica import Candidate
from router.request.results import Prompt

logger = logging.getLogger(__name__)


class Lookup:
    """Asks Redis how much of a prompt each candidate holds.

    Args:
        tails: What was read of the blocks in Redis.
        is_up: Whether Redis is there; if not, it is not asked.
    """

    def __init__(
        self,
        tails: LogTails,
        *,
        names: CandidateNames,
        caches: CacheView,
        is_up: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self._tails = tails
        self._names = names
        self._caches = caches
        self._is_up = is_up
        self._metrics = metrics

    async def find(
        self, prompt: Prompt, candidates: Sequence[Candidate]
    ) -> dict[CandidateId, BlockMatch]:
        """Return the matches of incompletely known candidates, as far as Redis knows them."""
        matches: dict[CandidateId, BlockMatch] = {}
        if prompt.tokens is None or not self._is_up():
            return matches
        for contract, candidate_of in self._by_contract(candidates).items():
            started_s = time.monotonic()
            try:
                found = await self._tails.lookup(prompt.keys(contract), tuple(candidate_of))
            except StoreError as exc:
                self._metrics.lookups.labels(exc.code).inc()
                break
            self._metrics.lookups.labels("ok").inc()
            self._metrics.lookup_seconds.observe(time.monotonic() - started_s)
            matches |= {
                candidate: BlockMatch(found[id_, "gpu"], found[id_, "gpu"], found[id_, "cpu"])
                for id_, candidate in candidate_of.items()
            }
        return matches

    def _by_contract(
        self, candidates: Sequence[Candidate]
    ) -> Mapping[HashContract, dict[StreamId, CandidateId]]:
        groups: dict[HashContract, dict[StreamId, CandidateId]] = {}
        for candidate in candidates:
            stream, id_ = self._caches.stream(candidate.id), self._names.stream_id_of(candidate.id)
            if id_ is None or stream is None or self._caches.index.has_groups(candidate.id):
                continue  # a prefix of one of several KV groups is no hit
            if stream.state != "exact":
                groups.setdefault(stream.contract, {})[id_] = candidate.id
        return groups
