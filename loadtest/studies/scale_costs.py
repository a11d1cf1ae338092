"""What the processes of `loadtest.studies.scale` use: read from outside, idle and after a load."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final, Self

import psutil
import redis
from msgspec import Struct

_SCAN: Final = 5_000  # keys at a time


class Use(Struct, frozen=True):
    """What a process has used so far, and holds now."""

    cpu_s: float
    held_bytes: int

    @classmethod
    def of_process(cls, pid: int) -> Self:
        """Read CPU time and resident memory."""
        process = psutil.Process(pid)
        times = process.cpu_times()
        return cls(times.user + times.system, process.memory_info().rss)

    @classmethod
    def of_redis(cls, store: redis.Redis) -> Self:
        """Ask a Redis for its CPU time and for what it has allocated."""
        info = store.info()
        return cls(info["used_cpu_user"] + info["used_cpu_sys"], info["used_memory"])


class Cost(Struct, frozen=True, kw_only=True):
    """What a process used while it stood idle, and under a load beyond that."""

    idle_cpu: float  # cores
    loaded_cpu_s: float  # not positive: less than what idling varies by
    idle_bytes: int
    loaded_bytes: int

    @classmethod
    def between(cls, uses: tuple[Use, Use, Use], idle_s: float, loaded_s: float) -> Self:
        """Take the differences of three readings: before, after idling, after the load."""
        begun, idle, loaded = uses
        idle_cpu = (idle.cpu_s - begun.cpu_s) / idle_s
        return cls(
            idle_cpu=idle_cpu,
            loaded_cpu_s=loaded.cpu_s - idle.cpu_s - idle_cpu * loaded_s,
            idle_bytes=idle.held_bytes,
            loaded_bytes=loaded.held_bytes,
        )

    @classmethod
    def mean(cls, costs: Sequence[Self]) -> Self:
        """Return what one of several uses in the mean."""
        return cls(
            idle_cpu=fmean(cost.idle_cpu for cost in costs),
            loaded_cpu_s=fmean(cost.loaded_cpu_s for cost in costs),
            idle_bytes=round(fmean(cost.idle_bytes for cost in costs)),
            loaded_bytes=round(fmean(cost.loaded_bytes for cost in costs)),
        )


class Held(Struct, frozen=True, kw_only=True):
    """What lies in a Redis, by kind, in bytes of its memory."""

    num_blocks: int
    block_bytes: int
    num_sessions: int
    session_bytes: int
    log_bytes: int  # events and requests, the last minute's

    @classmethod
    def by(cls, store: redis.Redis) -> Self:
        """Ask for the size of every key."""
        num_blocks = block_bytes = num_sessions = session_bytes = log_bytes = 0
        for key in store.scan_iter(count=_SCAN):
            kind = key.partition(b"}:")[2].partition(b":")[0]
            if kind not in (b"b", b"sessions", b"log", b"work"):
                continue
            size = store.memory_usage(key, samples=0) or 0
            if kind == b"b":
                num_blocks += store.hlen(key)
                block_bytes += size
            elif kind == b"sessions":
                num_sessions += store.hlen(key)
                session_bytes += size
            else:
                log_bytes += size
        return cls(
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            num_sessions=num_sessions,
            session_bytes=session_bytes,
            log_bytes=log_bytes,
        )
