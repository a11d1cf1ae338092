"""Snapshots, in the background: what Redis knows of candidates that others feed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from router.cluster.leadership import Feed, SharedFeeds
from router.cluster.redis_store import RedisStore

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.02  # how soon a feed that wants its snapshot is seen to
_POSTPONED_S: Final = 0.1  # the same for one that is worth less yet than what we know
_SLICE_S: Final = 0.004  # longest time to stage what was read before requests get a turn


async def load(store: RedisStore, feeds: SharedFeeds) -> None:
    """Load what wants to be loaded, several feeds by one pass over the index, for ever.

    Raises:
        StoreError: Redis is gone or will not do.
    """
    while True:
        wanting = [feed for feed in feeds if feed.wants_load and feed.loading is None]
        is_done = not wanting or await _load(store, feeds, wanting)
        await asyncio.sleep(_LOOK_S if is_done else _POSTPONED_S)


async def _load(store: RedisStore, feeds: SharedFeeds, wanting: list[Feed]) -> bool:
    """Load some feeds; False: some were postponed."""
    started_s = time.monotonic()
    loadings = {feed.id: feeds.begin_load(feed) for feed in wanting}  # the log is kept from here
    snapshot = await store.snapshot(list(loadings))
    for feed_id, loading in loadings.items():
        loading.state = snapshot.feeds.get(feed_id)
    taken = [feed for feed in wanting if feeds.accepts(feed, loadings[feed.id])]
    known = {feed.id for feed in taken if feed.id in snapshot.feeds and feed.has_blocks}
    num_blocks = 0
    if known:
        async for blocks in snapshot.slices():
            until_s = time.monotonic() + _SLICE_S
            for (feed_id, tier), keys in blocks.items():
                if feed_id in known and tier != "pool":
                    loadings[feed_id].staged.add(tier, keys)
                    num_blocks += len(keys)
                if time.monotonic() >= until_s:  # blocks are spread evenly: all dicts grow at once
                    await asyncio.sleep(0)
                    until_s = time.monotonic() + _SLICE_S
        for (feed_id, tier), copies in (await snapshot.copies()).items():
            if feed_id in known and tier != "pool":
                loadings[feed_id].staged.add(tier, (), copies.items())
    ends = await store.feeds() if known else {}
    for feed in taken:
        end = ends.get(feed.id)
        feeds.end_load(feed, loadings[feed.id], through=end.number if end is not None else None)
    if known:
        seconds = round(time.monotonic() - started_s, 2)
        logger.info(
            "snapshot loaded",
            extra={"feeds": len(known), "blocks": num_blocks, "seconds": seconds},
        )
    return len(taken) == len(wanting)
