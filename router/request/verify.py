"""The shared pool's part in a decision: looked up at once, verified if the decision depends on it.

The local directory of a pool may be old. The master evicts without saying so, and an engine reports
stored blocks only with its next step. So the master is asked about the blocks that a plan would
fetch, and about those that it could fetch because another candidate holds more. All blocks are
asked for if they are few, else those around the boundary and some between.

There is one deadline for it all, other requests' questions in front included. A late answer means
unknown, and the directory counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

from policies.view import CandidateId
from router.base.backoff import Suspects
from router.base.contracts import HashContract
from router.base.errors import PoolError, PoolLate
from router.config import MooncakeConfig
from router.index.block_index import BlockIndex
from router.metrics import Metrics
from router.pool.pools import Pool
from router.pool.readers import PoolReaders
from router.replicas.replica import Candidate
from router.request.plan import Placement, Plan, PoolMatch
from router.request.results import Prompt

logger = logging.getLogger(__name__)

SUSPECT_S: Final = (10.0, 300.0)
"""First and longest pause in which a candidate's fetches do not count, after one hung or failed.
Over TCP, real Mooncake reads hung for 60 s. Engines look into the pool for each request, so any
request may be the next try."""

_ROUNDS: Final = 3  # a hole that a sample found may have others before it
_AHEAD: Final = 4  # blocks behind the boundary that are asked for, too
_NEAR: Final = 16  # blocks before it, where only samples are


class PoolVerifier:
    """Knows what the pools have of a prompt, and which candidates can fetch it."""

    def __init__(
        self,
        *,
        pools: Mapping[str, Pool],
        readers: PoolReaders,
        config: MooncakeConfig,
        metrics: Metrics,
    ) -> None:
        self.readers = readers
        self._suspects = Suspects(*SUSPECT_S)
        self._pools = pools
        self._config = config
        self._metrics = metrics

    def match(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        contracts: Mapping[HashContract, Sequence[CandidateId]],
        index: BlockIndex,
    ) -> dict[CandidateId, PoolMatch]:
        """Find what each candidate's pool has in its layout.

        A candidate is left out if it has no pool, if its pool is not counted on now, or if the pool
        has blocks that it cannot read. `index` knows the KV groups of a contract's candidates, and
        whether they drop the last block of a hit. They drop the last block of a hit in the pool,
        too, so a prompt's last token may end it. Source: MooncakeStoreWorker.lookup in the
        connector's store/worker.py, 0.32.0.
        """
        up = {name: pool.catalog for name, pool in self._pools.items() if pool.catalog.is_up}
        if not up or prompt.tokens is None:
            return {}
        model = candidates[0].replica.base_model
        pool_of = {candidate.id: candidate.replica.pool for candidate in candidates}
        found: dict[CandidateId, PoolMatch] = {}
        for contract, ids in contracts.items():
            if contract.algorithm == "warmroute":  # our own names: no engine's objects have them
                continue
            drops_last = index.drops_last(ids[0])
            num_reusable = prompt.num_tokens if drops_last else prompt.num_tokens - 1
            chain = prompt.keys(contract)[: num_reusable // contract.block_size]
            groups = index.groups_of(ids[0])
            num_dropped = int(drops_last and groups is None)
            by_directory: dict[tuple[str, str], PoolMatch] = {}
            for candidate in ids:
                pool = pool_of[candidate]
                if pool is None or pool not in up:
                    continue
                directory = up[pool].directory_of(model, candidate)
                if directory is None:
                    continue
                match = by_directory.get((pool, directory))
                if match is None:
                    num_blocks = max(0, up[pool].match(directory, chain, groups) - num_dropped)
                    on_disk = up[pool].on_disk(directory, chain[:num_blocks])
                    match = PoolMatch(
                        pool, directory, contract, chain, groups, num_blocks, num_dropped, on_disk
                    )
                    by_directory[pool, directory] = match
                found[candidate] = match
        return found

    def reads(self, candidate: CandidateId) -> bool:
        """Return whether a candidate can be counted on to fetch what it lacks."""
        return self.readers.reads(candidate) and not self._suspects.is_suspect(
            candidate, time.monotonic()
        )

    def begins_fetch(self, candidate: CandidateId) -> None:
        """Note that a request is sent that is counted on to fetch."""
        self._suspects.began(candidate, time.monotonic())

    def fetched(self, candidate: CandidateId, begun_s: float) -> None:
        """Note that a request that had to fetch got its first token."""
        self._suspects.succeeded(candidate, begun_s)

    def fetch_failed(self, candidate: CandidateId, begun_s: float) -> None:
        """Note that a request that had to fetch failed, or waits for too long."""
        if self._suspects.suspect(candidate, begun_s, time.monotonic()):
            self._metrics.pool_suspected.labels(candidate).inc()
            logger.warning("reads from the pool are suspect", extra={"candidate": candidate})

    def num_lost_tokens(self, match: PoolMatch, num_tokens: int, since_s: float) -> int:
        """Count the tokens behind the first ones that the pool had, and lost since then."""
        directory = self._pools[match.pool].catalog.directory(match.directory)
        size = match.contract.block_size
        return directory.num_lost(match.chain[num_tokens // size :], since_s) * size

    # ---------------------------------------------------------------- verification

    async def verified(self, prompt: Prompt, plan: Plan) -> bool:
        """Ask whether the pool has what a plan would fetch. False: there was nothing to ask.

        Also if it could fetch: the pool has probably been given what another candidate holds.
        """
        positions = self.due(plan)
        if positions:
            await self.verify(prompt, plan, positions)
        return bool(positions)

    def due(self, plan: Plan) -> list[int]:
        """List the blocks to ask the master about, for a choice that this could change.

        It could where the candidate would fetch, or where the pool has probably been given what
        another candidate holds, though nothing has said so yet.
        """
        match = plan.pool
        if match is None or not (plan.view.num_fetched_tokens or plan.num_likely_tokens):
            return []
        num_likely_blocks = min(plan.num_likely_blocks, len(match.chain))
        if not (match.num_blocks or num_likely_blocks) or not self._config.verify_keys:
            return []
        if not self._pools[match.pool].questions.can_ask(time.monotonic()):
            return []
        return self._open_positions(match, match.num_blocks, num_likely_blocks)

    async def verify(self, prompt: Prompt, plan: Plan, positions: Sequence[int]) -> None:
        """Ask the master and correct the directory; never fails, never takes long."""
        match = plan.pool
        assert match is not None
        started_s = time.monotonic()
        deadline_s = started_s + self._config.verify_timeout_s
        try:
            num_blocks = await self._ask_until_known(prompt, plan, match, positions, deadline_s)
        except PoolError as exc:
            result = "late" if isinstance(exc, PoolLate) else "failed"
        else:
            result = "unnamed" if num_blocks is None else _result(match.num_blocks, num_blocks)
        self._metrics.pool_verified.labels(match.pool, result).inc()
        self._metrics.pool_verify.observe(time.monotonic() - started_s)

    async def ask_for_all(self, prompt: Prompt, plan: Plan) -> None:
        """Ask the master about a whole prompt that has just been stored; never fails."""
        match = plan.pool
        if match is None or not self._pools[match.pool].questions.can_ask(time.monotonic()):
            return
        positions = self._open_positions(match, match.num_blocks, len(match.chain))
        if positions:
            await self.verify(prompt, plan, positions)

    async def _ask_until_known(
        self,
        prompt: Prompt,
        plan: Plan,
        match: PoolMatch,
        positions: Sequence[int],
        deadline_s: float,
    ) -> int | None:
        """Ask, and again where the answer moved the boundary; return where it is.

        None: no key can be named.

        Raises:
            PoolError: no answer in time, or none that is understood.
        """
        pool = self._pools[match.pool]
        if not pool.catalog.names(match.directory, b""):
            return None
        asked: set[int] = set()
        num_blocks = match.num_blocks
        for _ in range(_ROUNDS):
            asked.update(positions)
            digests = prompt.digests(match.contract, positions)
            names = {
                match.chain[position]: pool.catalog.names(match.directory, digest)
                for position, digest in zip(positions, digests, strict=True)
            }
            await pool.questions.wait(pool.questions.ask(match.directory, names), deadline_s)
            num_blocks = pool.catalog.match(match.directory, match.chain, match.groups)
            num_blocks = max(0, num_blocks - match.num_dropped)
            opened = self._open_positions(match, num_blocks, plan.num_likely_blocks)
            positions = [position for position in opened if position not in asked]
            if not positions:
                break
        pool.catalog.fill(match.directory, match.chain[:num_blocks], sorted(asked))
        return num_blocks

    def _open_positions(
        self, match: PoolMatch, num_blocks: int, num_likely_blocks: int
    ) -> list[int]:
        """List the blocks to ask for, as many as one question may have objects."""
        catalog = self._pools[match.pool].catalog
        num_ranks = max(1, len(catalog.names(match.directory, b"")))
        max_blocks = self._config.verify_keys // num_ranks
        return _plan(num_blocks, len(match.chain), max_blocks, num_likely_blocks)

    # ---------------------------------------------------------------- audit

    def audit(self, placement: Placement, num_reported: int) -> bool:
        """Learn from what an engine reused; return whether the pool had any part in it.

        Where it had, a wrong prediction says nothing about the replica's own event stream.
        """
        num_own = placement.predicted.num_own_tokens
        num_pool = placement.predicted.num_pool_tokens or 0
        if num_pool <= num_own:
            return False
        candidate = placement.lease.candidate
        if num_reported > num_own:  # it read, counted on or not
            self.fetched(candidate, placement.lease.begun_s)
        belief = self.readers.observe(
            candidate,
            num_own_tokens=num_own,
            num_pool_tokens=num_pool,
            num_reported=num_reported,
        )
        if belief is True:
            logger.info("replica does read the pool", extra={"candidate": candidate})
        elif belief is False:
            logger.warning(
                "replica does not read the pool: set replicas[].pool if it should",
                extra={"candidate": candidate},
            )
        pool = self._pools.get(placement.candidate.replica.pool or "")
        if pool is not None and num_reported != placement.predicted.num_cached_tokens:
            pool.catalog.wants_listing = True
        return True


def _plan(
    num_blocks: int, num_chain: int, max_blocks: int, num_likely_blocks: int = 0
) -> list[int]:
    """Choose the blocks to ask for: all up to the boundary and a few behind, or samples of them.

    [0, boundary) evenly spaced      [boundary - 16, boundary) all      [boundary, + 4) all

    Where more are likely, all of those as far as 3/4 of `max_blocks` go; the next round goes on.
    """
    end = min(num_chain, max(num_blocks + _AHEAD, num_likely_blocks))
    if end <= max_blocks:
        return list(range(end))
    end = min(end, num_blocks + max(_AHEAD, max_blocks * 3 // 4))
    near = range(max(0, num_blocks - _NEAR), end)
    num_spaced = max(1, max_blocks - len(near))
    spaced = {position * near.start // num_spaced for position in range(num_spaced)}
    return sorted({*spaced, *near})


def _result(num_thought: int, num_found: int) -> str:
    if num_found == num_thought:
        return "confirmed"
    return "less" if num_found < num_thought else "more"
