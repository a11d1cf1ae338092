from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from policies import CandidateId, CostModel, Holding, ReplicaView, RequestView, Snapshot, create
from router.base.engines import Role
from router.base.errors import NoReplicaAvailable, UnknownModel
from router.base.messages import KvGroup
from router.index.behind import Behind
from router.index.hit_length import KvLayout
from router.records.record import Outcome
from router.replicas import (
    Booking,
    EngineLoad,
    Fleet,
    HealthRules,
    ProbeFailure,
    Replica,
    ServedModel,
)
from router.replicas.replica import model_entries
from tests.replicas.work import UNIT, fleet_of, replica, send

A = CandidateId("a")


def load(running: int, waiting: int, at_s: float = 0.0) -> EngineLoad:
    return EngineLoad(num_running=running, num_waiting=waiting, at_s=at_s)


def elsewhere(tokens: int, *, streams: bool = True) -> Booking:
    return Booking(num_uncached_tokens=tokens, num_cached_tokens=0, streams=streams, is_ours=False)


def test_a_request_leaves_nothing_behind() -> None:
    fleet = fleet_of("a", "b")
    candidates = fleet.offers.candidates("m", 0.0)
    views = fleet.load.views(candidates, {CandidateId("b"): Holding(800, 900)}, 0.0)
    asked = Snapshot(
        now_s=0.0, number=0, seed=0, request=RequestView(num_tokens=1000), replicas=views
    )
    decision = create("kv_aware").decide(asked)
    lease = send(fleet, decision.candidate, 0.0)

    assert decision.candidate == "b"
    assert (views[1].num_gpu_tokens, views[1].num_cpu_tokens) == (800, 900)
    (busy,) = [v for v in fleet.load.views(candidates, {}, 0.0) if v.id == "b"]
    assert (busy.num_requests, busy.num_waiting, busy.queue_ms) == (1, 1, 100.0)
    fleet.load.first_token(lease, 0.1)
    assert fleet.load.end(lease, 0.2, Outcome.OK)
    assert not fleet.load.end(lease, 0.2, Outcome.OK)
    assert all(status.num_requests == 0 for status in fleet.load.status(0.2))
    assert fleet.load.is_idle("b")


def test_the_routers_queue_counts_as_the_engines_queue() -> None:
    fleet = fleet_of("a", "b")
    candidates = fleet.offers.candidates("m", 0.0)
    send(fleet, CandidateId("a"), 0.0)

    behind = fleet.load.views(candidates, {}, 0.0, {CandidateId("a"): 400.0, CandidateId("x"): 1.0})
    assert [view.queue_ms for view in behind] == [500.0, 0.0]
    assert [view.queue_ms for view in fleet.load.views(candidates, {}, 0.0)] == [100.0, 0.0]


def test_replicas_of_a_model_are_offered_in_order() -> None:
    fleet = Fleet(order=("c", "a"))
    fleet.members.add(replica("a", models=("m", "lora")))
    fleet.members.add(replica("b", models=("n",)))
    fleet.members.add(replica("c", num_ranks=2))

    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["c#0", "c#1", "a"]
    assert [c.id for c in fleet.offers.candidates("lora", 0.0)] == ["a"]
    assert [c.id for c in fleet.offers.candidates(None, 0.0)] == ["c#0", "c#1", "a", "b"]
    assert [r.name for r in fleet.members.replicas] == ["c", "a", "b"]
    assert [entry["id"] for entry in model_entries(fleet.members.replicas)] == ["m", "lora", "n"]
    assert fleet.members.served.get("n") == ServedModel(id="n")
    assert fleet.members.served.get("x") is None
    assert fleet.members.replica("b").name == "b"


def test_an_unknown_model_is_the_clients_fault() -> None:
    with pytest.raises(UnknownModel, match=r"`x` does not exist \(served: m\)") as caught:
        fleet_of("a").offers.candidates("x", 0.0)

    assert caught.value.param == "model"


