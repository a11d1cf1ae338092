"""A whole router on free ports, in front of engines, and what must be left when it has run.

Everything that is sent carries `SECRET`: in prompts, keys and session ids. When a stage ends, two
things are asserted for every test on it: nothing is left of any request (no lease, no claim on
blocks, no open answer, gauges at zero), and the secret is in no log line, metric or record.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import aiohttp
import msgspec
import orjson
import pytest
from jinja2 import Environment
from multidict import CIMultiDictProxy

from loadtest.emulator import replica as replica_module
from loadtest.emulator.emulator import Emulator
from loadtest.emulator.faults import Fault
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS, TimeModel
from router import config
from router.assembly import Router
from router.base.contracts import BlockKey, block_key
from router.base.logs import JsonFormatter, TextFormatter
from router.cluster import following as snapshot_loader
from router.observers.live.recent import Feed
from router.observers.sessions.bookkeeper import Bookkeeper
from router.observers.sessions.session_ledger import SessionLedger
from router.pool.catalog import PoolCatalog
from router.records.record import DecisionRecord
from router.replicas.replica import candidates_of
from router.run import run
from router.scheduling.waiting import DEFAULT_RULES, QueueRules
from router.tokens import loading, model_files
from tests.redis_servers import RedisServer
from tests.waiting import PATIENCE_S, until

SECRET = "wr-s3cret"
KEY = f"Bearer sk-{SECRET}"
SESSION = f"session-{SECRET}"
LEASE_S = 2.0  # of routers that share a Redis
ONE_AT_A_TIME = QueueRules(window=0, ready_ms=0.0)  # a replica gets a prompt when it has none

INSTANT = PRESETS["instant"]
SLOW = TimeModel(base_ms=20.0)  # 20 ms a token: there is time to interfere
STUCK = TimeModel(base_ms=600_000.0)  # never a token

Json = dict[str, Any]


def records_in(file: Path) -> list[DecisionRecord]:
    """Read a file of decision records that is not written any more."""
    decode = msgspec.json.Decoder(DecisionRecord).decode
    return [decode(line) for line in file.read_bytes().splitlines()]


def words(number: int, num_words: int = 60) -> str:
    """Write a text that shares no block with another number's."""
    return f"{SECRET} {number} " + " ".join(f"n{number}w{i}" for i in range(num_words))


def chat(*texts: str, **fields: Any) -> Json:
    """Write a chat body: user and assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "tiny", "messages": messages, "max_tokens": 4} | fields


def streamed(body: Json) -> Json:
    """Ask for a stream that ends with its usage."""
    return body | {"stream": True, "stream_options": {"include_usage": True}}


class Reply:
    """A whole answer, and what the router said about it."""

    def __init__(self, status: int, headers: CIMultiDictProxy[str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def replica(self) -> str:
        return self.headers["x-warmroute-replica"]

    @property
    def predicted(self) -> int:
        """Read the predicted cached tokens of all tiers."""
        parts = self.headers["x-warmroute-cached"].split(";")
        return sum(int(part.partition("=")[2]) for part in parts)

    @property
    def events(self) -> list[Any]:
        """Read the events of a stream; `[DONE]` stays text."""
        lines = [line[5:].strip() for line in self.body.splitlines() if line.startswith(b"data:")]
        return ["[DONE]" if line == b"[DONE]" else orjson.loads(line) for line in lines]

    @property
    def usage(self) -> Json:
        if self.headers["Content-Type"].startswith("text/event-stream"):
            usage: Json = next(e["usage"] for e in reversed(self.events) if e != "[DONE]")
            return usage
        found: Json = self.json()["usage"]
        return found

    @property
    def reported(self) -> int:
        """Read what the engine says it took from its cache."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def text(self) -> str:
        return str(self.json()["choices"][0]["message"]["content"])

    @property
    def error(self) -> Json:
        found: Json = self.json()["error"]
        return found


