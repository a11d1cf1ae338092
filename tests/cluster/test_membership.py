"""Roles, numbers, what is published and received, one case each; see tests/cluster/model.py."""

from __future__ import annotations

import pytest

from router.cluster.membership import Role
from router.cluster.redis_store import Written
from router.cluster.shared_stream import SharedStream
from router.index.candidate_stream import CandidateStream
from router.kv_events.stream import RankStream
from router.messages import Delta, Position
from tests.cluster.model import CANDIDATE, STREAM, Node, PlainRedis, settle
from tests.engine import batch, stored
from tests.index.contract.engine import CHAINS, HASHES, PROMPTS, PlayedEngine


class Scene:
    """Two routers that share an engine's blocks: `leader` leads."""

    def __init__(self, *, keeps_blocks: bool = True) -> None:
        self.engine = PlayedEngine(CANDIDATE)
        self.redis = PlainRedis()
        self.leader = Node("leader", self.redis, self.engine)
        self.other = Node("other", self.redis, self.engine, keeps_blocks=keeps_blocks)
        self.compute(0, 4)
        settle(self.leader, num_rounds=4)
        settle(self.other, num_rounds=4)
        assert (self.leader.role, self.other.role) == (Role.LEADING, Role.FOLLOWING)

    def compute(self, number: int, num_blocks: int = 8) -> None:
        self.say(self.engine.compute(number, num_blocks, again=False, tier="gpu"))

    def evict(self, number: int) -> None:
        self.say(self.engine.evict([k for k in CHAINS[number] if self.has(k)], "gpu"))

    def has(self, key: int) -> bool:
        return bool(self.engine.held["gpu"][key])  # type: ignore[index]

    def say(self, payload: bytes) -> None:
        for node in (self.leader, self.other):
            node.receive(self.engine.last_sequence, payload)

    @property
    def truth(self) -> dict[object, int]:
        return dict(+self.engine.held["gpu"])


def known(node: Node) -> dict[object, int]:
    return dict(node.held())


def test_a_change_is_published_once() -> None:
    """And nothing where nothing changed; until it is acknowledged it is the same."""
    scene = Scene()
    scene.compute(1)
    leader = scene.leader
    delta = leader.memberships.next_delta(leader.member)

    assert leader.memberships.next_delta(leader.member) is delta
    assert leader.flush() is Written.OK
    assert leader.memberships.next_delta(leader.member) is None
    scene.other.read()
    assert known(scene.other) == scene.truth


def test_what_we_wrote_is_no_news() -> None:
    """A leader that reads the log changes nothing; nor does a stream it does not know."""
    scene = Scene()
    scene.leader.read()
    scene.leader.memberships.receive(Delta(STREAM, 99, cleared=True))
    scene.leader.memberships.receive(Delta(STREAM + "x", 1, cleared=True))  # type: ignore[arg-type]

    assert known(scene.leader) == scene.truth


def test_a_free_lease_is_taken_and_nothing_written_anew() -> None:
    """The follower goes on where the dead one stopped; what the engine said since is replayed."""
    scene = Scene()
    scene.compute(1)
    scene.redis.holder = None
    scene.other.step()

    assert scene.other.role is Role.LEADING
    assert isinstance(scene.other.caches.stream(CANDIDATE), RankStream)
    assert scene.other.memberships.num_rewrites == 0
    assert known(scene.other) == scene.redis.held["gpu"] == scene.truth


def test_a_take_over_waits_for_what_is_on_its_way() -> None:
    """The last words of a dead leader are read first."""
    scene = Scene()
    scene.compute(1)
    scene.leader.flush()
    scene.redis.holder = None

    assert not scene.other.beat()
    assert scene.other.role is Role.FOLLOWING
    scene.other.read()
    assert scene.other.beat()
    assert scene.other.role is Role.LEADING


