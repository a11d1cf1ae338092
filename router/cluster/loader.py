"""Snapshots, in the background: what Redis knows of the streams that other routers lead."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from router.cluster.catch_up import Loading
from router.cluster.membership import Membership, Memberships
from router.cluster.redis_snapshot import IndexSnapshot
from router.cluster.redis_store import RedisStore
from router.messages import StreamId

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.02  # how soon a stream that wants its snapshot gets it
_POSTPONED_S: Final = 0.1  # the same where the snapshot was worth less than what we know
_SLICE_S: Final = 0.002
"""Longest time to stage what was read before requests get a turn. A dict that grows comes on top:
8 to 11 ms for the one of 175,000 blocks."""


async def load_snapshots(store: RedisStore, memberships: Memberships) -> None:
    """Load the snapshots that are wanted, several by one pass over the index, for ever.

    Raises:
        StoreError: Redis is gone or will not do.
    """
    while True:
        wanting = memberships.wanting()
        is_done = not wanting or await _load(store, memberships, wanting)
        await asyncio.sleep(_LOOK_S if is_done else _POSTPONED_S)


async def _load(store: RedisStore, memberships: Memberships, wanting: list[Membership]) -> bool:
    """Load the snapshots of some streams; False: some were postponed."""
    started_s = time.monotonic()
    # From here on the log is kept.
    loadings = {member.stream_id: memberships.begin_load(member) for member in wanting}
    snapshot = await store.snapshot(list(loadings))
    for stream_id, loading in loadings.items():
        loading.head = snapshot.heads.get(stream_id)
    accepted = [m for m in wanting if memberships.accepts(m, loadings[m.stream_id])]
    with_blocks = {
        member.stream_id: loadings[member.stream_id]
        for member in accepted
        if member.stream_id in snapshot.heads and member.has_blocks
    }
    num_blocks = await _stage(snapshot, with_blocks) if with_blocks else 0
    ends = await store.heads() if with_blocks else {}
    for member in accepted:
        end = ends.get(member.stream_id)
        through = end.number if end is not None else None
        memberships.end_load(member, loadings[member.stream_id], through=through)
    if with_blocks:
        seconds = round(time.monotonic() - started_s, 2)
        logger.info(
            "snapshot loaded",
            extra={"streams": len(with_blocks), "blocks": num_blocks, "seconds": seconds},
        )
    return len(accepted) == len(wanting)


async def _stage(snapshot: IndexSnapshot, loadings: dict[StreamId, Loading]) -> int:
    """Read the blocks of some streams into their loadings; count them."""
    num_blocks = 0
    async for blocks in snapshot.slices():
        until_s = time.monotonic() + _SLICE_S
        for (stream_id, tier), keys in blocks.items():
            if stream_id in loadings and tier != "pool":
                loadings[stream_id].staged.add(tier, keys)
                num_blocks += len(keys)
            if time.monotonic() >= until_s:  # blocks are spread evenly: all dicts grow at once
                await asyncio.sleep(0)
                until_s = time.monotonic() + _SLICE_S
    for (stream_id, tier), copies in (await snapshot.copies()).items():
        if stream_id in loadings and tier != "pool":
            loadings[stream_id].staged.add(tier, (), copies.items())
    return num_blocks
