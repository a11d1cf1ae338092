"""Several routers as one: how soon a new one is warm, how old its picture of the others' load is.

A Redis of its own on the same machine. Warm: from the first connection of a router that knows
nothing until all that Redis has is in its index; four replicas, 1,000,000 blocks in all, in a
process of its own, and how long its loop was busy without a turn. Old: two
router processes; one publishes 500 requests/s, each claiming 125 new blocks, answered and ended a
little later; from the moment a request begins there until its lease is booked in the other.
Nothing but sharing runs in these processes: no requests, no events.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import click
import msgspec
import numpy as np
import uvloop
from msgspec import Struct

from loadtest.bench.bench_redis import redis_server
from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.setting import Setting
from policies.view import CandidateId
from router.cluster import OrderShare, RecordShare, Sharing
from router.cluster.candidate_names import CandidateNames
from router.cluster.candidate_source import CandidateSource
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_store import RedisStore
from router.config import RedisConfig, ReplicaConfig
from router.contracts import KEY_BITS, BlockKey, HashContract
from router.experiments.runner import ExperimentRunner
from router.garbage import collect_garbage
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.messages import Delta, Position, StreamId, StreamStatus, TierChange
from router.metrics import Metrics
from router.replicas import Booking, Fleet, Replica, ServedModel, Sessions
from router.replicas.ledger import Lease
from router.replicas.registry import Registry
from router.replicas.response_owners import ResponseOwners

_NUM_REPLICAS: Final = 4
_REQUESTS_PER_S: Final = 500
_CLAIMED_BLOCKS: Final = 125  # 2,000 tokens
_ANSWERED_S: Final = 0.1
_ENDED_S: Final = 0.4
_DELTA_BLOCKS: Final = 1_000
_CONTRACT: Final = HashContract(algorithm="sha256", block_size=16)


class _Warmed(Struct):
    seconds: float
    num_blocks: int
    stall_ms: float


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines: list[Line] = []
    num_blocks = setting.size(1_000_000, 8_000)
    with redis_server(setting.work_dir) as client:
        url = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"
        for part in setting.track(("warm", "old"), "sharing"):
            client.flushall()
            lines += _warm(setting, url, num_blocks) if part == "warm" else _old(setting, url)
    return lines


# -- warm ----------------------------------------------------------------------------------------


def _warm(setting: Setting, url: str, num_blocks: int) -> list[Line]:
    asyncio.run(_fill(url, num_blocks))
    warmed = [_spawn_warm(url, num_blocks) for _ in range(setting.size(5, 1))]
    what = f"a new router is warm, {num_blocks:,} blocks in Redis"
    return [
        distribution(
            what, "s", [each.seconds for each in warmed], note="from its first connection"
        ),
        distribution(
            f"{what}: longest stall of its loop",
            "ms",
            [each.stall_ms for each in warmed],
            *(() if setting.quick else (Budget("max", 20.0),)),
            note="CPU time between two turns",
        ),
    ]


async def _fill(url: str, num_blocks: int) -> None:
    """Write what a router would have written of four replicas."""
    store = RedisStore(_config(url), router="leader", password=None)
    await store.open()
    stream_ids = [StreamId(f"{name}#0") for name in _names()]
    await store.hold(stream_ids)
    status = StreamStatus("exact", "", _CONTRACT, num_blocks)
    keys = np.random.default_rng(1).integers(0, 1 << KEY_BITS, num_blocks, dtype=np.uint64)
    for i, stream_id in enumerate(stream_ids):
        own = keys[i :: len(stream_ids)]
        parts = [own[at : at + _DELTA_BLOCKS] for at in range(0, len(own), _DELTA_BLOCKS)]
        await store.write(
            [
                Delta(
                    stream_id=stream_id,
                    changes=(TierChange("gpu", stored=part.astype("<u8").tobytes()),),
                    position=Position(number, b"mark"),
                    status=status if number == 1 else None,
                )
                for number, part in enumerate(parts, 1)
            ]
        )
    await store.close()


def _spawn_warm(url: str, num_blocks: int) -> _Warmed:
    command = [sys.executable, "-m", "loadtest.bench.bench_sharing", "warm", url, str(num_blocks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=_Warmed)


async def _warm_up(url: str, num_blocks: int) -> _Warmed:
    router = _Router("late", url)
    async with asyncio.TaskGroup() as tg:
        running = router.share(tg)
        start_s = time.monotonic()
        running += router.follow(tg)
        stall_ms = await _longest_stall_ms(lambda: router.num_blocks >= num_blocks)
        seconds = time.monotonic() - start_s
        for task in running:
            task.cancel()
    return _Warmed(seconds, router.num_blocks, stall_ms)


async def _longest_stall_ms(is_over: Callable[[], bool]) -> float:
    """Measure what the loop does between two turns: CPU time, for others use this machine, too."""
    longest_s, last_s = 0.0, time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        if is_over():
            return longest_s * 1e3


# -- old -----------------------------------------------------------------------------------------


def _old(setting: Setting, url: str) -> list[Line]:
    seconds = setting.size(20, 1)
    command = [sys.executable, "-m", "loadtest.bench.bench_sharing", "listen", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert listener.stdin is not None
        listener.stdout.readline()  # it is there
        began_s = uvloop.run(_publish(url, seconds * _REQUESTS_PER_S))
        booked_s = msgspec.json.decode(listener.communicate(b"\n")[0], type=dict[int, float])
    old_ms = [(booked_s[number] - began_s[number]) * 1e3 for number in booked_s.keys() & began_s]
    return [
        distribution(
            f"ledger staleness: begun in one router, booked in another, {_REQUESTS_PER_S}/s",
            "ms",
            old_ms,
            note=f"{len(began_s) - len(old_ms)} of {len(began_s):,} not booked",
        )
    ]


async def _publish(url: str, num_requests: int) -> dict[int, float]:
    """Begin requests at an even pace, and end them; return when each began."""
    router = _Router("publisher", url)
    began_s: dict[int, float] = {}
    async with asyncio.TaskGroup() as tg:
        running = router.share(tg)
        await _up(router)
        loop = asyncio.get_running_loop()
        rng = np.random.default_rng(2)
        start_s = loop.time()
        for number in range(1, num_requests + 1):
            await asyncio.sleep(max(0.0, start_s + number / _REQUESTS_PER_S - loop.time()))
            keys = rng.integers(0, 1 << KEY_BITS, _CLAIMED_BLOCKS, dtype=np.uint64).tolist()
            lease = router.begin(number, [BlockKey(key) for key in keys])
            began_s[number] = time.monotonic()
            loop.call_later(_ANSWERED_S, router.answered, lease)
            loop.call_later(_ENDED_S, router.ended, lease)
        await asyncio.sleep(2 * _ENDED_S)
        for task in running:
            task.cancel()
    return began_s


async def _up(router: _Router) -> None:
    """Wait until state is shared."""
    await router.sharing.link.settled.wait()
    if not router.sharing.link.is_up:
        raise RuntimeError(f"no Redis: {router.sharing.link.reason}")


async def _listen(url: str) -> dict[int, float]:
    """Book what is received until a line comes; return when each request was booked."""
    router = _Router("listener", url)
    async with asyncio.TaskGroup() as tg:
        running = router.share(tg)
        await _up(router)
        print(flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for task in running:
            task.cancel()
    return router.fleet.booked_s


# -- a router, as far as it shares ---------------------------------------------------------------


class _NotedFleet(Fleet):
    """Notes when another router's request was booked; its number is its count of tokens."""

    __slots__ = ("booked_s",)

    def __init__(self) -> None:
        super().__init__()
        self.booked_s: dict[int, float] = {}

    def admit(self, candidate: CandidateId, booking: Booking, now_s: float) -> Lease:
        lease = super().admit(candidate, booking, now_s)
        if not booking.is_ours:
            self.booked_s[booking.num_uncached_tokens] = time.monotonic()
        return lease