def test_a_leader_that_died_in_a_rewrite_is_followed_by_another_rewrite() -> None:
    """Half of a whole belongs to no position: begin anew, from what is known here."""
    scene = Scene()
    scene.leader.memberships.rewrite(scene.leader.member, scene.leader.publication.number)
    scene.leader.flush()
    scene.redis.holder = None
    scene.other.step()
    assert scene.other.memberships.num_rewrites == 1
    settle(scene.other, scene.leader)

    assert known(scene.other) == known(scene.leader) == scene.redis.held["gpu"] == scene.truth


@pytest.mark.parametrize("num_published", [0, 1, 2])
def test_a_rewrite_is_whole_whatever_changes_meanwhile(num_published: int) -> None:
    """Slices of several moments, and then what the journal noted."""
    scene = Scene()
    scene.leader.memberships.rewrite(scene.leader.member, scene.leader.publication.number)
    for _ in range(num_published):
        scene.leader.flush()
    scene.evict(0)
    scene.compute(1)
    while scene.leader.flush():
        pass
    scene.other.read()

    assert scene.redis.held["gpu"] == known(scene.other) == scene.truth
    assert scene.redis.position is not None


def test_the_connection_back_goes_on_where_it_was() -> None:
    """No other router wrote meanwhile: what changed since is published, and no more."""
    scene = Scene()
    num_rewrites = scene.leader.memberships.num_rewrites
    scene.leader.disconnect()
    assert scene.leader.role is Role.DIRECT
    scene.compute(1)
    scene.leader.connect()
    scene.leader.step()

    assert scene.leader.role is Role.LEADING
    assert scene.leader.memberships.num_rewrites == num_rewrites
    assert scene.redis.held["gpu"] == scene.truth


@pytest.mark.parametrize("arrived", [True, False])
def test_a_lost_acknowledgement_is_found_out(arrived: bool) -> None:
    """What Redis has shows whether the delta came; either way the next one fits."""
    scene = Scene()
    num_rewrites = scene.leader.memberships.num_rewrites
    scene.compute(1)

    def send(delta: Delta, router: str) -> Written | None:
        if arrived:
            scene.redis.write(delta, router)
        return None

    scene.leader.flush(send)
    scene.leader.connect()
    scene.compute(2)
    scene.leader.step()
    scene.leader.step()

    assert scene.leader.memberships.num_rewrites == num_rewrites
    assert scene.redis.held["gpu"] == scene.truth


@pytest.mark.parametrize("is_sent", [True, False])
def test_an_equal_number_is_no_proof(is_sent: bool) -> None:
    """Another router led meanwhile, or Redis lost its end: what is there is written anew."""
    scene = Scene()
    if is_sent:  # and lost: the other one's next has its number
        scene.compute(1)
        scene.leader.flush(lambda delta, router: None)
    else:
        scene.leader.disconnect()
        assert scene.redis.number is not None
        scene.redis.number -= 1
    number = (scene.redis.number or 0) + 1
    scene.redis.holder = "third"
    theirs = Delta(STREAM, number, cleared=True, position=Position(0, b"theirs"))
    assert scene.redis.write(theirs, "third") is Written.OK
    scene.redis.holder = None
    scene.leader.connect()
    for _ in range(6):
        scene.leader.step()

    assert scene.redis.held["gpu"] == known(scene.leader) == scene.truth


@pytest.mark.parametrize("result", [Written.FENCED, Written.LOST])
def test_who_may_not_write_keeps_what_it_knows(result: Written) -> None:
    """It follows the engine itself, and leads again if the lease is still its own."""
    scene = Scene()
    scene.compute(1)
    scene.leader.flush(lambda delta, router: result)
    assert scene.leader.role is Role.DIRECT
    assert not scene.leader.wants_load
    assert known(scene.leader) == scene.truth
    scene.leader.step()

    assert scene.leader.role is Role.LEADING
    settle(scene.leader, scene.other)
    assert scene.redis.held["gpu"] == known(scene.other) == scene.truth