def test_an_undiscovered_replica_may_have_the_model() -> None:
    fleet = fleet_of("a")
    fleet.members.add(Replica(name="late", url="http://late"))

    with pytest.raises(NoReplicaAvailable, match="No replica of `x`"):
        fleet.offers.candidates("x", 0.0)


@pytest.mark.parametrize("model", ["m", None])
def test_an_empty_fleet_has_no_candidate(model: str | None) -> None:
    with pytest.raises(NoReplicaAvailable, match="No replica"):
        Fleet().offers.candidates(model, 0.0)


def test_says_when_to_ask_again() -> None:
    fleet = fleet_of("a", rules=HealthRules(backoff_s=12.0))
    fleet.load.end(send(fleet, "a", 0.0), 0.0, Outcome.REPLICA_UNREACHABLE, jitter=1.0)

    with pytest.raises(NoReplicaAvailable) as caught:
        fleet.offers.candidates("m", 2.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    assert [c.id for c in fleet.offers.candidates("m", 12.0)] == ["a"]


def test_failover_excludes_those_tried() -> None:
    fleet = fleet_of("a", "b")
    fleet.members.add(replica("c", num_ranks=2))

    assert [c.id for c in fleet.offers.candidates("m", 0.0, exclude={"c", "a"})] == ["b"]
    with pytest.raises(NoReplicaAvailable):
        fleet.offers.candidates("m", 0.0, exclude={"a", "b", "c"})


def test_a_draining_replica_finishes_and_takes_nothing_new() -> None:
    fleet = fleet_of("a", "b")
    lease = send(fleet, "a", 0.0)
    fleet.members.drain("a")
    fleet.members.add(replace(replica("a"), version="0.32.1"))

    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["b"]
    assert fleet.load.status(0.0)[0].draining
    assert not fleet.load.is_idle("a")
    fleet.load.end(lease, 1.0, Outcome.OK)
    assert fleet.load.is_idle("a")
    fleet.members.drain("a", draining=False)
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["a", "b"]


def test_unknown_replicas_are_an_error_for_orders_only() -> None:
    fleet = fleet_of("a")

    with pytest.raises(KeyError):
        fleet.members.drain("x")
    assert not fleet.members.remove("x")
    fleet.members.probe_ok("x", 0.0)
    fleet.members.probe_failed("x", ProbeFailure.REFUSED, 0.0)
    fleet.load.note_engine_load(CandidateId("x"), load(1, 1))
    assert not fleet.members.is_up("x", 0.0)


def test_leases_outlive_their_replica() -> None:
    fleet = fleet_of("a", "b")
    lease = send(fleet, "a", 0.0)
    assert fleet.members.remove("a")
    fleet.load.first_token(lease, 0.1)
    assert not fleet.load.end(lease, 0.1, Outcome.REPLICA_FAILED)

    fleet.members.add(replace(replica("a"), url="http://elsewhere"))
    send(fleet, "a", 0.2)
    assert not fleet.load.end(lease, 0.3, Outcome.REPLICA_FAILED)
    assert fleet.load.status(0.3)[1].num_requests == 1


def test_a_new_description_keeps_load_a_new_address_does_not() -> None:
    fleet = fleet_of("a")
    send(fleet, "a", 0.0)
    fleet.members.probe_failed("a", ProbeFailure.REFUSED, 0.0)
    fleet.members.add(replica("a", models=("m", "n")))
    kept = fleet.load.status(0.0)[0]
    fleet.members.add(replace(replica("a"), url="http://elsewhere"))
    fresh = fleet.load.status(0.0)[0]

    assert (kept.num_requests, kept.state) == (1, "down")
    assert (fresh.num_requests, fresh.state) == (0, "up")


def test_ranks_come_and_go_with_the_description() -> None:
    fleet = fleet_of("a")
    fleet.members.add(replica("a", num_ranks=2))

    assert [status.id for status in fleet.load.status(0.0)] == ["a#0", "a#1"]
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["a#0", "a#1"]


def test_an_outage_and_back() -> None:
    fleet = fleet_of("a", "b")
    fleet.members.probe_failed("a", ProbeFailure.REFUSED, 0.0)
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["b"]
    assert not fleet.members.is_up("a", 0.0)

    fleet.members.probe_ok("a", 5.0)
    assert fleet.members.is_up("a", 5.0)
    assert [c.id for c in fleet.offers.candidates("m", 100.0)] == ["a", "b"]
    fleet.load.end(send(fleet, "a", 100.0), 100.0, Outcome.OK)
    assert [c.id for c in fleet.offers.candidates("m", 100.0)] == ["a", "b"]


def test_first_tokens_teach_the_class() -> None:
    fleet = fleet_of("a", "b")
    fleet.members.add(replace(replica("c"), cost_class="other"))
    for number in range(20):
        lease = send(fleet, "a", float(number), tokens=100 * (number + 1))
        fleet.load.first_token(lease, number + 0.5)
        fleet.load.first_token(lease, number + 0.6)
        fleet.load.end(lease, number + 0.7, Outcome.OK)

    a, b, c = fleet.load.status(100.0)
    assert (a.num_observations, b.num_observations, c.num_observations) == (20, 20, 0)
    assert a.cost == b.cost != UNIT
    assert c.cost == UNIT


def test_whole_answers_that_end_before_they_were_due_teach() -> None:
    fleet = fleet_of("a")
    for number in range(64):
        lease = send(fleet, "a", float(number), tokens=1000, streams=False)
        took_s = 0.25e-3 * lease.predicted_ms if number < 40 else 2e-3 * lease.predicted_ms
        fleet.load.end(lease, number + took_s, Outcome.OK)
    failed = send(fleet, "a", 100.0, tokens=1000, streams=False)
    fleet.load.end(failed, 100.001, Outcome.CLIENT_ERROR)
    no_prompt = send(fleet, "a", 100.0, tokens=0, streams=False)
    fleet.load.end(no_prompt, 100.001, Outcome.OK)

    status = fleet.load.status(100.0)[0]
    assert status.cost.ms_per_token < 0.5 * UNIT.ms_per_token
    assert status.num_observations == 40  # neither those that took longer nor these two


def test_a_recovering_replicas_first_token_ends_its_trial() -> None:
    fleet = fleet_of("a", "b", "c", rules=HealthRules(failures_to_open=1, backoff_s=1.0))
    fleet.load.end(send(fleet, "a", 0.0), 0.0, Outcome.REPLICA_FAILED)
    lease = send(fleet, "a", 2.0)
    assert [c.id for c in fleet.offers.candidates("m", 2.0)] == ["b", "c"]

    fleet.load.first_token(lease, 3.0)
    assert fleet.members.is_up("a", 3.0)


def test_load_of_direct_clients_is_read_from_the_engine() -> None:
    fleet = fleet_of("a")
    for number in range(50):
        fleet.load.end(send(fleet, "a", float(number), tokens=1000), float(number), Outcome.OK)
    lease = send(fleet, "a", 100.0, tokens=1000)
    fleet.load.first_token(lease, 100.5)
    fleet.load.note_engine_load(A, load(running=3, waiting=2, at_s=101.0))

    (view,) = fleet.load.views(fleet.offers.candidates("m", 101.0), {}, 101.0)
    assert (view.num_requests, view.num_waiting) == (5, 2)
    assert view.num_queued_tokens == pytest.approx(2000, rel=0.01)
    assert view.queue_ms == pytest.approx(2000, rel=0.01)
    booked = send(fleet, "a", 101.0, tokens=10)
    assert booked.work.num_tokens == pytest.approx(2010, rel=0.01)
    assert booked.work.num_running == 1 + 2


def test_own_requests_are_not_foreign() -> None:
    fleet = fleet_of("a")
    send(fleet, "a", 0.0)
    send(fleet, "a", 0.0)
    fleet.load.note_engine_load(A, load(running=1, waiting=1))

    (view,) = fleet.load.views(fleet.offers.candidates("m", 0.0), {}, 0.0)
    assert view.num_requests == 2
    assert fleet.load.status(0.0)[0].engine_load == load(1, 1)


def test_a_view_is_kept_until_something_changes() -> None:
    fleet = fleet_of("a")
    candidates = fleet.offers.candidates("m", 0.0)

    def shown(match: Holding, now_s: float) -> ReplicaView:
        return fleet.load.views(candidates, {A: match}, now_s)[0]

    first = shown(Holding(16, 16), 0.0)
    assert shown(Holding(16, 16), 0.05) is first
    assert shown(Holding(16, 32), 0.05).num_cpu_tokens == 32
    lease = send(fleet, "a", 1.0)
    assert shown(Holding(16, 16), 1.0).num_waiting == 1
    fleet.load.first_token(lease, 1.05)
    decoding = shown(Holding(16, 16), 1.05)
    assert (decoding.num_requests, decoding.num_waiting) == (1, 0)
    fleet.load.end(lease, 1.06, Outcome.OK)
    assert shown(Holding(16, 16), 1.06).num_requests == 0
    fleet.load.note_engine_load(A, load(running=3, waiting=0, at_s=1.07))
    assert shown(Holding(16, 16), 1.07).num_requests == 3
    assert shown(Holding(16, 16), 16.06).num_requests == 3
    assert shown(Holding(16, 16), 16.08).num_requests == 0
    for number in range(40):
        lease = send(fleet, "a", 100.0 + number)
        fleet.load.first_token(lease, 100.5 + number)
        fleet.load.end(lease, 100.6 + number, Outcome.OK)
    assert shown(Holding(16, 16), 140.0).cost != first.cost


def test_busy_is_time_with_a_prefill_at_work() -> None:
    fleet = fleet_of("a")
    candidates = fleet.offers.candidates("m", 0.0)
    fleet.load.views(candidates, {}, 0.0)
    lease = send(fleet, "a", 0.0)
    (busy,) = fleet.load.views(candidates, {}, 60.0)
    fleet.load.first_token(lease, 60.0)
    (kept,) = fleet.load.views(candidates, {}, 60.05)
    (idle,) = fleet.load.views(candidates, {}, 120.0)

    assert busy.busy_ratio == kept.busy_ratio == pytest.approx(1 - 2.718281828**-1)
    assert idle.busy_ratio == pytest.approx(busy.busy_ratio * 2.718281828**-1)
    assert fleet.load.status(120.0)[0].busy_ratio == pytest.approx(idle.busy_ratio)


def test_other_routers_requests_count_as_ours() -> None:
    fleet = fleet_of("a")
    lease = fleet.load.admit(A, elsewhere(400), 0.0)
    assert A in fleet.members.states
    (view,) = fleet.load.views(fleet.offers.candidates("m", 0.0), {}, 0.0)
    assert (view.num_requests, view.queue_ms) == (1, 400.0)

    fleet.load.first_token(lease, 0.5, 450.0)
    fleet.load.first_token(lease, 0.5, 450.0)
    assert fleet.load.status(0.5)[0].num_observations == 1
    assert fleet.load.end(lease, 1.0, None)
    assert not fleet.load.end(lease, 1.0, None)
    fleet.members.remove("a")
    fleet.load.first_token(lease, 2.0, 1.0)
    assert not fleet.load.end(lease, 2.0, None)
    with pytest.raises(KeyError):
        fleet.load.admit(A, elsewhere(1), 2.0)


def test_a_whole_answer_elsewhere_is_presumed_like_ours() -> None:
    fleet = fleet_of("a")
    lease = fleet.load.admit(A, elsewhere(100, streams=False), 0.0)
    (view,) = fleet.load.views(fleet.offers.candidates("m", 1.0), {}, 1.0)

    assert (view.num_requests, view.num_waiting, view.queue_ms) == (1, 0, 0.0)
    fleet.load.first_token(lease, 2.0, None)
    assert fleet.load.end(lease, 2.0, None)


def split(*roles: tuple[str, Role]) -> Fleet:
    """Make a fleet of replicas with roles."""
    fleet = Fleet()
    for name, role in roles:
        fleet.members.add(replace(replica(name), role=role))
    return fleet


STORE = Replica(name="reader", url="http://reader", role="decode")


def test_prefill_replicas_get_no_request_of_a_client() -> None:
    fleet = split(("p", "prefill"), ("d", "decode"), ("b", "both"))

    assert fleet.members.is_split
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["d", "b"]
    assert [c.id for c in fleet.offers.prefillers("m", STORE, 0.0)] == ["p"]
    assert fleet.offers.prefillers("m", replace(STORE, transfer="nixl"), 0.0) == ()
    assert fleet.offers.prefillers("m", replace(STORE, pool="another"), 0.0) == ()
    nixl = replace(STORE, transfer="nixl", pool="another")
    fleet.members.add(
        replace(nixl, name="q", role="prefill", models=(ServedModel(id="m"),), pool="its")
    )
    assert [c.id for c in fleet.offers.prefillers("m", nixl, 0.0)] == ["q"]
    assert fleet.offers.prefillers("n", STORE, 0.0) == ()
    fleet.members.drain("p")
    assert fleet.offers.prefillers("m", STORE, 0.0) == ()
    assert not fleet_of("a").members.is_split


def test_a_producer_beside_other_replicas_needs_a_role() -> None:
    producer = replace(replica("p"), seems="prefill", version="0.32.0")
    fleet = Fleet()
    fleet.members.add(producer)
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["p"]  # alone it is no half
    fleet.members.add(replace(replica("newer"), version="0.33.0"))
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["p", "newer"]

    fleet.members.add(replace(replica("d"), version="0.32.0"))

    with pytest.raises(NoReplicaAvailable, match=r"computed at p .*role: prefill there"):
        fleet.offers.candidates("m", 0.0)
    fleet.members.add(replace(producer, role="prefill"))
    fleet.members.add(replace(replica("d"), version="0.32.0", role="decode"))
    assert [c.id for c in fleet.offers.candidates("m", 0.0)] == ["newer", "d"]


def test_a_prefill_replica_that_is_down_is_not_offered() -> None:
    fleet = split(("p", "prefill"), ("d", "decode"))
    fleet.members.probe_failed("p", ProbeFailure.REFUSED, 0.0)

    assert fleet.offers.prefillers("m", STORE, 1.0) == ()
    fleet.members.probe_ok("p", 2.0)
    assert [c.id for c in fleet.offers.prefillers("m", STORE, 2.0)] == ["p"]


def test_a_prefill_replica_that_stalled_is_not_offered() -> None:
    """The replica that decodes can compute the prompt."""
    fleet = split(("p", "prefill"), ("d", "decode"))
    fleet.members.note_signs("p", True, 0.0)

    assert fleet.offers.prefillers("m", STORE, 1.0) == ()
    fleet.members.note_signs("p", False, 2.0)
    assert [c.id for c in fleet.offers.prefillers("m", STORE, 2.0)] == ["p"]


def test_a_dead_replica_neither_sleeps_nor_is_paused() -> None:
    """It says so again when it is back."""
    fleet = fleet_of("a")
    for asleep in (True, False):
        fleet.members.set_sleep("a", asleep=asleep, paused=not asleep)
        assert fleet.load.status(0.0)[0].state == ("asleep" if asleep else "paused")
        fleet.members.probe_failed("a", ProbeFailure.REFUSED, 1.0)
        assert fleet.load.status(1.0)[0].state == "down"
        assert fleet.members.replica("a").is_awake
        fleet.members.probe_ok("a", 2.0)


def test_who_waits_for_room_is_called_once() -> None:
    """At the first change that may have made room."""
    fleet, called = fleet_of("a"), []
    fleet.members.once_changed.add(lambda: called.append("now"))

    lease = send(fleet, "a", 0.0)
    assert not called
    fleet.load.first_token(lease, 0.1)
    fleet.load.end(lease, 0.2, Outcome.OK)
    assert called == ["now"]


def test_the_capacity_comes_from_the_best_known_figure() -> None:
    r1 = CandidateId("r1")
    blocks = Replica(name="r1", url="http://r1", block_size=16, num_blocks=100)
    groups = KvGroup(0, "full_attention", 16), KvGroup(1, "mamba", 16)
    layouts: list[KvLayout | None] = [None]
    fleet = Fleet(layout_of=lambda _: layouts[0])

    assert fleet.load.capacity_tokens(r1) is None
    fleet.members.add(blocks)
    assert fleet.load.capacity_tokens(r1) == 1600
    fleet.members.add(replace(blocks, num_cache_tokens=1000))
    assert fleet.load.capacity_tokens(r1) == 1000
    layouts[0] = KvLayout(groups, 16)
    assert fleet.load.capacity_tokens(r1) == 1600
    for session in range(3):
        fleet.conversations.begin(session, r1, 100, 0, 0.0)
    assert fleet.load.capacity_tokens(r1) == (100 - 3) * 16


def behind_of(found: Behind, *names: str, **fields: Any) -> Fleet:
    """Create replicas with caches of 1,600 tokens, and the same behind each of them."""
    prior = CostModel(base_ms=0.0, ms_per_token=1.0, ms_per_mtoken2=0.0, **fields)
    fleet = Fleet(prior=prior, behind=lambda _: found)
    for name in names:
        fleet.members.add(Replica(name=name, url=f"http://{name}", block_size=16, num_blocks=100))
    return fleet


def live(fleet: Fleet, *tokens: tuple[int, CandidateId]) -> None:
    """Begin conversations of so many tokens, which are worth keeping."""
    for session, (num_tokens, where) in enumerate(tokens):
        fleet.conversations.begin(session, where, num_tokens, 0, 0.0, cost_s=1_000.0)


def test_blocks_of_several_groups_in_a_tier_are_not_counted_as_tokens_twice() -> None:
    """Two groups of full attention: a token takes a block's place in each."""
    r1 = CandidateId("r1")
    groups = KvGroup(0, "full_attention", 16), KvGroup(1, "full_attention", 16)
    fleet = Fleet(
        layout_of=lambda _: KvLayout(groups, 16), behind=lambda _: Behind(400, is_full=True)
    )
    fleet.members.add(Replica(name="r1", url="http://r1", block_size=16, num_blocks=100))

    assert fleet.load.capacity_tokens(r1) == 800
    assert fleet.load.room_tokens(r1) == 3200


def test_a_full_cpu_tier_is_room_and_one_that_has_evicted_nothing_any_room() -> None:
    """A tier smaller than the cache adds nothing: it has copies of what is there."""
    full = [behind_of(Behind(num, is_full=True), "a") for num in (0, 50, 400)]

    assert [fleet.load.room_tokens(A) for fleet in full] == [1600, 1600, 6400]
    assert behind_of(Behind(400), "a").load.room_tokens(A) is None
    assert [fleet.load.reads_back(A) for fleet in full] == [False, True, True]


def test_a_pool_is_no_room_if_computing_is_faster_than_reading() -> None:
    """Computing a token takes 1 ms here."""
    rooms = []
    for ms_per_fetched_token in (0.9, 1.1):
        found = Behind(400, is_full=True, sharers=(A,))
        fleet = behind_of(found, "a", ms_per_fetched_token=ms_per_fetched_token)
        live(fleet, (2000, A))
        rooms.append(fleet.load.room_tokens(A))

    assert rooms == [6400, 1600]


def test_conversations_elsewhere_take_their_part_of_a_pool() -> None:
    """6,400 tokens in the pool that two replicas share."""
    b = CandidateId("b")
    fleet = behind_of(Behind(400, is_full=True, sharers=(A, b)), "a", "b")
    live(fleet, (1000, A), (2000, b))

    assert fleet.load.room_tokens(A) == 4400
    assert fleet.load.room_tokens(b) == 5400


def test_reading_from_ssd_has_its_own_price() -> None:
    """A quarter of the blocks on SSD, at 9 ms a token instead of 1."""
    model = CostModel(ms_per_fetched_token=1.0, ms_per_disk_token=9.0, ms_per_cpu_token=0.5)

    assert Behind(400, num_disk_blocks=100, sharers=(A,)).ms_per_token(model) == 3.0
    assert Behind(400).ms_per_token(model) == 0.5


def decoder(**fields: Any) -> tuple[Fleet, Replica]:
    """Create a fleet of one replica of role decode with 1,600 tokens of cache."""
    fleet = Fleet(prior=UNIT)
    one = Replica(name="a", url="http://a", block_size=16, num_blocks=100, role="decode", **fields)
    fleet.members.add(one)
    return fleet, one


def view_of(fleet: Fleet, now_s: float) -> ReplicaView:
    candidates = fleet.offers.candidates(None, now_s)
    return fleet.load.views(candidates, {}, now_s)[0]


def test_free_kv_is_what_no_request_in_flight_uses() -> None:
    fleet, _ = decoder()
    booking = Booking(num_uncached_tokens=100, num_cached_tokens=300)

    assert view_of(fleet, 0.0).num_free_tokens == 1600
    first = fleet.load.admit(A, booking, 0.0)
    assert view_of(fleet, 0.0).num_free_tokens == 1200
    fleet.load.note_engine_load(A, EngineLoad(num_running=1, num_waiting=0, at_s=1.0, kv_usage=0.5))
    assert view_of(fleet, 1.0).num_free_tokens == 800
    second = fleet.load.admit(A, booking, 2.0)
    assert view_of(fleet, 2.0).num_free_tokens == 400
    fleet.load.end(first, 3.0, Outcome.OK)
    assert view_of(fleet, 3.0).num_free_tokens == 800
    assert view_of(fleet, 30.0).num_free_tokens == 1200
    fleet.load.end(second, 31.0, Outcome.OK)
    assert view_of(fleet, 31.0).num_free_tokens == 1600


def test_inter_token_latency_is_learned_from_readings_of_decode_replicas() -> None:
    fleet, one = decoder()
    token_s, num_tokens = 100.0, 1_000

    for number in range(12):
        token_s, num_tokens = token_s + 2.0, num_tokens + 100
        if number == 6:  # it has started again
            token_s, num_tokens = 0.1, 1
        reading = EngineLoad(
            num_running=4,
            num_waiting=0,
            at_s=float(number),
            kv_usage=0.25,
            token_s=token_s,
            num_tokens=num_tokens,
        )
        fleet.load.note_engine_load(A, reading)

    for _ in range(3):  # so that the load is as it was: 4 requests, 400 tokens
        lease = fleet.load.admit(A, Booking(num_uncached_tokens=100, num_cached_tokens=33), 90.0)
        fleet.load.first_token(lease, 91.0)
    assert view_of(fleet, 100.0).tbt_ms == pytest.approx(20.0, rel=0.01)
    # All in flight will decode when a prompt has been computed: 3 and it, of 133 tokens each.
    assert fleet.load.tbt_ms(A, 1, 100.0) == pytest.approx(20.0, rel=0.01)
    fleet.members.add(replace(one, role="both"))
    assert view_of(fleet, 200.0).tbt_ms is None
    assert fleet.load.tbt_ms(A, 1, 200.0) is None  # learned apart: prompts make steps longer there
    assert view_of(fleet, 200.0).num_free_tokens is None
