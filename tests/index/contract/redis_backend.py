"""Two routers that follow the engines, write to a real Redis, and start from what it has.

Redis, the store, the writer and the loader are real. Engines are played, and each step of a loop is
a step of the suite. Either router may die, lose its lease or Redis; B is asked for matches.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import pytest

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.errors import EMPTIED, StoreError, StoreUnavailable
from router.base.messages import Delta
from router.cluster import Link, index_writer, redis_store
from router.cluster import following as snapshot_loader
from router.cluster import redis_snapshot as redis_log
from router.cluster.candidate_source import CandidateNames
from router.cluster.following import Following, LogTails, SnapshotLoader
from router.cluster.index_writer import IndexWriter
from router.cluster.redis_store import RedisStore, Written
from router.config import RedisConfig, ReplicaConfig
from router.index.block_index import BlockMatch
from router.replicas import Fleet
from router.replicas.registry import Registry
from tests.index.contract.backend import Router, stream_id_of
from tests.index.contract.engine import PlayedEngine
from tests.redis_servers import RedisServer

_MAX_ROUNDS: Final = 50


class LossyStore(RedisStore):
    """The store, which loses an answer on demand."""

    loses_answer = False

    async def write(self, deltas: Sequence[Delta]) -> list[Written]:
        written = await super().write(deltas)
        if self.loses_answer:
            self.loses_answer = False
            raise StoreUnavailable("the answer was lost")
        return written


class Node(Router):
    """One router, as far as blocks go."""

    def __init__(
        self, name: str, config: RedisConfig, engines: Mapping[CandidateId, PlayedEngine]
    ) -> None:
        super().__init__(engines)
        self.name = name
        self.store = LossyStore(config, router=name, password=None)
        self.writer = IndexWriter(self.store, self.caches, router=name)
        self.loader = SnapshotLoader(self.store)
        self.link = Link()
        registry = Registry([ReplicaConfig(url=f"http://{c}", name=c) for c in engines])
        self._following = Following(
            caches=self.caches,
            names=CandidateNames(registry, Fleet()),
            writer=self.writer,
            loader=self.loader,
            link=self.link,
        )
        self._incarnation = ""

    async def start(self) -> None:
        """Start from what Redis has, and read what engines did since."""
        await self.connect()
        starting = []
        for candidate in self.engines:
            self.follow_engine(candidate)
            entry = self.writer.add(stream_id_of(candidate), candidate)
            starting.append(asyncio.get_running_loop().create_task(self._following.start(entry)))
        await asyncio.sleep(0)
        if self.link.is_up:
            await self.loader.load_wanted()
        await asyncio.gather(*starting)
        for stream in self.direct.values():
            stream.connected()

    async def connect(self) -> None:
        if not self.link.is_up:
            self._incarnation = (await self.store.open()).incarnation
            self.link.came_up()

    async def disconnect(self) -> None:
        self.link.went_down("gone")
        self.writer.pause()
        self.loader.cancel()
        await self.store.close()

    async def attempt(self, step: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Take a step, unless Redis is gone; if it fails, Redis is."""
        if self.link.is_up:
            try:
                await step()
            except StoreError:
                await self.disconnect()

    async def write(self) -> None:
        await self.writer.flush()

    async def hold(self) -> None:
        if (await self.store.beat(b"")).incarnation != self._incarnation:
            raise StoreUnavailable(EMPTIED)
        asked = frozenset(self.writer.wanted())
        held = await self.store.hold(list(asked))
        heads = await self.store.heads() if self.writer.needs_heads(held) else {}
        self.writer.update(asked, held, heads)