def test_who_lost_the_lease_follows() -> None:
    """Once the new leader has published as much as we know: no block is credited that is gone."""
    scene = Scene()
    scene.redis.holder = "other"
    scene.evict(0)
    scene.compute(1)
    scene.leader.beat()
    assert (scene.leader.role, scene.leader.wants_load) == (Role.DIRECT, True)
    scene.leader.begin_load()
    assert scene.leader.loading is None  # what is in Redis is older than what we know
    assert known(scene.leader) == scene.truth
    scene.other.step()
    scene.other.step()
    scene.leader.begin_load()
    scene.leader.end_load()
    scene.leader.follow()

    assert scene.leader.role is Role.FOLLOWING
    assert isinstance(scene.leader.caches.stream(CANDIDATE), SharedStream)
    assert known(scene.leader) == scene.truth


def test_who_waits_for_another_to_catch_up_leads_if_the_lease_is_free() -> None:
    """There is no leader to wait for any more, and what we know is the best there is."""
    scene = Scene()
    scene.redis.holder = "other"
    scene.compute(1)
    scene.leader.beat()
    scene.leader.begin_load()
    assert scene.leader.wants_load
    scene.redis.holder = None
    scene.leader.step()
    while scene.leader.flush():
        pass

    assert scene.leader.role is Role.LEADING
    assert scene.redis.held["gpu"] == known(scene.leader) == scene.truth


def test_a_leader_that_never_catches_up_is_believed_in_the_end() -> None:
    """It may be that only we reach the engine: some seconds of being right are enough."""
    scene = Scene()
    scene.redis.holder = "other"
    scene.compute(1)
    scene.leader.beat()
    for _ in range(60):
        scene.leader.begin_load()
    scene.leader.end_load()

    assert scene.leader.role is Role.FOLLOWING


def test_a_snapshot_of_an_engine_that_is_no_more_is_not_loaded() -> None:
    """Redis was gone while the engine restarted: what is there is of its former life."""
    scene = Scene()
    for number in range(4):
        scene.compute(number)
    scene.leader.flush()
    scene.other.read()
    for node in (scene.leader, scene.other):
        node.disconnect()
        node.follow()
    scene.engine.restart()
    scene.compute(1, 2)
    for node in (scene.leader, scene.other):
        node.reconnect()
    scene.other.connect()
    scene.other.beat()
    scene.other.begin_load()
    assert scene.other.loading is None
    assert known(scene.other) == scene.truth
    settle(scene.leader, scene.other)

    assert known(scene.other) == known(scene.leader) == scene.truth


def test_entries_that_are_gone_make_it_load_anew() -> None:
    """Also while a snapshot is under way, and if what came after the gap was received."""
    scene = Scene()
    scene.compute(1)
    scene.leader.flush()
    scene.other.member.catch_up.wanted = True
    scene.other.begin_load()
    scene.compute(2)
    scene.leader.flush()
    scene.other.read(2)  # kept for after the snapshot
    scene.compute(3)
    scene.leader.flush()
    scene.other.skip()
    scene.other.end_load()

    assert scene.other.wants_load
    settle(scene.other, num_rounds=2)
    assert known(scene.other) == scene.truth


def test_entries_that_are_gone_before_we_follow_count_as_well() -> None:
    """The engine is still followed directly while the snapshot is read."""
    scene = Scene()
    scene.redis.holder = "other"
    scene.leader.beat()
    scene.other.step()
    scene.other.step()
    scene.leader.begin_load()
    assert (scene.leader.role, scene.leader.loading is not None) == (Role.DIRECT, True)
    scene.leader.skip()

    assert scene.leader.wants_load


def test_a_gap_in_the_numbers_makes_it_load_anew() -> None:
    """The follower finds it itself."""
    scene = Scene()
    scene.compute(1)
    scene.leader.flush()
    scene.other.read_to += 1
    scene.compute(2)
    scene.leader.flush()
    scene.other.read()
    assert scene.other.wants_load
    settle(scene.other, num_rounds=2)

    assert known(scene.other) == scene.truth


