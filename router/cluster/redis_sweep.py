"""Removes from Redis dead bits, old streams and old sessions."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct

from router.cluster import redis_scripts as scripts
from router.cluster.redis_scripts import Scripts
from router.cluster.redis_snapshot import NUM_BUCKETS

_SWEPT_BLOCKS: Final = 1_000  # a call: about a millisecond of the server's time
_SESSIONS_A_CALL: Final = 500


class Swept(Struct, frozen=True, kw_only=True):
    """What a sweep did; not ours: another router sweeps."""

    is_ours: bool
    num_changed: int = 0  # blocks that lost some holders
    num_dropped: int = 0  # blocks that lost all
    num_bits: int = 0  # freed
    num_streams: int = 0  # forgotten
    num_sessions: int = 0  # forgotten


async def sweep(
    store: Scripts, *, router: str, lease_ms: int, pause_s: float, forget_after_s: float
) -> Swept:
    """Clear dead bits in the buckets, forget streams long without a lease, and old sessions.

    Args:
        router: Who sweeps; one at a time.
        lease_ms: For how long it may.
        pause_s: Between two calls, of about a millisecond each.
        forget_after_s: A stream that no router wrote for so long is forgotten.
    """
    is_ours, num_streams, dead = await store.run(
        scripts.DEAD, router, lease_ms, round(forget_after_s * 1000)
    )
    if not is_ours:
        return Swept(is_ours=False)
    bucket, num_changed, num_dropped = (0 if dead else NUM_BUCKETS), 0, 0
    while bucket < NUM_BUCKETS:
        bucket, changed, dropped = await store.run(
            scripts.SWEEP, router, lease_ms, bucket, _SWEPT_BLOCKS
        )
        if bucket < 0:  # it took too long and another router began
            return Swept(is_ours=False, num_changed=num_changed, num_dropped=num_dropped)
        num_changed += changed
        num_dropped += dropped
        await asyncio.sleep(pause_s)
    num_sessions = await _forget_sessions(store, pause_s)
    num_bits = await store.run(scripts.FREE, router, *dead)
    return Swept(
        is_ours=True,
        num_changed=num_changed,
        num_dropped=num_dropped,
        num_bits=num_bits,
        num_streams=num_streams,
        num_sessions=num_sessions,
    )


async def _forget_sessions(store: Scripts, pause_s: float) -> int:
    position, num_sessions = b"0", 0
    num_over: int
    while True:
        position, num_over, _ = await store.run(scripts.SESSIONS, position, _SESSIONS_A_CALL)
        num_sessions += num_over
        if position == b"0":
            return num_sessions
        await asyncio.sleep(pause_s)