class _Router:
    """Put together as router.assembly does it."""

    def __init__(self, name: str, url: str) -> None:
        registry = Registry([ReplicaConfig(url=f"http://{r}", name=r) for r in _names()])
        self.fleet = _NotedFleet()
        self.caches = CacheView(BlockIndex())
        names = CandidateNames(registry, self.fleet)
        sessions, metrics = Sessions(), Metrics()
        self.peers = Peers(
            name,
            fleet=self.fleet,
            caches=self.caches,
            sessions=sessions,
            names=names,
            metrics=metrics,
        )
        self.outbox = Outbox(
            caches=self.caches,
            sessions=sessions,
            names=names,
            metrics=metrics,
        )
        store = RedisStore(_config(url), router=name, password=None)
        self.sharing = Sharing(
            store,
            caches=self.caches,
            names=names,
            peers=self.peers,
            outbox=self.outbox,
            orders=OrderShare(
                store,
                registry=registry,
                experiments=ExperimentRunner(Metrics()),
                apply_records=_ignore,
            ),
            records=RecordShare(
                store,
                peers=self.peers,
                outbox=self.outbox,
                responses=ResponseOwners(),
                ttl_s=60.0,
            ),
            pools=(),
            lease_s=3.0,
        )
        for replica in _names():
            self.fleet.add(
                Replica(
                    name=replica,
                    url=f"http://{replica}",
                    models=(ServedModel(id="m"),),
                    num_ranks=1,
                    block_size=_CONTRACT.block_size,
                    num_blocks=1_000_000,
                )
            )

    def share(self, tg: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Share what is in flight."""
        collecting = collect_garbage(lambda: False)
        return [
            tg.create_task(self.sharing.run(), name="sharing"),
            tg.create_task(collecting, name="garbage"),
        ]

    def follow(self, tg: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start to follow the replicas, from what Redis has."""
        return [
            tg.create_task(self._start(CandidateId(name)), name=f"follow {name}")
            for name in _names()
        ]

    async def _start(self, candidate: CandidateId) -> None:
        await _up(self)
        self.caches.add(candidate, self._source(candidate).rank_stream())
        writer = self.sharing.writer.add(StreamId(f"{candidate}#0"), candidate)
        await self.sharing.following.start(writer)

    def _source(self, name: CandidateId) -> CandidateSource:
        return CandidateSource(
            name,
            self.caches.index,
            url=f"http://{name}",
            endpoint=None,
            replay_timeout_s=1.0,
            block_size=_CONTRACT.block_size,
            capacity_blocks=1_000_000,
        )

    @property
    def num_blocks(self) -> int:
        return sum(self.caches.index.num_blocks(CandidateId(name)) for name in _names())

    def begin(self, number: int, keys: Sequence[BlockKey]) -> Lease:
        """Send a request, as the pipeline does."""
        now_s = time.monotonic()
        candidate = CandidateId(_names()[number % _NUM_REPLICAS])
        booking = Booking(num_uncached_tokens=number, num_cached_tokens=0)
        lease = self.fleet.admit(candidate, booking, now_s)
        self.outbox.began(
            lease,
            claim=self.caches.claim(candidate, keys, 0),
            num_held_blocks=0,
            session_hash=number % 200,
        )
        return lease

    def answered(self, lease: Lease) -> None:
        self.outbox.answered(lease, time.monotonic())

    def ended(self, lease: Lease) -> None:
        self.outbox.ended(lease, computed=True)


def _ignore(records: Mapping[str, object]) -> None:
    """The replicas stay as they are."""


def _names() -> list[str]:
    return [f"r{number + 1}" for number in range(_NUM_REPLICAS)]


def _config(url: str) -> RedisConfig:
    return RedisConfig(url=url, timeout_s=60.0, lease_s=600.0)


@click.command()
@click.argument("what", type=click.Choice(["warm", "listen"]))
@click.argument("url")
@click.argument("num_blocks", type=int, default=0)
def main(what: str, url: str, num_blocks: int) -> None:
    """Be one of the routers, and print its figures as JSON."""
    if what == "warm":
        click.echo(msgspec.json.encode(uvloop.run(_warm_up(url, num_blocks))))
    else:
        click.echo(msgspec.json.encode(uvloop.run(_listen(url))))


if __name__ == "__main__":
    main()
