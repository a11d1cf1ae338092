"""The index of routers that share it in a real Redis, taken one step at a time.

Real are Redis, the store, the memberships, the loops' bodies and what follows a candidate
(`router.cluster`, `router.kv_events.follower`); played are the engines and the order in which
things happen: each step of a loop is a step of the suite, and whatever waits for an engine's or a
snapshot's next piece waits until the suite lets it go on. Pieces are made small, so that few blocks
are many.

Two routers, A and B. Either may die, lose its lease or Redis, or be asked for a match.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from policies.view import CandidateId
from router.cluster import (
    OrderShare,
    RecordShare,
    Role,
    Sharing,
    loader,
    publication,
    redis_log,
    redis_snapshot,
    redis_store,
)
from router.cluster.candidate_names import CandidateNames
from router.cluster.candidate_source import CandidateSource
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_log import Cursor, NewEntries
from router.cluster.redis_store import RedisStore, Written
from router.cluster.shared_stream import SharedStream
from router.config import RedisConfig, ReplicaConfig
from router.contracts import BlockKey
from router.errors import EMPTIED, StoreError, StoreUnavailable
from router.experiments.runner import ExperimentRunner
from router.index.block_index import BlockIndex, BlockMatch
from router.index.cache_view import CacheView
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import Message, Received
from router.messages import Delta, StreamId, pack_keys
from router.metrics import Metrics
from router.replicas import Fleet, Replica, ServedModel
from router.replicas.registry import Registry
from router.replicas.response_owners import ResponseOwners
from tests.engine import BLOCK_SIZE
from tests.index.contract.engine import PlayedEngine
from tests.redis_servers import RedisServer

CAPACITY: Final = 1000
_TURNS: Final = 24  # of the event loop: enough for what needs no answer from outside
_DEADLINE_S: Final = 30.0


class Gate:
    """Lets those who wait for the next piece of something go on, one piece at a time, or freely."""

    def __init__(self) -> None:
        self._is_open = False
        self._waiting: list[asyncio.Event] = []
        self._reached: list[asyncio.Future[None]] = []

    def someone_waits(self) -> asyncio.Future[None]:
        """Be done as soon as a task waits here."""
        future = asyncio.get_running_loop().create_future()
        if self._waiting:
            future.set_result(None)
        else:
            self._reached.append(future)
        return future

    async def passes(self) -> None:
        if not self._is_open:
            turn = asyncio.Event()
            self._waiting.append(turn)
            while self._reached:
                self._reached.pop().set_result(None)
            try:
                await turn.wait()
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)

    def let_one(self) -> None:
        if self._waiting:
            self._waiting.pop(0).set()

    def open(self, is_open: bool) -> None:
        self._is_open = is_open
        while is_open and self._waiting:
            self.let_one()


class PlayedEvents:
    """What `EngineEvents` is to a follower: a played engine's stream, and its replay in pieces."""

    has_replay = True

    def __init__(self, engine: PlayedEngine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._messages: list[Message] = []
        self._is_up: bool | None = True
        self._something = asyncio.Event()
        self._something.set()
        self.is_closed = False

    def deliver(self, sequence: int, payload: bytes) -> None:
        self._messages.append((sequence, payload))
        self._something.set()

    def reconnect(self) -> None:
        self._is_up = True
        self._something.set()

    def tick(self) -> None:
        """Let the follower look what it wants, as it does every half second."""
        self._something.set()

    def close(self) -> None:
        self.is_closed = True

    async def receive(self, timeout_s: float) -> Received:
        await self._something.wait()
        self._something.clear()
        messages, self._messages = self._messages, []
        is_up, self._is_up = self._is_up, None
        return Received(messages, is_up)

    @asynccontextmanager
    async def replay(self, start: int) -> AsyncIterator[PlayedReplies]:
        await self._gate.passes()
        yield PlayedReplies(list(self._engine.replay(start)), self._gate)


class PlayedReplies:
    """The answer to one replay request."""

    def __init__(self, messages: list[Message], gate: Gate) -> None:
        self._messages = messages
        self._gate = gate
        self.is_complete = False

    async def receive(self) -> list[Message]:
        await self._gate.passes()
        some, self._messages = self._messages[:2], self._messages[2:]
        self.is_complete = not some
        return some


class PlayedSource(CandidateSource):
    """One candidate's streams, and events of its played engine."""

    def __init__(self, engine: PlayedEngine, index: BlockIndex, gate: Gate) -> None:
        super().__init__(
            engine.candidate,
            index,
            url="http://played",
            endpoint=None,
            replay_timeout_s=1.0,
            block_size=BLOCK_SIZE,
            capacity_blocks=CAPACITY,
        )
        self._engine = engine
        self._gate = gate
        self.opened: PlayedEvents | None = None

    def events(self) -> Any:
        self.opened = PlayedEvents(self._engine, self._gate)
        return self.opened


class SteppedStore(RedisStore):
    """The store, which loses an answer on demand, and gives snapshots in pieces."""

    loses_answer = False

    def __init__(self, config: RedisConfig, *, router: str, gate: Gate) -> None:
        super().__init__(config, router=router, password=None)
        self._gate = gate

    async def write(self, deltas: Sequence[Delta]) -> list[Written]:
        written = await super().write(deltas)
        if self.loses_answer:
            self.loses_answer = False
            raise StoreUnavailable("the answer was lost")
        return written

    async def snapshot(self, stream_ids: Any = None) -> Any:
        snapshot = await super().snapshot(stream_ids)
        return SteppedSnapshot(snapshot, self._gate) if stream_ids else snapshot


class SteppedSnapshot:
    """A snapshot in pieces."""

    def __init__(self, snapshot: redis_snapshot.IndexSnapshot, gate: Gate) -> None:
        self._snapshot = snapshot
        self._gate = gate
        self.heads = snapshot.heads

    async def slices(self) -> AsyncIterator[Any]:
        async for part in self._snapshot.slices():
            await self._gate.passes()
            yield part

    async def copies(self) -> Any:
        copies = await self._snapshot.copies()
        await self._gate.passes()
        return copies


class OneReading:
    """A store for a reader that is to read once: its second question ends it."""

    class Enough(Exception):
        pass

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.cursor: Cursor | None = None
        self.reading: NewEntries | None = None

    async def read(self, after: Cursor, *, block_s: float) -> NewEntries:
        if self.reading is not None:
            self.cursor = after
            raise OneReading.Enough
        self.reading = await self._store.read(after, block_s=0.0)
        return self.reading

    async def snapshot(self, stream_ids: Any) -> Any:
        return await self._store.snapshot(stream_ids)


class Node:
    """One router: what `router.assembly` puts together for it, as far as blocks go."""

    def __init__(
        self,
        name: str,
        config: RedisConfig,
        engines: Mapping[CandidateId, PlayedEngine],
        *,
        keeps_blocks: bool,
    ) -> None:
        self.snapshots, self.replays = Gate(), Gate()
        self.index = BlockIndex(max_pending=24)
        self.caches = CacheView(self.index)
        registry = Registry([ReplicaConfig(url=f"http://{c}", name=c) for c in engines])
        fleet = Fleet()
        for candidate in engines:
            fleet.add(
                Replica(
                    name=candidate,
                    url=f"http://{candidate}",
                    models=(ServedModel(id="m"),),
                    num_ranks=1,
                    block_size=BLOCK_SIZE,
                    num_blocks=CAPACITY,
                )
            )
        self.names = CandidateNames(registry, fleet)
        sessions, metrics = fleet.conversations, Metrics()
        self.peers = Peers(
            name,
            fleet=fleet,
            caches=self.caches,
            sessions=sessions,
            names=self.names,
            metrics=metrics,
        )
        self.outbox = Outbox(
            caches=self.caches,
            sessions=sessions,
            names=self.names,
            metrics=metrics,
        )
        self.store = SteppedStore(config, router=name, gate=self.snapshots)
        self.sharing = Sharing(
            self.store,
            caches=self.caches,
            names=self.names,
            peers=self.peers,
            outbox=self.outbox,
            orders=OrderShare(
                self.store,
                registry=registry,
                experiments=ExperimentRunner(Metrics()),
                apply_records=lambda _: None,
            ),
            records=RecordShare(
                self.store,
                peers=self.peers,
                outbox=self.outbox,
                responses=ResponseOwners(),
                ttl_s=60.0,
            ),
            pools=(),
            lease_s=60.0,
            keeps_blocks=keeps_blocks,
        )
        self.sources = {
            c: PlayedSource(engine, self.index, self.replays) for c, engine in engines.items()
        }
        self._cursor: Cursor | None = None
        self._incarnation = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._loading: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.connect()
        self._tasks = [
            spawn(self.sharing.following.follow(source)) for source in self.sources.values()
        ]
        await turns()

    async def connect(self) -> None:
        """Do as `Sharing` does when Redis is there (again)."""
        if not self.sharing.link.is_up:
            facts = await self.store.open()
            self._incarnation = facts.incarnation
            self._cursor = (await self.store.snapshot(())).cursor
            self.sharing.link.came_up()

    async def disconnect(self) -> None:
        """Do as `Sharing` does when Redis is gone."""
        await cancel(self._loading)
        self._loading = None
        self.sharing.link.went_down("gone")
        self.sharing._go_on_without()
        await self.store.close()
        await turns()

    async def kill(self) -> None:
        """Be no more; its leases expire when they do."""
        for task in (self._loading, *self._tasks):
            await cancel(task)
        await self.store.close()

    # -- one turn of a loop each ---------------------------------------------------------------

    async def attempt(self, step: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Take a step; a failure of Redis is what it is to `Sharing`. While it is gone: none."""
        if self.sharing.link.is_up:
            try:
                await step()
            except StoreError:
                await self.disconnect()
        await turns()

    async def write(self) -> None:
        await self.sharing.writer.flush()

    async def read(self) -> None:
        assert self._cursor is not None
        once = OneReading(self.store)
        self.sharing.reader._store = once  # type: ignore[assignment]
        try:
            await self.sharing.reader.run(self._cursor)
        except OneReading.Enough:
            self._cursor = once.cursor

    async def hold(self) -> None:
        beat = await self.store.beat(self.outbox.load(time.monotonic()))
        if beat.incarnation != self._incarnation:
            raise StoreUnavailable(EMPTIED)
        await self.sharing.keeper._hold()

    async def suspect(self) -> None:
        for each in self.sharing.memberships:
            stream = self.caches.stream(each.candidate)
            if isinstance(stream, SharedStream) and stream.suspicion is not None:
                self.outbox.suspected(each.candidate, stream.suspicion)
        notes = self.outbox.take()
        if notes:
            await self.store.publish(notes)

    async def load(self) -> None:
        """Go on with a snapshot by one piece, or begin one."""
        if self._loading is None:
            shared = self.sharing.memberships
            wanting = shared.wanting()
            if wanting:
                self._loading = spawn(loader._load(self.store, shared, wanting))
        else:
            self.snapshots.let_one()
        if self._loading is not None:
            await asyncio.wait(
                [self._loading, self.snapshots.someone_waits()],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._loading.done():
                done, self._loading = self._loading, None
                await done

    # -- what can be seen ----------------------------------------------------------------------

    def receive(self, candidate: CandidateId, sequence: int, payload: bytes) -> None:
        events = self.sources[candidate].opened
        if events is not None and not events.is_closed:
            events.deliver(sequence, payload)

    def reconnect(self, candidate: CandidateId) -> None:
        events = self.sources[candidate].opened
        if events is not None:
            events.reconnect()

    def tick(self) -> None:
        for source in self.sources.values():
            if source.opened is not None:
                source.opened.tick()

    def direct(self, candidate: CandidateId) -> RankStream | None:
        stream = self.caches.stream(candidate)
        return stream if isinstance(stream, RankStream) else None

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def unsettled(self, engines: Mapping[CandidateId, PlayedEngine]) -> str:
        """Say what is still to come; empty: nothing."""
        for task in self._tasks:
            assert not task.done(), task.exception()
        for each in self.sharing.memberships:
            stream = self.caches.stream(each.candidate)
            if each.role is Role.DIRECT or not self.sharing.link.is_up:
                return f"{each.stream_id} is on its own"
            published = each.publication
            if not each.catch_up.is_done or (published is not None and published.pending):
                return f"{each.stream_id} is under way"
            if isinstance(stream, SharedStream):
                if not stream.has_history or stream.suspicion is not None:
                    return f"{each.stream_id}: {stream.state_and_reason()}"
            elif isinstance(stream, RankStream):
                last = stream.position.sequence if stream.position is not None else -1
                if not stream.has_history or stream.wanted_replay is not None:
                    return f"{each.stream_id} reads history from {stream.wanted_replay}"
                if last != engines[each.candidate].last_sequence:
                    return f"{each.stream_id} has not received all"
        return ""


class SharedInRedis:
    """The index of A and B, rebuilt by each from what the other writes.

    Args:
        server: Of its own; it is emptied.
        keeps_blocks: Whether B keeps blocks that A leads; else it looks them up, and is asked.
        happenings: What `disturb` lets happen, by name; all by default.
    """

    def __init__(
        self,
        engines: Mapping[CandidateId, PlayedEngine],
        server: RedisServer,
        *,
        keeps_blocks: bool = True,
        happenings: Sequence[str] = (),
    ) -> None:
        self.begun_anew: set[CandidateId] = set()
        self._engines = engines
        self._server = server
        self._keeps_blocks = keeps_blocks
        self._seen: dict[tuple[str, CandidateId], tuple[int, int]] = {}
        self._num_nodes = 0
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(publication, "CHUNK_BLOCKS", 5)
        self._patch.setattr(redis_log, "MAX_KEYS", 3)
        self._patch.setattr(redis_store, "_READ_ENTRIES", 3)
        self._patch.setattr(redis_store, "_PIPELINE_BYTES", 64)
        self._patch.setattr(redis_snapshot, "_BLOCKS_A_CALL", 2)
        server.client.flushall()
        namespace = f"test-{uuid.uuid4().hex[:12]}"
        self._base = f"{{wr:{namespace}}}:"
        self._config = RedisConfig(
            url=server.url, namespace=namespace, timeout_s=20.0, lookup_timeout_s=20.0, lease_s=60.0
        )
        self._runner = asyncio.Runner()
        self.nodes = {"A": self._join("A"), "B": self._join("B")}
        every: dict[str, Callable[[str, CandidateId, int], Coroutine[Any, Any, None]]] = {
            "write": lambda name, _, __: self._step(name, "write"),
            "read": lambda name, _, __: self._step(name, "read"),
            "hold": lambda name, _, __: self._step(name, "hold"),
            "load": lambda name, _, __: self._step(name, "load"),
            "load on": lambda name, _, how: self._load_on(name, how),
            "publish": lambda name, _, __: self._step(name, "suspect"),
            "replay": lambda name, _, __: self._replay(name),
            "connect": lambda name, _, __: self._connect(name),
            "lose answer": lambda name, _, __: self._lose_answer(name),
            "lose lease": lambda _, candidate, __: self._lose_lease(candidate),
            "lose redis": lambda name, _, __: self.nodes[name].disconnect(),
            "suspect": self._suspect,
            "trim log": lambda _, __, how: self._trim_log(how),
            "kill": lambda name, _, how: self._kill(name, has_expired=how > 3),
            "sweep": lambda name, _, how: self._sweep(name, how),
            "flush": lambda _, __, how: self._flush(how),
        }
        self._happenings = [every[name] for name in happenings or every]
        self.settle()

    # -- the seam ----------------------------------------------------------------------------

    def receive(self, candidate: CandidateId, sequence: int, payload: bytes) -> None:
        for node in self.nodes.values():
            node.receive(candidate, sequence, payload)
        self._run(turns())

    def reconnect(self, candidate: CandidateId) -> None:
        for node in self.nodes.values():
            node.reconnect(candidate)
        self._run(turns())

    def disturb(self, what: int, how: int) -> None:
        name, candidate = "AB"[how % 2], list(self._engines)[how // 2 % len(self._engines)]
        self._run(self._happenings[what % len(self._happenings)](name, candidate, how))

    def settle(self) -> None:
        self._run(self._settle())

    def match(
        self, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> Mapping[CandidateId, BlockMatch]:
        """Ask B, and see that A says the same, but for claims: those are B's."""
        node, other = self.nodes["B"], self.nodes["A"]
        found: dict[CandidateId, BlockMatch] = {}
        if not self._keeps_blocks:
            found = self._run(self._look_up(node, chain, candidates))
        matches = node.caches.match(chain, candidates, found)
        for candidate, match in other.caches.match(chain, candidates).items():
            if self._keeps_blocks or len(chain) == 1:  # behind a hole the two may differ
                assert match.num_gpu_stored_blocks == matches[candidate].num_gpu_stored_blocks
        return matches

    def claim(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Callable[[], None]:
        return self.nodes["B"].index.speculate(candidate, keys).end

    def close(self) -> None:
        for node in self.nodes.values():
            self._run(node.kill())
        self._runner.close()
        self._patch.undo()

    # -- what happens ------------------------------------------------------------------------

    async def _step(self, name: str, step: str) -> None:
        node = self.nodes[name]
        await node.attempt(getattr(node, step))

    async def _load_on(self, name: str, how: int) -> None:
        for _ in range(3 * how):
            await self._step(name, "load")

    async def _replay(self, name: str) -> None:
        self.nodes[name].replays.let_one()
        self.nodes[name].tick()
        await turns()

    async def _connect(self, name: str) -> None:
        await self.nodes[name].connect()
        await turns()

    async def _lose_answer(self, name: str) -> None:
        node = self.nodes[name]
        node.store.loses_answer = True
        await node.attempt(node.write)
        node.store.loses_answer = False

    async def _lose_lease(self, candidate: CandidateId) -> None:
        self._server.client.delete(f"{self._base}lease:{candidate}#0")

    async def _suspect(self, name: str, candidate: CandidateId, how: int) -> None:
        stream = self.nodes[name].caches.stream(candidate)
        if stream is not None and how <= 2:  # it ends what went wrong before
            stream.mark_suspect("at random")

    async def _trim_log(self, how: int) -> None:
        """Trim the log as writing to it does: the newest entry stays."""
        self._server.client.xtrim(f"{self._base}log", maxlen=how, approximate=False)

    async def _kill(self, name: str, *, has_expired: bool) -> None:
        """Kill a router; another comes that knows nothing, before the lease expires or after."""
        await self.nodes[name].kill()
        if has_expired:
            self._expire(name)
        await self._come(name)

    def _expire(self, name: str) -> None:
        client = self._server.client
        for candidate in self._engines:
            lease = f"{self._base}lease:{candidate}#0"
            owner = client.get(lease)
            if isinstance(owner, bytes) and owner.decode() not in self._living():
                client.delete(lease)

    def _living(self) -> set[str]:
        return {n.peers.name for n in self.nodes.values() if any(not t.done() for t in n._tasks)}

    async def _sweep(self, name: str, how: int) -> None:
        """Free the bits of dead epochs, now and then: others get them."""
        if how <= 2:
            node = self.nodes[name]
            await node.attempt(lambda: node.store.sweep(pause_s=0.0))

    async def _flush(self, how: int) -> None:
        """Empty Redis, now and then."""
        if how <= 2:
            self._server.client.flushall()

    def _join(self, name: str) -> Node:
        node = self._node(name)
        self._run(node.start())
        return node

    async def _come(self, name: str) -> None:
        self.nodes[name] = node = self._node(name)
        await node.start()

    def _node(self, name: str) -> Node:
        self._num_nodes += 1
        return Node(
            f"{name}{self._num_nodes}",
            self._config,
            self._engines,
            keeps_blocks=self._keeps_blocks or name == "A",
        )

    # -- settling ----------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Let everything run until nothing is left to do."""
        end_s = time.monotonic() + _DEADLINE_S
        for node in self.nodes.values():
            node.replays.open(True)
            node.snapshots.open(True)
            for candidate in self._engines:
                node.reconnect(candidate)
        self._expire("")
        is_quiet = 0
        while is_quiet < 2:
            assert time.monotonic() < end_s, self._unsettled()
            await self._round()
            is_quiet = 0 if self._unsettled() else is_quiet + 1
        for node in self.nodes.values():
            node.replays.open(False)
            node.snapshots.open(False)

    async def _round(self) -> None:
        for name, node in self.nodes.items():
            node.tick()
            await node.connect()
            for step in ("hold", "suspect", "read", "write"):
                await self._step(name, step)
            await self._step(name, "load")
            while node.is_loading:
                await self._step(name, "load")

    def _unsettled(self) -> str:
        """Say what is still to come; empty: nothing."""
        for node in self.nodes.values():
            if found := node.unsettled(self._engines):
                return f"{node.peers.name}: {found}"
        for candidate in self._engines:
            stream_id = StreamId(f"{candidate}#0")
            numbers = set()
            for node in self.nodes.values():
                each = node.sharing.memberships.get(stream_id)
                stream = node.caches.stream(candidate)
                assert each is not None
                if isinstance(stream, SharedStream):
                    numbers.add(stream.number)
                else:
                    numbers.add(each.publication.number if each.publication is not None else None)
                if node.sharing.memberships.next_delta(each) is not None:
                    return f"{stream_id} has something to publish"
            if len(numbers) != 1:
                return f"{stream_id}: {numbers}"
        return ""

    async def _look_up(
        self, node: Node, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> dict[CandidateId, BlockMatch]:
        """Do as `stages.lookup` does."""
        stream_ids = {
            StreamId(f"{candidate}#0"): candidate
            for candidate in candidates
            if isinstance(node.caches.stream(candidate), SharedStream)
        }
        if not stream_ids:
            return {}
        found = await node.store.lookup(pack_keys(chain), tuple(stream_ids))
        return {
            candidate: BlockMatch(found[id_, "gpu"], found[id_, "gpu"], found[id_, "cpu"])
            for id_, candidate in stream_ids.items()
        }

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        result = self._runner.run(work)
        self._note_begun_anew()
        return result

    def _note_begun_anew(self) -> None:
        """See who reads history from its start: each epoch of a stream begins so."""
        for name, node in getattr(self, "nodes", {}).items():
            for candidate in self._engines:
                stream = node.direct(candidate)
                if stream is not None:
                    seen = id(stream), stream.epoch
                    if self._seen.get((name, candidate)) != seen:
                        self._seen[name, candidate] = seen
                        self.begun_anew.add(candidate)


async def turns() -> None:
    """Let every task that can go on do so."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin something that goes on between the suite's steps."""
    return asyncio.get_running_loop().create_task(work)


async def cancel(task: asyncio.Task[None] | None) -> None:
    """End a task, if it has not ended."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
