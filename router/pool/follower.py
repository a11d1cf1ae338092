"""The side path of the pool, top to bottom: from the Mooncake master into the directories.

1. Find the master that serves, if there are several (router.pool.master). Read its counters each
   second: is it up, is it the same process, did it evict?
2. List its keys at the start, every `mooncake.list_s`, and when the directories may be wrong. That
   is after an eviction, a restart or a correction by verification, while a layout is unknown, and
   if there are objects that no event reported (engines' MultiConnector reports none).

It never fails a request. An error is counted and logged once, the pool does not count, and requests
go on without it. An unexpected error ends the run, and router.base.supervisor starts another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from router.base.errors import PoolError, PoolGone, PoolLate
from router.config import MooncakeConfig
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.master import SLICE, MasterApi, MasterFigures, find_leader

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Pause between two reads of the master's counters."""

_PATIENCE: Final = 2  # failures in a row before the pool counts as lost; one if nothing listens
_LIST_SHARE: Final = 0.05  # highest share of the time for listings, however often they are wanted
_LIST_TIMEOUT_S: Final = 120.0
_LEFT: Final = 0.5  # of the objects that were not evicted; with fewer, all were removed


class PoolFollower:
    """Keeps the directories equal to one master's pool.

    Args:
        name: The pool's; "" is the only one.

    `is_lister`: of several routers that share their directories, only one asks for listings. The
    others read the counters.
    """

    def __init__(
        self,
        pool: PoolCatalog,
        api: MasterApi,
        config: MooncakeConfig,
        metrics: Metrics,
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_lister = True
        self._pool = pool
        self._api = api
        self._config = config
        self._failures = partial(metrics.pool_failures.labels, name)
        self._metrics = metrics
        self._clock = clock
        self._num_failures = 0
        self.list_again_s = 0.0  # not before
        self._num_known = 0
        self._logged = ""
        self._logged_layouts: dict[str, str] = {}
        self._logged_unreadable: dict[str, str] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(POLL_S)

    async def step(self) -> None:
        """Read the master's counters once, and list its keys if that is due."""
        try:
            if await find_leader(self._api):
                self._note_leader()
            self._look(await self._api.figures())
            if self._is_listing_due():
                await self._list()
            if self._pool.listed_s is not None or not self.is_lister:
                self._pool.found()
            self._num_failures = 0
        except PoolError as exc:
            self._fail(exc)
        self._log()

    # ---------------------------------------------------------------- 1 counters

    def _note_leader(self) -> None:
        """Start again with another master: the last one's objects may be lost."""
        logger.warning("another Mooncake master is the leader now", extra={"master": self._api.url})
        self._pool.figures = None
        self.list_again_s = 0.0
        if self.is_lister:
            self._pool.restarted()

    def _look(self, figures: MasterFigures) -> None:
        pool = self._pool
        before, pool.figures = pool.figures, figures
        is_news = self._note_known()
        if before is None:
            return
        if _fell(before.num_put_keys, figures.num_put_keys) or _fell(
            before.num_evicted_keys, figures.num_evicted_keys
        ):
            logger.warning("the Mooncake master was restarted", extra={"master": self._api.url})
            if self.is_lister:
                pool.restarted()
        elif _was_emptied(before, figures):
            logger.warning(
                "the Mooncake pool was emptied: an engine does that when it sleeps, is paused or "
                "has its caches reset",
                extra={"master": self._api.url, "objects": before.num_keys},
            )
            self.list_again_s = 0.0  # little is left to list
            if self.is_lister:
                pool.emptied()
        elif figures.num_evicted_keys != before.num_evicted_keys or _fell(
            before.num_keys, figures.num_keys
        ):
            pool.wants_listing = True
        elif self.is_lister and not is_news and _fell(figures.num_keys, before.num_keys):
            pool.wants_listing = True  # more objects, and no event reported them

    def _note_known(self) -> bool:
        """Count the blocks that are known; return whether that is news."""
        before = self._num_known
        self._num_known = sum(len(directory) for directory in self._pool.directories.values())
        return self._num_known != before

    # ---------------------------------------------------------------- 2 listing

    def _is_listing_due(self) -> bool:
        now_s = self._clock()
        if now_s < self.list_again_s:
            return False
        if not self.is_lister:  # only a listing shows the layout
            return self._pool.lacks_layouts
        listed_s = self._pool.listed_s
        is_old = listed_s is None or now_s - listed_s >= self._config.list_s
        return is_old or self._pool.wants_listing

    async def _list(self) -> None:
        """Read a listing and apply it.

        Raises:
            PoolError: it is incomplete; the directories stay as they were.
        """
        pool, started_s = self._pool, self._clock()
        pool.begin_listing()
        is_complete = False
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                await self._api.list_keys(pool.listed)
            for _ in pool.reconcile(SLICE):  # one slice a turn of the loop
                await asyncio.sleep(0)
            is_complete = True
        except TimeoutError as exc:
            raise PoolLate(f"{self._api.url}/get_all_keys: not in {_LIST_TIMEOUT_S} s") from exc
        finally:
            if not is_complete:
                pool.abandon_listing()
            took_s = self._clock() - started_s
            self.list_again_s = self._clock() + took_s * (1 / _LIST_SHARE - 1)
        pool.listed_s = self._clock()
        self._note_known()
        self._metrics.pool_listing.observe(took_s)
        self._log_layouts()

    # ---------------------------------------------------------------- logs

    def _fail(self, error: PoolError) -> None:
        self._num_failures += 1
        self._failures(error.code).inc()
        if isinstance(error, PoolGone) or self._num_failures >= _PATIENCE or not self._pool.is_up:
            self._pool.lost(error.message)

    def _log(self) -> None:
        """Log a change of state, once."""
        self._log_unreadable()
        said = "up" if self._pool.is_up else self._pool.reason
        if said == self._logged:
            return
        self._logged = said
        if self._pool.is_up:
            num_blocks = sum(map(len, self._pool.directories.values()))
            logger.info("pool found", extra={"master": self._api.url, "blocks": num_blocks})
        else:
            logger.warning(
                "pool lost: its contents are not used",
                extra={"master": self._api.url, "reason": said},
            )

    def _log_layouts(self) -> None:
        for name, layout in self._pool.layouts.items():
            if self._logged_layouts.get(name) != layout.text:
                self._logged_layouts[name] = layout.text
                logger.info(
                    "pool keys known",
                    extra={"model": name, "pattern": layout.text, "ranks": layout.num_ranks},
                )

    def _log_unreadable(self) -> None:
        before = self._logged_unreadable
        self._logged_unreadable = {name: at.text for name, at in self._pool.unreadable.items()}
        for name, why in self._pool.unreadable.items():
            if before.get(name) != why.text:
                logger.warning(
                    "pool blocks of a model are not credited",
                    extra={"model": name, "reason": why.text, "hint": why.hint},
                )


def _was_emptied(before: MasterFigures, now: MasterFigures) -> bool:
    """Return whether most objects disappeared without an eviction: `remove_all`.

    Some may be stored again since. Source: MooncakeStoreConnector.reset_cache in vLLM 0.32.0.
    """
    if not before.num_keys or now.num_keys is None:
        return False
    num_evicted = (now.num_evicted_keys or 0) - (before.num_evicted_keys or 0)
    num_left = before.num_keys - num_evicted
    return now.num_keys < _LEFT * num_left


def _fell(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now < before