class SharedInRedis:
    """The index of A and B.

    Args:
        engines: The engines both follow.
        server: Of its own; it is emptied.
        happenings: What `disturb` lets happen, by name; all by default.
    """

    def __init__(
        self,
        engines: Mapping[CandidateId, PlayedEngine],
        server: RedisServer,
        *,
        happenings: Sequence[str] = (),
    ) -> None:
        self.begun_anew: set[CandidateId] = set()
        self._engines = engines
        self._server = server
        self._seen: dict[tuple[str, CandidateId], tuple[str, int]] = {}
        self._num_nodes = 0
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(snapshot_loader, "WAIT_S", 0.0)
        self._patch.setattr(redis_store, "PIPELINE_BYTES", 64)
        self._patch.setattr(redis_log, "BYTES_A_CALL", 16)
        self._patch.setattr(index_writer, "MAX_OLD", 4)
        server.client.flushall()
        namespace = f"test-{uuid.uuid4().hex[:12]}"
        self._base = f"{{wr:{namespace}}}:"
        self._config = RedisConfig(
            url=server.url, namespace=namespace, timeout_s=20.0, lookup_timeout_s=20.0, lease_s=60.0
        )
        self._runner = asyncio.Runner()
        self.nodes: dict[str, Node] = {}
        for name in "AB":
            self._run(self._come(name))
        every: dict[str, Callable[[Node, CandidateId, int], Coroutine[Any, Any, None]]] = {
            "write": lambda node, _, __: node.attempt(node.write),
            "hold": lambda node, _, __: node.attempt(node.hold),
            "replay": self._replay,
            "connect": lambda node, _, __: node.connect(),
            "lose answer": self._lose_answer,
            "lose lease": self._lose_lease,
            "lose redis": lambda node, _, __: node.disconnect(),
            "suspect": self._suspect,
            "kill": self._kill,
            "sweep": self._sweep,
            "flush": self._flush,
        }
        self._happenings = [every[name] for name in happenings or every]
        self.settle()

    # -- the seam ----------------------------------------------------------------------------

    def receive(self, candidate: CandidateId, sequence: int, payload: bytes) -> None:
        for node in self.nodes.values():
            node.direct[candidate].receive(sequence, payload)
        self._note_begun_anew()

    def reconnect(self, candidate: CandidateId) -> None:
        for node in self.nodes.values():
            node.direct[candidate].connected()
        self._note_begun_anew()

    def disturb(self, what: int, how: int) -> None:
        node, candidate = self._node(how), list(self._engines)[how // 2 % len(self._engines)]
        self._run(self._happenings[what % len(self._happenings)](node, candidate, how))

    def settle(self) -> None:
        self._run(self._settle())

    def match(
        self, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> Mapping[CandidateId, BlockMatch]:
        """Ask B, and see that Redis says the same of some blocks."""
        matches = self.nodes["B"].caches.match(chain, candidates)
        if len(chain) == 1 and chain[0] % 8 == 0:
            self._run(self._compare(chain, matches))
        return matches

    def claim(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Callable[[], None]:
        return self.nodes["B"].index.speculate(candidate, keys).end

    def close(self) -> None:
        for node in self.nodes.values():
            self._run(node.disconnect())
        self._runner.close()
        self._patch.undo()

    # -- what happens ------------------------------------------------------------------------

    def _node(self, how: int) -> Node:
        return self.nodes["AB"[how % 2]]

    async def _replay(self, node: Node, candidate: CandidateId, how: int) -> None:
        node.direct[candidate].connected()
        node.replay(candidate)

    async def _lose_answer(self, node: Node, candidate: CandidateId, how: int) -> None:
        node.store.loses_answer = True
        await node.attempt(node.write)
        node.store.loses_answer = False

    async def _lose_lease(self, node: Node, candidate: CandidateId, how: int) -> None:
        self._server.client.delete(f"{self._base}lease:{stream_id_of(candidate)}")

    async def _suspect(self, node: Node, candidate: CandidateId, how: int) -> None:
        if how <= 2:  # it ends what went wrong before
            node.direct[candidate].mark_suspect("at random")

    async def _kill(self, node: Node, candidate: CandidateId, how: int) -> None:
        """Kill a router, before its leases expire or after; another starts in its place."""
        await node.disconnect()
        if how > 3:
            self._expire(node)
        await self._come("AB"[how % 2])

    def _expire(self, node: Node) -> None:
        for candidate in self._engines:
            lease = f"{self._base}lease:{stream_id_of(candidate)}"
            if self._server.client.get(lease) == node.name.encode():
                self._server.client.delete(lease)

    async def _sweep(self, node: Node, candidate: CandidateId, how: int) -> None:
        """Sweep, now and then."""
        if how <= 2:
            await node.attempt(lambda: node.store.sweep(pause_s=0.0))

    async def _flush(self, node: Node, candidate: CandidateId, how: int) -> None:
        """Empty Redis, now and then."""
        if how <= 2:
            self._server.client.flushall()

    async def _come(self, name: str) -> None:
        self._num_nodes += 1
        self.nodes[name] = node = Node(f"{name}{self._num_nodes}", self._config, self._engines)
        await node.start()

    # -- settling ----------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Let everything run until Redis and both routers know the same."""
        living = {node.name.encode() for node in self.nodes.values()}
        for candidate in self._engines:
            lease = f"{self._base}lease:{stream_id_of(candidate)}"
            if self._server.client.get(lease) not in living:
                self._server.client.delete(lease)
        for node in self.nodes.values():
            node.reconnect()
        for _ in range(_MAX_ROUNDS):
            for node in self.nodes.values():
                await node.connect()
                await node.attempt(node.hold)
                while node.link.is_up and await node.writer.flush():
                    pass
            if self._is_settled():
                return
        raise AssertionError("it does not settle")

    def _is_settled(self) -> bool:
        """Return whether one router writes each stream, and has written everything."""
        for candidate in self._engines:
            writers = [
                (node, each)
                for node in self.nodes.values()
                for each in node.writer.streams
                if each.candidate == candidate and each.is_writing
            ]
            if len(writers) != 1:
                return False
            ((node, each),) = writers
            if each.next_delta(node.direct[candidate]) is not None:
                return False
        return all(node.link.is_up for node in self.nodes.values())

    async def _compare(
        self, chain: Sequence[BlockKey], matches: Mapping[CandidateId, BlockMatch]
    ) -> None:
        ids = {stream_id_of(candidate): candidate for candidate in matches}
        writing = {
            each.candidate: node
            for node in self.nodes.values()
            for each in node.writer.streams
            if each.is_writing
        }
        tails = LogTails(self.nodes["B"].store, timeout_s=20.0)
        found = await tails.lookup(chain, tuple(ids))
        for id_, candidate in ids.items():
            known = writing[candidate].caches.match(chain, [candidate])[candidate]
            assert found[id_, "gpu"] == known.num_gpu_stored_blocks

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        result = self._runner.run(work)
        self._note_begun_anew()
        return result

    def _note_begun_anew(self) -> None:
        """See who reads history from its start: each epoch of a stream begins so."""
        for name, node in self.nodes.items():
            for candidate, stream in node.direct.items():
                seen = node.name, stream.epoch
                if self._seen.get((name, candidate)) != seen:
                    self._seen[name, candidate] = seen
                    self.begun_anew.add(candidate)
