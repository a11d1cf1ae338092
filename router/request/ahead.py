"""Do ahead of a plan what may wait: hash a long prompt in steps, and ask Redis.

Planning itself is synchronous, so that nothing changes between the look-up and the lease.

A `Lookup` finds matches in Redis (`index.mode: redis`), in one round trip for what is new there. It
is asked about candidates that this router does not know completely: it cannot reach their event
port, or it joined after the engine dropped its history. A late or failed look-up means that the
local view counts. No request waits longer than the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import Final

from msgspec.structs import replace

from policies.view import CandidateId
from router.base.contracts import HashContract
from router.base.errors import RouterError, StoreError
from router.base.loop_turns import Turns
from router.base.messages import StreamId
from router.cluster.candidate_source import CandidateNames
from router.cluster.following import LogTails
from router.index.block_index import BlockMatch
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.replica import Candidate
from router.request.match import same_names
from router.request.results import Prompt
from router.tokens import Tokens

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


_HEAVY_TOKENS: Final = 32_768  # hashing them takes 3 ms, and several times that on slow machines


class Ahead:
    """Prepares prompts for planning.

    Args:
        lookup: The index in Redis. None: it is not asked.
        encoders: Where a long chain is hashed.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        caches: CacheView,
        lookup: Lookup | None,
        encoders: Executor,
        turns: Turns,
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._lookup = lookup
        self._encoders = encoders
        self._turns = turns

    def is_due(self, prompt: Prompt) -> bool:
        """Return whether there is anything to do for a prompt."""
        tokens = prompt.tokens
        if tokens is None:
            return False
        return self._lookup is not None or tokens.num_new_tokens > _HEAVY_TOKENS

    async def prepare(self, prompt: Prompt) -> Prompt:
        """Hash a long new prompt, and ask Redis. If anything fails, the request goes on."""
        tokens = prompt.tokens
        assert tokens is not None
        with suppress(RouterError):  # no replica serves it: the plan says so
            candidates = self._candidates(prompt)
            if tokens.num_new_tokens > _HEAVY_TOKENS:
                await self._hash(prompt, tokens, candidates)
            if self._lookup is not None:
                return replace(prompt, found=await self._lookup.find(prompt, candidates))
        return prompt

    def _candidates(self, prompt: Prompt) -> Sequence[Candidate]:
        """List the candidates for a request, or for its prompt.

        Raises:
            UnknownModel, NoReplicaAvailable: there are none.
        """
        model, now_s = prompt.read.model, monotonic()
        candidates = self._fleet.offers.candidates(model, now_s)
        helpers = self._fleet.offers.prefillers(model, None, now_s)
        return same_names(prompt, (*candidates, *helpers))

    async def _hash(self, prompt: Prompt, tokens: Tokens, candidates: Sequence[Candidate]) -> None:
        """Hash a prompt's chain in steps, off the loop where they are long."""
        loop = asyncio.get_running_loop()
        for contract in self._caches.by_contract([each.id for each in candidates]):
            steps = tokens.hashing(contract, prompt.extra)
            try:
                work = next(steps)
                while True:
                    if work is None:
                        await self._turns.take()
                        work = next(steps)
                    else:
                        work = steps.send(await loop.run_in_executor(self._encoders, work))
            except StopIteration:
                pass