class Stage:
    """A running router with its engines; see `on_stage`."""

    def __init__(self, router: Router, log: io.StringIO) -> None:
        self.router = router
        self.url = self.admin_url = ""
        self.stop = asyncio.Event()
        self.records: Path | None = None
        self.has_failing_observers = False  # a test's own, which raise
        self._log = log
        self._client: aiohttp.ClientSession

    @property
    def log(self) -> str:
        return self._log.getvalue()

    @property
    def pool(self) -> PoolCatalog:
        """What is known of the only pool."""
        (pool,) = self.router.pools.values()
        return pool.catalog

    # -- asking ------------------------------------------------------------------------------

    async def ask(
        self,
        body: Json | bytes | io.BytesIO | None = None,
        path: str = "/v1/chat/completions",
        *,
        method: str = "POST",
        headers: Json | None = None,
    ) -> Reply:
        """Send one request and read its whole answer."""
        async with self.asking(body, path, method=method, headers=headers) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    @asynccontextmanager
    async def asking(
        self,
        body: Json | bytes | io.BytesIO | None = None,
        path: str = "/v1/chat/completions",
        *,
        method: str = "POST",
        headers: Json | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and look at its answer while it arrives; leaving early hangs up."""
        data = orjson.dumps(body) if isinstance(body, dict) else body
        sent = {"Authorization": KEY, "X-Session-ID": SESSION} | (headers or {})
        if isinstance(body, dict):
            sent.setdefault("Content-Type", "application/json")
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as client:
            async with client.request(method, self.url + path, data=data, headers=sent) as answer:
                yield answer
                if not answer.content.at_eof():
                    answer.close()

    @asynccontextmanager
    async def hanging_up(self, body: Json) -> AsyncIterator[None]:
        """Have a request under way; at the end of the block its client is gone."""
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(self.ask(body))
            yield
            task.cancel()

    async def admin(
        self,
        path: str,
        body: Json | bytes | None = None,
        headers: Json | None = None,
        *,
        method: str | None = None,
    ) -> Reply:
        """Ask the admin port; with a body it is a POST."""
        data = orjson.dumps(body) if isinstance(body, dict) else body
        method = method or ("GET" if body is None else "POST")
        sent = {"Content-Type": "application/json"} | (headers or {})
        async with aiohttp.ClientSession() as client:
            async with client.request(
                method, self.admin_url + path, data=data, headers=sent
            ) as answer:
                return Reply(answer.status, answer.headers, await answer.read())

    # -- looking -----------------------------------------------------------------------------

    def metric(self, name: str, **labels: str) -> float:
        """Read one sample, 0.0 where there is none (yet); sums over labels not named."""
        registry = self.router.metrics.registry
        one = registry._names_to_collectors.get(name)
        unnamed = [by for by, names in registry._collector_to_names.items() if not names]
        return sum(
            sample.value
            for collector in (unnamed if one is None else [one])  # unnamed: read at scrape time
            for family in collector.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def num_following(self) -> int:
        """Count the listeners of the live feed."""
        feed = self.router.observer(Feed)
        return len(feed) if feed is not None else 0

    @property
    def ledger(self) -> SessionLedger:
        """Return the router's ledger of sessions."""
        bookkeeper = self.router.observer(Bookkeeper)
        assert bookkeeper is not None
        return bookkeeper.ledger

    def state(self, candidate: str) -> str:
        return self.router.caches.state(candidate)  # type: ignore[arg-type]

    def leftovers(self) -> list[str]:
        """Say what is left of requests: nothing, unless one is running."""
        router = self.router
        left = [
            f"{status.id}: {status.num_requests} leases"
            for status in router.fleet.load.status(asyncio.get_running_loop().time())
            if status.num_requests or status.num_queued_tokens
        ]
        for candidate, num_blocks in router.caches.index.claimed().items():
            left.append(f"{candidate}: claims on {num_blocks} blocks")
        if router.cluster.outbox is not None and router.cluster.outbox.num_open:
            left.append(f"published as open: {router.cluster.outbox.num_open} leases")
        left += ["an open answer"] * router.upstream.num_in_use
        zeros = ["warmroute_inflight_requests", "warmroute_inflight_uncached_tokens"]
        if not self.has_failing_observers:
            zeros.append("warmroute_observer_failures_total")
        left += [f"{name} is not zero" for name in zeros if self.metric(name) != 0.0]
        return left

    def held(self, engine: Emulator) -> list[set[BlockKey]]:
        """Read the blocks that each rank of an engine has, as this router knows it."""
        index = self.router.caches.index
        for replica in self.router.fleet.members.replicas:
            if replica.url == engine.url:
                return [set(index.held(c.id)["gpu"]) for c in candidates_of(replica)]
        return []

    async def sharing(self) -> Json:
        """Read what the admin port says of Redis and other routers."""
        found: Json = (await self.admin("/admin/replicas")).json()["sharing"]
        return found

    def roles(self) -> dict[str, str]:
        """Return how this router follows each candidate."""
        assert self.router.cluster.sharing is not None
        return self.router.cluster.sharing.state()["roles"]

    # -- waiting -----------------------------------------------------------------------------

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait for a condition that the router will bring about."""
        await until(is_so)

    async def ready(self) -> None:
        await self.until(lambda: self.router.readiness.not_ready() is None)

    async def knows(self, *engines: Emulator) -> None:
        """Wait until the router knows just those blocks that the engines have."""
        try:
            await self.until(lambda: all(self.held(engine) == truth(engine) for engine in engines))
        except TimeoutError:
            states = [
                f"{len(known - true)} too many, {len(true - known)} too few"
                for engine in engines
                for known, true in zip(self.held(engine), truth(engine), strict=True)
            ]
            raise AssertionError(f"not in step: {states}, {self.roles()}\n{self.log}") from None

    async def saved(self, *engines: Emulator) -> None:
        """Wait until the engines have written to the pool what they computed, and published it.

        They do it after the answer; what is evicted for it may be the next request's.
        """
        ranks = [rank for engine in engines for rank in engine.replica.ranks]
        await self.until(lambda: all(rank.engine.is_idle for rank in ranks))
        await self.settled(*engines)

    async def settled(self, *engines: Emulator) -> None:
        """Wait until the router has applied every event the engines have published."""
        await self.until(lambda: all(self._follows(engine) for engine in engines))

    def _follows(self, engine: Emulator) -> bool:
        for replica in self.router.fleet.members.replicas:
            if replica.url != engine.url:
                continue
            for number, rank in enumerate(engine.replica.ranks):
                name = replica.name if replica.num_ranks == 1 else f"{replica.name}#{number}"
                stream = self.router.caches.stream(name)  # type: ignore[arg-type]
                assert rank.publisher is not None
                if stream is None or stream.wanted_replay is not None:
                    return False
                if stream.next_sequence != rank.publisher.next_sequence:
                    return False
            return True
        return False


@asynccontextmanager
async def on_stage(
    *engines: Emulator | Any,
    ready: bool = True,
    is_idle: bool = True,
    peer_name: str | None = None,
    redis: RedisServer | None = None,
    redis_password: str | None = None,
    queue_rules: QueueRules = DEFAULT_RULES,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """Run a router in front of engines (anything with a `url`).

    `settings` are configuration keys, dots as double underscores: `health__interval_s=0.05`.

    ready: Wait until every engine is found, and the router is ready. Replicas given as a URL may
        be missing.
    """
    num_wanted = sum(not isinstance(engine, str) for engine in engines)
    if redis is not None:
        settings = {"redis__url": redis.url, "redis__lease_s": LEASE_S} | settings
    flags: dict[tuple[str, ...], Any] = {
        ("replicas",): [engine if isinstance(engine, str) else engine.url for engine in engines],
        ("listen", "host"): "127.0.0.1",
        ("listen", "port"): 0,
        ("listen", "drain_grace_s"): 0.0,
        ("forward", "connect_timeout_s"): PATIENCE_S,  # a busy machine's loop may stand for 2 s
        ("admin", "port"): 0,
        ("tokens", "prove_ratio"): 0.0,
        ("tokens", "encoder"): "tokenizers",  # to load and prove another takes 0.3 s of CPU
    }
    flags |= {tuple(key.split("__")): value for key, value in settings.items()}
    with listening() as log, prepared():
        made = config.load(flags=flags)
        router = Router(
            made, peer_name=peer_name, redis_password=redis_password, queue_rules=queue_rules
        )
        stage = Stage(router, log)
        stage.records = flags.get(("log", "decisions"))
        loop = asyncio.get_running_loop()
        listens: asyncio.Future[tuple[str, str]] = loop.create_future()
        failed: BaseException | None = None  # raised outside of the group, which would wrap it
        async with asyncio.TaskGroup() as tg:
            tg.create_task(run(stage.router, stage.stop, lambda *urls: listens.set_result(urls)))
            try:
                stage.url, stage.admin_url = await listens
                if ready:
                    await stage.until(
                        lambda: len(stage.router.fleet.members.replicas) >= num_wanted
                    )
                    await stage.ready()
                yield stage
                if is_idle:
                    await _nothing_left(stage)
            except (Exception, pytest.fail.Exception) as exc:
                failed = exc
            finally:
                stage.stop.set()
        if failed is not None:
            raise failed
        _nothing_leaked(stage)
        if redis is not None and redis.is_running:
            assert SECRET.encode() not in everything(redis)


@asynccontextmanager
async def on_stages(
    *engines: Emulator, redis: RedisServer, number: int = 2, **settings: Any
) -> AsyncIterator[list[Stage]]:
    """Run several routers with one Redis in front of the same engines, up and in step."""
    async with AsyncExitStack() as stack:
        stages = [
            await stack.enter_async_context(on_stage(*engines, redis=redis, **settings))
            for _ in range(number)
        ]
        await together(stages, *engines)
        yield stages


async def together(stages: Sequence[Stage], *engines: Emulator) -> None:
    """Wait until state is shared, one router writes each engine's blocks, and all know the same."""
    for stage in stages:
        num_streams = sum(len(engine.replica.ranks) for engine in engines)

        def is_shared(stage: Stage = stage, num_streams: int = num_streams) -> bool:
            return len(stage.roles()) == num_streams

        await stage.until(lambda stage=stage: stage.metric("warmroute_redis_up") == 1)  # type: ignore[misc]
        await stage.until(is_shared)
        await stage.until(
            lambda stage=stage: stage.metric("warmroute_routers") == len(stages)  # type: ignore[misc]
        )
    await stages[0].until(
        lambda: (
            sum(stage.metric("warmroute_feeds", role="leading") for stage in stages) == num_streams
        )
    )
    for stage in stages:
        await stage.knows(*engines)


def truth(engine: Emulator) -> list[set[BlockKey]]:
    """Read the blocks that each rank of an engine really has."""
    ranks = engine.replica.ranks
    return [{block_key(d) for d in rank.engine.blocks.cached_keys()} for rank in ranks]


def everything(redis: RedisServer) -> bytes:
    """Read all keys of a Redis and all that is in them."""
    keys = redis.client.keys()
    kinds = redis.client.pipeline(transaction=False)
    for key in keys:
        kinds.type(key)
    values = redis.client.pipeline(transaction=False)
    for key, kind in zip(keys, kinds.execute(), strict=True):
        match kind:
            case b"hash":
                values.hgetall(key)
            case b"stream":
                values.xrange(key)
            case b"zset":
                values.zrange(key, 0, -1)
            case b"string":
                values.get(key)
    return repr((keys, values.execute())).encode()


async def _nothing_left(stage: Stage) -> None:
    try:
        await stage.until(lambda: not stage.leftovers())
    except TimeoutError:
        raise AssertionError(f"left over: {stage.leftovers()}") from None


def _nothing_leaked(stage: Stage) -> None:
    assert SECRET not in stage.log
    assert SECRET not in stage.router.metrics.render().decode()
    if stage.records is not None and stage.records.is_file():
        assert SECRET not in stage.records.read_text()


@contextmanager
def listening() -> Iterator[io.StringIO]:
    """Collect what `warmroute serve` would log, in both its forms."""
    log = io.StringIO()
    handlers: list[logging.Handler] = []
    for formatter in (TextFormatter(), JsonFormatter()):
        handler = logging.StreamHandler(log)
        handler.setFormatter(formatter)
        handlers.append(handler)
    root, ours = logging.getLogger(), logging.getLogger("router")
    levels = root.level, ours.level
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield log
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        root.setLevel(levels[0])
        ours.setLevel(levels[1])


_tokenizer = functools.cache(replica_module.ChatTokenizer)
_load = functools.cache(model_files.load_tokenizer)
_encoder = functools.cache(loading.TextEncoder)


def _copy_encoder(tokenizer: Any, hints: str) -> loading.TextEncoder:
    """Return an encoder of a router's own, of a tokenizer that is read once: 15 ms each time."""
    return copy.copy(_encoder(tokenizer, hints))


_compile = Environment.compile
_compiled: dict[tuple[object, ...], Any] = {}


def _compile_once(environment: Environment, source: Any, *args: Any, **named: Any) -> Any:
    """Compile a template where none of this text was, in an environment of this kind."""
    options = (environment.trim_blocks, environment.lstrip_blocks, *environment.extensions)
    key = (type(environment), options, source, args, tuple(named.items()))
    if key not in _compiled:
        _compiled[key] = _compile(environment, source, *args, **named)
    return _compiled[key]


@contextmanager
def prepared() -> Iterator[None]:
    """Give routers the tokenizers and templates that each would load for itself.

    A second router waits for blocks that the first one is about to write: where engines have none
    yet, that is for nothing.
    """
    with (
        mock.patch.object(snapshot_loader, "WAIT_S", 0.4),
        mock.patch.object(model_files, "load_tokenizer", _load),
        mock.patch.object(loading, "TextEncoder", _copy_encoder),
        mock.patch.object(Environment, "compile", _compile_once),
    ):
        yield


_writer = functools.cache(replica_module.ReplyWriter)


class Engines:
    """Several emulated engines, alike but for what is said: `async with Engines(2) as (a, b)`."""

    def __init__(self, number: int = 2, **options: Any) -> None:
        base = {
            "time_model": INSTANT,
            "tick_ms": 0.1,
            "reply_tokens": 4,
            "num_gpu_blocks": 2048,
        }
        self._emulators = [Emulator(EmulatorOptions(**(base | options))) for _ in range(number)]
        self._entered: list[Emulator] = []

    async def __aenter__(self) -> Sequence[Emulator]:
        # One tokenizer for all engines of this process: a tenth of a second of each test.
        with mock.patch.multiple(replica_module, ChatTokenizer=_tokenizer, ReplyWriter=_writer):
            for emulator in self._emulators:
                await emulator.__aenter__()
                self._entered.append(emulator)
        return self._entered

    async def __aexit__(self, *exc: Any) -> None:
        for emulator in reversed(self._entered):
            await emulator.__aexit__(*exc)


def holder(stage: Stage, reply: Reply, engines: Sequence[Emulator]) -> Emulator:
    """Find the engine that gave an answer."""
    url = stage.router.fleet.members.replica(reply.replica.partition("#")[0]).url
    return next(engine for engine in engines if engine.url == url)


def arm(engine: Emulator, kind: str, **fields: Any) -> None:
    """Arm a fault."""
    engine.app.arm(Fault(kind=kind, **fields))  # type: ignore[arg-type]


def num_running(engine: Emulator) -> int:
    """Count the requests inside an engine."""
    return sum(rank.engine.num_requests for rank in engine.replica.ranks)


class RawClient:
    """A client that writes bytes, whatever they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str) -> AsyncIterator[Self]:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def status(self) -> int:
        """Read one whole answer with a declared length (or none); return its status."""
        head = await self.head()
        lines = head.lower().split(b"\r\n")
        length = [int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length:")]
        await self._reader.readexactly(length[0] if length else 0)
        return int(head.split(b" ", 2)[1])

    async def head(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def read(self, num_bytes: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readexactly(num_bytes)

    async def rest(self) -> bytes:
        """Read until the router closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read()


async def converse(stage: Stage, engines: Sequence[Emulator], num_prompts: int = 4) -> list[Reply]:
    """Ask each of some prompts once, in turn."""
    replies = []
    for number in range(num_prompts):
        replies.append(await stage.ask(chat(words(number))))
        await stage.settled(*engines)
    return replies
