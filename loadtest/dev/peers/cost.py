"""What a router costs: added time, CPU a request, requests a second.

Four fake replicas answer at once. One of them publishes the blocks of the conversations. First the
same request is repeated, direct and through the router, in alternating pairs on warm connections.
Then come an agent's turns, each with 2,000 new tokens behind 80,000. Last, sixteen connections send
as fast as they are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import orjson
from msgspec import Struct

from loadtest.dev.bench.client import Answer, Connection, hammer, pair, request_bytes
from loadtest.dev.bench.conversations import TARGET, Prepared, growing, of_size, prepare
from loadtest.dev.bench.rig import fake_replicas
from loadtest.dev.bench.setting import TINY_MODEL
from loadtest.dev.peers.contestants import Contestant
from loadtest.dev.peers.front import Front, in_front
from loadtest.results import percentile
from router.tokens import load_prompter

NUM_REPLICAS: Final = 4
SIZES: Final = (2_000, 20_000, 200_000, 400_000)  # bytes of a body
IN_FLIGHT: Final = 16
LOADED_BYTES: Final = 20_000
CONTEXT_TOKENS: Final = 80_000
_NUM_PAIRS: Final = 300
_NUM_TURNS: Final = 40
_NUM_WARM_UP: Final = 20
_SETTLE_S: Final = 1.0  # for events to arrive
_LOADED_S: Final = 5.0


class Added(Struct, frozen=True, kw_only=True):
    """Over direct: milliseconds of a request, and the router's CPU for it."""

    num_bytes: int
    direct_p50_ms: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


class Cost(Struct, frozen=True, kw_only=True):
    """All of one contestant's figures; `turn` is an agent's turn with new text."""

    name: str
    added: tuple[Added, ...]
    turn: Added
    requests_per_s: float
    direct_per_s: float
    loaded_cpu_ms: float
    rss_mib: float


class Material(Struct, frozen=True, kw_only=True):
    """The requests, made once for all contestants."""

    sized: tuple[Prepared, ...]
    turns: tuple[Prepared, ...]  # the first one is known to the replica
    loaded: tuple[Prepared, ...]


def material(*, is_quick: bool = False) -> Material:
    """Make the requests; some seconds."""
    prompter = load_prompter(str(TINY_MODEL), local_files_only=True)
    num_turns, context = (3, 6_000) if is_quick else (_NUM_TURNS, CONTEXT_TOKENS)
    turns = [
        prepare(prompter, {**orjson.loads(turn.body), "stream": False})
        for turn in growing(prompter, "peers", context, num_turns)
    ]
    return Material(
        sized=tuple(of_size(prompter, f"peers-{size}", size) for size in SIZES),
        turns=tuple(turns),
        loaded=tuple(of_size(prompter, f"load-{n}", LOADED_BYTES) for n in range(IN_FLIGHT)),
    )


async def measure(
    contestant: Contestant,
    made: Material,
    folder: Path,
    log_dir: Path,
    step: Callable[[str], None],
    *,
    is_quick: bool = False,
) -> Cost:
    """Measure one contestant; about a minute.

    Raises:
        ChildDied, RigError: it did not start, or a process of ours did not.
        ConnectionError, RuntimeError: it did not answer as it should.
    """
    async with fake_replicas(NUM_REPLICAS, TINY_MODEL, log_dir) as ports:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        async with in_front(contestant, urls, folder, log_dir) as front:
            bench = _Bench(front, ports, 5 if is_quick else _NUM_PAIRS)
            added = []
            for prepared in made.sized:
                step(f"{contestant.name}: {len(prepared.body) / 1000:,.0f} KB")
                added.append(await bench.added(prepared, f"size {len(prepared.body)}"))
            step(f"{contestant.name}: an agent's turns")
            turn = await bench.turns(made.turns)
            step(f"{contestant.name}: {IN_FLIGHT} in flight")
            for prepared in made.loaded:
                await bench.hold(prepared)
            seconds = 0.5 if is_quick else _LOADED_S
            requests = [_request(one, f"load {number}") for number, one in enumerate(made.loaded)]
            direct = await hammer(ports[0], requests, seconds / 2)
            before_s = front.cpu_s()
            through = await hammer(front.port, requests, seconds)
            return Cost(
                name=contestant.name,
                added=tuple(added),
                turn=turn,
                requests_per_s=through / seconds,
                direct_per_s=direct / (seconds / 2),
                loaded_cpu_ms=(front.cpu_s() - before_s) / through * 1000,
                rss_mib=front.rss_bytes() / 2**20,
            )


class _Bench:
    """Sends pairs; replica 0 is the direct one and publishes the blocks."""

    def __init__(self, front: Front, ports: Sequence[int], num_pairs: int) -> None:
        self._front = front
        self._ports = ports
        self._num_pairs = num_pairs

    async def hold(self, prepared: Prepared) -> None:
        """Publish the prompt's blocks at the first replica, and render it at all of them."""
        rendered = orjson.dumps({"token_ids": list(prepared.token_ids)})
        for number, port in enumerate(self._ports):
            async with Connection(port) as connection:
                if not number:
                    await connection.send(request_bytes("/bench/publish", prepared.stored(0)))
                await connection.send(request_bytes("/bench/render", rendered))

    async def added(self, prepared: Prepared, session: str) -> Added:
        """Send one request again and again."""
        await self.hold(prepared)
        await asyncio.sleep(_SETTLE_S)
        request = _request(prepared, session)
        async with Connection(self._front.port) as routed, Connection(self._ports[0]) as direct:
            for _ in range(_NUM_WARM_UP):
                _ok(await routed.send(request))
                await direct.send(request)
        return await self._pairs([request] * self._num_pairs)

    async def turns(self, turns: Sequence[Prepared]) -> Added:
        """Send an agent's turns, each once; the replica has the first."""
        await self.hold(turns[0])
        await asyncio.sleep(_SETTLE_S)
        requests = [_request(turn, "agent") for turn in turns]
        async with Connection(self._front.port) as routed:
            _ok(await routed.send(requests[0]))
        return await self._pairs(requests[1:])

    async def _pairs(self, requests: Sequence[bytes]) -> Added:
        added_ms, direct_ms = [], []
        async with Connection(self._ports[0]) as direct, Connection(self._front.port) as routed:
            before_s = self._front.cpu_s()
            for number, request in enumerate(requests):
                plain, answer = await pair(number, direct, routed, request)
                _ok(answer)
                added_ms.append(answer.total_ms - plain.total_ms)
                direct_ms.append(plain.total_ms)
            cpu_s = self._front.cpu_s() - before_s
        ordered = sorted(added_ms)
        return Added(
            num_bytes=len(requests[-1]),
            direct_p50_ms=percentile(sorted(direct_ms), 0.5),
            p50_ms=percentile(ordered, 0.5),
            p99_ms=percentile(ordered, 0.99),
            cpu_ms=cpu_s / len(requests) * 1000,
        )


def _request(prepared: Prepared, session: str) -> bytes:
    usage = f"{prepared.num_tokens}"
    return request_bytes(TARGET, prepared.body, {"X-Session-ID": session, "X-Bench-Usage": usage})


def _ok(answer: Answer) -> None:
    if answer.status != 200:
        raise RuntimeError(f"the router answered {answer.status}: {answer.body[:300]!r}")