def test_what_is_gone_is_published_to_a_full_redis() -> None:
    """What is new waits for room, with all that is new since."""
    scene = Scene()
    scene.redis.is_full = True
    scene.say(scene.engine.evict([CHAINS[0][3]], "gpu"))
    scene.compute(1)
    assert scene.leader.flush() is Written.NO_ROOM
    assert scene.leader.flush() is Written.OK
    scene.other.read()
    assert known(scene.other) == dict.fromkeys(CHAINS[0][:3], 1)
    assert scene.redis.position is None
    assert scene.leader.flush() is Written.NO_ROOM
    scene.say(scene.engine.evict([CHAINS[0][2]], "gpu"))
    scene.leader.flush()
    scene.leader.flush()
    scene.other.read()
    assert known(scene.other) == dict.fromkeys(CHAINS[0][:2], 1)
    scene.redis.is_full = False
    while scene.leader.flush():
        pass
    scene.other.read()

    assert scene.redis.held["gpu"] == known(scene.other) == scene.truth
    assert scene.redis.position is not None


def test_a_copy_that_is_gone_is_published_later_if_there_is_no_room() -> None:
    """Two copies, then one: counted right when there is room."""
    scene = Scene()
    scene.say(scene.engine.compute(0, 4, again=True, tier="gpu"))
    scene.leader.flush()
    scene.say(scene.engine.evict([CHAINS[0][0]], "gpu"))
    scene.redis.is_full = True
    assert scene.leader.flush() is Written.NO_ROOM
    scene.redis.is_full = False
    while scene.leader.flush():
        pass
    scene.other.read()

    assert known(scene.other) == scene.truth
    assert HASHES  # the engine's names of what was counted


@pytest.mark.parametrize("arrives", [None, False, True])
def test_an_engine_that_is_no_more_leaves_a_tombstone(arrives: bool | None) -> None:
    """Whether or not a delta is under way: no router goes on crediting it."""
    scene = Scene()
    scene.compute(1)
    leader = scene.leader
    if arrives is not None:
        delta = leader.memberships.next_delta(leader.member)
        assert delta is not None
        if arrives:
            scene.redis.write(delta, leader.name)
    leader.memberships.end_epoch(leader.member)
    leader.memberships.leave(leader.member)
    for tombstone in leader.memberships.tombstones:
        scene.redis.write(tombstone, leader.name)
    scene.other.read()

    assert leader.memberships.get(STREAM) is None
    assert scene.redis.held["gpu"] == known(scene.other) == {}


def test_tombstones_end_with_the_connection() -> None:
    """They would hit the next leader."""
    scene = Scene()
    scene.leader.memberships.end_epoch(scene.leader.member)
    scene.leader.memberships.disconnected()

    assert scene.leader.memberships.tombstones == []
    other = scene.other
    other.memberships.end_epoch(other.member)  # published nothing: nothing to take back
    assert other.memberships.tombstones == []


def test_who_leaves_ends_no_other_of_its_name() -> None:
    """Its candidate was found again before the old watch ended."""
    scene = Scene()
    old = scene.other.member
    new = scene.other.memberships.join(STREAM, CANDIDATE, is_shared=True)
    scene.other.memberships.leave(old)

    assert scene.other.memberships.get(STREAM) is new


def test_without_blocks_there_is_no_position_to_go_on_from() -> None:
    """index.mode redis: numbers and status are kept; history is read from the start."""
    scene = Scene(keeps_blocks=False)
    stream = scene.other.caches.stream(CANDIDATE)
    assert isinstance(stream, SharedStream)
    assert known(scene.other) == {}
    assert stream.position is None
    assert stream.status().state == "exact"
    scene.compute(1)
    scene.leader.flush()
    scene.other.read()
    assert known(scene.other) == {}
    assert stream.number == scene.redis.number
    scene.other.disconnect()
    scene.other.follow()

    assert known(scene.other) == scene.truth
    scene.other.connect()
    for _ in range(3):
        scene.other.step()
    assert (scene.other.role, known(scene.other)) == (Role.FOLLOWING, {})


