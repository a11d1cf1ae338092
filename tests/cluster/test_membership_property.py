"""Whatever happens to routers, engine and Redis, in any order: in the end all know the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.cluster.redis_store import Written
from router.index.copies import TIERS
from router.messages import Delta
from tests.cluster.model import CANDIDATE, Node, PlainRedis, settle
from tests.effort import examples
from tests.index.contract.engine import BLOCKS, PROMPTS, PlayedEngine

ENGINE = st.one_of(
    st.tuples(
        st.just("compute"),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 8),
        st.booleans(),
        st.sampled_from(TIERS),
    ),
    st.tuples(
        st.just("evict"),
        st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6),
        st.sampled_from(TIERS),
    ),
    st.tuples(st.sampled_from(["clear", "restart"])),
)
ROUTER = st.tuples(
    st.sampled_from(
        ["connect", "disconnect", "beat", "follow", "flush", "flush", "lost_ack", "lost_delta",
         "read", "read_one", "skip", "begin_load", "end_load", "step", "reconnect", "suspect",
         "rejoin", "deaf"]
    ),
    st.integers(0, 2),
)  # fmt: skip
REDIS = st.tuples(st.sampled_from(["expire", "empty", "keep", "roll_back", "full", "room"]))


class World:
    """An engine, a Redis, and three routers."""

    def __init__(self) -> None:
        self.engine = PlayedEngine(CANDIDATE)
        self.redis = PlainRedis()
        self.kept = PlainRedis()
        self.nodes = [Node(f"router-{i}", self.redis, self.engine) for i in range(3)]
        self.deaf: set[int] = set()
        self.engine.compute(0, 4, again=False, tier="gpu")
        settle(*self.nodes, num_rounds=3)

    def do(self, what: str, *how: Any) -> None:
        match what:
            case "compute":
                number, num_blocks, again, tier = how
                self.publish(self.engine.compute(number, num_blocks, again=again, tier=tier))
            case "evict":
                self.publish(self.engine.evict(*how))
            case "clear":
                self.publish(self.engine.clear())
            case "restart":
                self.engine.restart()
            case "expire":
                self.redis.holder = None
            case "keep":
                self.kept = self.redis.copy()
            case "empty":
                self.lose(PlainRedis())
            case "roll_back":
                self.lose(self.kept)
            case "full" | "room":
                self.redis.is_full = what == "full"
            case _:
                self.route(what, how[0])

    def publish(self, payload: bytes) -> None:
        for number, node in enumerate(self.nodes):
            if number not in self.deaf:
                node.receive(self.engine.last_sequence, payload)

    def lose(self, state: PlainRedis) -> None:
        """Let Redis be another one; those connected notice."""
        for node in self.nodes:
            if node.is_connected:
                node.disconnect()
        self.redis.become(state)

    def route(self, what: str, number: int) -> None:
        node = self.nodes[number]
        needs = {"beat", "flush", "lost_ack", "lost_delta", "read", "read_one", "skip",
                 "begin_load", "end_load", "step"}  # fmt: skip
        if what in needs and not node.is_connected:
            return
        match what:
            case "connect" if not node.is_connected:
                node.connect()
            case "disconnect" if node.is_connected:
                node.disconnect()
            case "lost_ack":
                node.flush(self.lost_ack)
            case "lost_delta":
                node.flush(lambda delta, router: None)
            case "read_one":
                node.read(1)
            case "suspect":
                stream = node.caches.stream(CANDIDATE)
                assert stream is not None
                stream.mark_suspect("at random")
            case "rejoin":
                node.rejoin()
            case "deaf":
                self.deaf ^= {number}
            case "connect" | "disconnect":
                pass
            case _:
                getattr(node, what)()

    def lost_ack(self, delta: Delta, router: str) -> Written | None:
        self.redis.write(delta, router)
        return None


@settings(max_examples=examples(120))
@given(st.lists(st.one_of(ENGINE, ROUTER, ROUTER, REDIS), max_size=60))
def test_all_know_what_the_engine_has(history: list[tuple[Any, ...]]) -> None:
    """One leads; it, those who follow, and Redis have just the engine's blocks, copy by copy."""
    world = World()
    for what, *how in history:
        world.do(what, *how)
    world.redis.is_full = False
    settle(*world.nodes)

    roles = sorted(node.role.name for node in world.nodes)
    assert roles == ["FOLLOWING", "FOLLOWING", "LEADING"]
    for tier in TIERS:
        true = dict(+world.engine.held[tier])
        assert world.redis.held[tier] == true
        for node in world.nodes:
            assert node.held(tier) == true, (node.name, node.role)
