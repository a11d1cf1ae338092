"""Fetches: what engines read from a shared pool, and how it is known before they do.

The local directory of a pool may be old. The master evicts without saying so, and an engine reports
stored blocks only with its next step. So the master is asked about the blocks that a plan would
fetch, and about those that it could fetch because another candidate holds more. All blocks are
asked for if they are few, else those around the boundary and some between.

    look      what the directories have of a prompt, before each decision
    due       what to ask the master, if its answer could change a plan
    verify    ask it; the request is planned again afterwards
    audit     what an engine reused shows whether it reads the pool at all

There is one deadline for it all, other requests' questions in front included. A late answer means
unknown, and the directory counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from policies.view import CandidateId
from router.base.backoff import Suspects
from router.base.contracts import HashContract
from router.base.errors import Overdue, PoolError, PoolLate
from router.config import MooncakeConfig
from router.index.behind import Behind
from router.index.block_index import BlockIndex
from router.metrics import Metrics
from router.pool.readers import PoolReaders
from router.replicas.ledger import Lease
from router.replicas.replica import Candidate
from router.request.observer import Observer
from router.request.results import Fetchable, Placement, Plan, Prompt

if TYPE_CHECKING:
    from router.pool.pools import Pool

logger = logging.getLogger(__name__)

SUSPECT_S: Final = (10.0, 300.0)
"""First and longest pause in which a candidate's fetches do not count, after one hung or failed.
Over TCP, real Mooncake reads hung for 60 s. Engines look into the pool for each request, so any
request may be the next try."""

READ_FAILED: Final = frozenset({"status_500", "event_500"})
"""What vLLM makes of a read from the pool that failed."""

_ROUNDS: Final = 3  # a hole that a sample found may have others before it
_AHEAD: Final = 4  # blocks behind the boundary that are asked for, too
_NEAR: Final = 16  # blocks before it, where only samples are


class Due(Struct, frozen=True):
    """What to ask a master: positions of blocks, and how many blocks it has probably been given."""

    there: Fetchable
    positions: Sequence[int]
    num_likely_blocks: int


class Fetches(Observer):
    """Knows what the pools have of a prompt, and which candidates can fetch it."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        readers: PoolReaders,
        config: MooncakeConfig,
        metrics: Metrics,
    ) -> None:
        self._readers = readers
        self._suspects = Suspects(*SUSPECT_S)
        self._pools = pools
        self._config = config
        self._metrics = metrics

    # ---------------------------------------------------------------- look-up

    def look(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        contracts: Mapping[HashContract, Sequence[CandidateId]],
        index: BlockIndex,
    ) -> dict[CandidateId, Fetchable]:
        """Find what each candidate's pool has in its layout.

        A candidate is left out if it has no pool, if its pool is not counted on now, or if the pool
        has blocks that it cannot read. `index` knows the KV groups of a contract's candidates, and
        whether they drop the last block of a hit. They drop the last block of a hit in the pool,
        too, so a prompt's last token may end it. Source: MooncakeStoreWorker.lookup in the
        connector's store/worker.py, 0.32.0.
        """
        found: dict[CandidateId, Fetchable] = {}
        directories = dict(self._directories(candidates))
        if not directories:
            return found
        for contract, ids in contracts.items():
            if contract.algorithm == "warmroute":  # our own names: no engine's objects have them
                continue
            sharing: dict[tuple[str, str], set[CandidateId]] = {}
            for id_ in ids:
                if id_ in directories:
                    sharing.setdefault(directories[id_], set()).add(id_)
            if not sharing:
                continue
            drops_last = ids[0] in index.dropping
            num_reusable = prompt.num_tokens if drops_last else prompt.num_tokens - 1
            chain = prompt.keys(contract)[: num_reusable // contract.block_size]
            groups = index.groups_of(ids[0])
            num_dropped = int(drops_last and groups is None)
            for (pool, directory), readable_by in sharing.items():
                catalog = self._pools[pool].catalog
                num_blocks = max(0, catalog.match(directory, chain, groups) - num_dropped)
                there = Fetchable(
                    pool=pool,
                    directory=directory,
                    candidates=readable_by,
                    contract=contract,
                    chain=chain,
                    groups=groups,
                    num_blocks=num_blocks,
                    num_dropped=num_dropped,
                    on_disk=catalog.on_disk(directory, chain[:num_blocks]),
                )
                found |= dict.fromkeys(readable_by, there)
        return found

    def _directories(
        self, candidates: Iterable[Candidate]
    ) -> Iterator[tuple[CandidateId, tuple[str, str]]]:
        """Yield each candidate that can read a pool now, with the pool and its directory there."""
        for candidate in candidates:
            replica = candidate.replica
            pool = self._pools.get(replica.pool) if replica.pool is not None else None
            if pool is None or not pool.catalog.is_up:
                continue
            directory = pool.catalog.directory_of(replica.base_model, candidate.id)
            if directory is not None:
                yield candidate.id, (pool.name, directory)

    def behind(self, candidate: CandidateId, candidates: Iterable[Candidate]) -> Behind | None:
        """Return the blocks of a pool that a candidate reads. None: it reads none now.

        `candidates`: all, for those that share these blocks.
        """
        if not self.reads(candidate):
            return None
        places = dict(self._directories(candidates))
        place = places.get(candidate)
        if place is None:
            return None
        pool, name = place
        catalog = self._pools[pool].catalog
        if name not in catalog.layouts:  # not verified
            return None
        directory = catalog.directory(name)
        return Behind(
            len(directory),
            is_full=directory.evicts,
            num_disk_blocks=directory.num_on_disk,
            sharers=[each for each, other in places.items() if other == place],
        )

    def num_lost_tokens(self, there: Fetchable, num_tokens: int, since_s: float) -> int:
        """Count the tokens behind the first ones that the pool had, and lost since then."""
        directory = self._pools[there.pool].catalog.directory(there.directory)
        size = there.contract.block_size
        return directory.num_lost(there.chain[num_tokens // size :], since_s) * size

    # ---------------------------------------------------------------- verification

    def due(self, plan: Plan, *, is_stored: bool = False) -> Due | None:
        """Choose what to ask the master for, if the answer could change a plan. None: nothing.

        It could where the candidate would fetch, or where the pool has probably been given what
        another candidate holds, though nothing has said so yet. `is_stored`: all of the prompt has
        just been stored.
        """
        there = plan.fetchable
        if there is None:
            return None
        num_likely = num_asked = _num_likely_blocks(plan, there)
        if is_stored:
            num_asked = len(there.chain)
        elif not num_likely and not plan.view.num_fetched_tokens:
            return None
        if not self._pools[there.pool].questions.can_ask(time.monotonic()):
            return None
        positions = self._open_positions(there, there.num_blocks, num_asked)
        return Due(there, positions, num_likely) if positions else None

    async def verify(self, prompt: Prompt, due: Due) -> None:
        """Ask the master and correct the directory; never fails, never takes long."""
        there, started_s = due.there, time.monotonic()
        try:
            num_blocks = await self._ask_until_known(
                prompt, due, started_s + self._config.verify_timeout_s
            )
        except PoolError as exc:
            result = "late" if isinstance(exc, PoolLate) else "failed"
        else:
            result = "unnamed" if num_blocks is None else _result(there.num_blocks, num_blocks)
        self._metrics.pool_verified.labels(there.pool, result).inc()
        self._metrics.pool_verify.observe(time.monotonic() - started_s)

    async def _ask_until_known(self, prompt: Prompt, due: Due, deadline_s: float) -> int | None:
        """Ask, and again where the answer moved the boundary; return where it is.

        None: no key can be named.

        Raises:
            PoolError: no answer in time, or none that is understood.
        """
        there, positions = due.there, due.positions
        pool, directory = self._pools[there.pool], there.directory
        if not pool.catalog.names(directory, b""):
            return None
        asked: set[int] = set()
        num_blocks = there.num_blocks
        for _ in range(_ROUNDS):
            asked.update(positions)
            digests = prompt.digests(there.contract, positions)
            names = {
                there.chain[position]: pool.catalog.names(directory, digest)
                for position, digest in zip(positions, digests, strict=True)
            }
            await pool.questions.wait(pool.questions.ask(directory, names), deadline_s)
            num_blocks = pool.catalog.match(directory, there.chain, there.groups)
            num_blocks = max(0, num_blocks - there.num_dropped)
            opened = self._open_positions(there, num_blocks, due.num_likely_blocks)
            positions = [position for position in opened if position not in asked]
            if not positions:
                break
        pool.catalog.fill(directory, there.chain[:num_blocks], sorted(asked))
        return num_blocks

    def _open_positions(
        self, there: Fetchable, num_blocks: int, num_likely_blocks: int
    ) -> list[int]:
        """List the blocks to ask for, as many as one question may have objects."""
        catalog = self._pools[there.pool].catalog
        num_ranks = max(1, len(catalog.names(there.directory, b"")))
        max_blocks = self._pools[there.pool].questions.max_objects // num_ranks
        return _plan(num_blocks, len(there.chain), max_blocks, num_likely_blocks)

    # ---------------------------------------------------------------- what reads show

    def reads(self, candidate: CandidateId) -> bool:
        """Return whether a candidate can be counted on to fetch what it lacks."""
        return self._readers.reads(candidate) and not self._suspects.is_suspect(
            candidate, time.monotonic()
        )

    def began(self, candidate: CandidateId) -> None:
        """Record a request that is counted on to fetch."""
        self._suspects.began(candidate, time.monotonic())

    def first_token(self, placement: Placement, at_s: float) -> None:
        """Trust the reads of a candidate again that has fetched."""
        if placement.predicted.num_fetched_tokens:
            self._suspects.succeeded(placement.lease.candidate, placement.lease.begun_s)

    def failed(self, prompt: Prompt, placement: Placement, failure: str) -> None:
        """Suspect the reads of a candidate if one may have failed, or hangs."""
        if placement.may_fetch and failure in READ_FAILED | {Overdue.code}:
            self.suspect(placement.lease)

    def suspect(self, lease: Lease) -> None:
        """Suspect the reads of a candidate, so that no other request counts on one."""
        if self._suspects.suspect(lease.candidate, lease.begun_s, time.monotonic()):
            self._metrics.pool_suspected.labels(lease.candidate).inc()
            logger.warning("reads from the pool are suspect", extra={"candidate": lease.candidate})

    def audit(self, placement: Placement, num_reported: int) -> bool:
        """Record what an engine reused; return whether the pool had any part in it.

        Where it had, a wrong prediction says nothing about the replica's own event stream.
        """
        if not placement.may_fetch:
            return False
        num_own = placement.predicted.num_own_tokens
        candidate = placement.lease.candidate
        if num_reported > num_own:  # it read, counted on or not
            self._suspects.succeeded(candidate, placement.lease.begun_s)
        belief = self._readers.observe(
            candidate,
            num_own_tokens=num_own,
            num_pool_tokens=placement.predicted.num_pool_tokens or 0,
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


def _num_likely_blocks(plan: Plan, there: Fetchable) -> int:
    """Count the leading blocks that the pool has probably been given; 0 if that is no news.

    They are on another candidate that shares the pool, and are more than what this candidate holds
    and more than what the pool is known to have.
    """
    if not plan.view.reads_pool:
        return 0
    num_known = max(plan.view.num_own_tokens, there.num_tokens)
    num_held = max(
        view.num_gpu_tokens
        for view in plan.snapshot.replicas
        if view.reads_pool and view.id in there.candidates
    )
    return num_held // there.contract.block_size if num_held > num_known else 0


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