def test_blocks_of_several_kv_groups_are_kept() -> None:
    """Where Redis is asked for prefixes, a model with windows is matched here all the same."""
    scene = Scene(keeps_blocks=False)
    window = stored(PROMPTS[0], group=1, kind="sliding_window")
    window.kv_cache_spec_sliding_window = 5
    scene.leader.receive(1 + scene.engine.last_sequence, batch(stored(PROMPTS[0]), window))
    scene.leader.flush()
    scene.other.read()
    assert scene.other.wants_load
    scene.other.begin_load()
    scene.other.end_load()

    matches = [node.index.match(CHAINS[0], [CANDIDATE]) for node in (scene.leader, scene.other)]
    assert matches[0] == matches[1]
    assert matches[0][CANDIDATE].num_gpu_blocks == len(CHAINS[0])
    assert not scene.other.wants_load


def test_without_blocks_who_has_to_lead_loads_them_first() -> None:
    """A leader must know what there is."""
    scene = Scene(keeps_blocks=False)
    scene.redis.holder = None
    scene.other.step()
    assert scene.other.role is Role.FOLLOWING
    assert known(scene.other) == scene.truth
    scene.other.step()

    assert scene.other.role is Role.LEADING
    assert scene.other.memberships.num_rewrites == 0
    assert known(scene.other) == scene.truth


def test_who_knows_little_takes_what_others_left() -> None:
    """The engine's buffer is short: Redis knows more than could be read now."""
    scene = Scene()
    for number in range(4):
        scene.compute(number)
    while scene.leader.flush():
        pass
    scene.engine.trim(1)
    late = Node("late", scene.redis, scene.engine)
    scene.redis.holder = None
    assert len(known(late)) < len(scene.truth)
    settle(late, num_rounds=4)

    assert late.role is Role.LEADING
    assert late.memberships.num_rewrites == 0
    assert known(late) == scene.redis.held["gpu"] == scene.truth


def test_a_load_that_comes_too_late_is_given_up() -> None:
    """Redis went away while it was under way."""
    scene = Scene()
    scene.other.member.catch_up.wanted = True
    scene.other.begin_load()
    loading = scene.other.loading
    assert loading is not None
    scene.other.disconnect()
    scene.other.memberships.end_load(scene.other.member, loading, through=None)

    assert scene.other.role is Role.DIRECT
    assert known(scene.other) == scene.truth


def test_a_journal_that_overflowed_is_a_rewrite() -> None:
    """Nothing could be published for too long: begin anew."""
    scene = Scene()
    num_rewrites = scene.leader.memberships.num_rewrites
    for number in range(40):
        scene.say(scene.engine.compute(number % 4, 8, again=True, tier="gpu"))
    while scene.leader.flush():
        pass
    scene.other.read()

    assert scene.leader.memberships.num_rewrites == num_rewrites + 1
    assert scene.redis.held["gpu"] == known(scene.other) == scene.truth


# -- what no router kept up ------------------------------------------------------------------------


def test_what_a_dead_router_left_is_history_only_when_another_has_read_on() -> None:
    """Redis says exact; since then the engine has forgotten all, and no router published it."""
    scene = Scene()
    scene.redis.holder = None
    scene.engine.clear()
    late, later = (Node(name, scene.redis, scene.engine) for name in ("late", "later"))
    for node in (late, later):
        node.connect()
        node.rejoin()
        node.begin_load()
        node.end_load()
    assert history(late, later) == [False, False]
    assert stream_of(later).reason == "no router leads it yet: as old as its last leader"

    late.beat()
    assert late.role is Role.LEADING
    assert history(late, later) == [False, False]
    late.follow()  # reads what the engine did
    assert history(late, later) == [True, False]
    while late.flush():
        pass
    later.read()

    assert history(late, later) == [True, True]
    assert known(late) == known(later) == {}


def history(*nodes: Node) -> list[bool]:
    return [stream_of(node).has_history for node in nodes]


def stream_of(node: Node) -> CandidateStream:
    stream = node.caches.stream(CANDIDATE)
    assert stream is not None
    return stream
