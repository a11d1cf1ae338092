"""router.pool.catalog: what events, listings and answers of the master add to the directories."""

from __future__ import annotations

import pytest

from policies.view import CandidateId
from router.pool.catalog import PoolCatalog
from router.pool.master import MasterFigures
from tests.pool.samples import HEAD, a_pool, chain, digest, list_keys, names


def test_a_listing_fills_the_directory_of_the_model_it_names() -> None:
    pool = a_pool()
    list_keys(pool, [*names(*range(1, 31)), "another program's object", "x@12"])

    assert pool.match("tiny", chain(*range(1, 41))) == 30
    assert pool.names("tiny", digest(5)) == names(5)
    assert (pool.counters.num_objects, pool.counters.num_unknown_keys) == (32, 2)
    assert pool.match("other", chain(1)) == 0
    assert pool.names("other", digest(5)) == []


def test_nothing_is_credited_before_a_listing_has_shown_the_layout() -> None:
    pool = a_pool()
    pool.wants_listing = False
    pool.stored("tiny", chain(1, 2), replica="r1")

    assert pool.match("tiny", chain(1, 2)) == 0
    assert pool.wants_listing
    assert pool.lacks_layouts
    pool.wants_listing = False
    pool.add_replica("r2", "tiny", ("tiny",))
    assert pool.wants_listing
    list_keys(pool, names(1, 2))
    assert pool.match("tiny", chain(1, 2)) == 2
    assert not pool.lacks_layouts


def test_a_lost_pool_keeps_its_blocks_but_does_not_count() -> None:
    pool = a_pool()
    list_keys(pool, names(1, 2))
    pool.lost("cannot connect")
    assert pool.match("tiny", chain(1, 2)) == 0
    assert pool.reason == "cannot connect"
    assert pool.wants_listing

    pool.found()
    assert pool.match("tiny", chain(1, 2)) == 2


def test_a_restarted_master_has_no_blocks_and_is_listed() -> None:
    pool = a_pool()
    list_keys(pool, names(1, 2))
    pool.restarted()

    assert pool.match("tiny", chain(1, 2)) == 0
    assert pool.wants_listing
    assert pool.counters.num_restarts == 1


def test_the_name_in_a_key_decides_between_models_with_the_same_digests() -> None:
    pool = a_pool("r1", model="big")
    pool.add_replica("r2", "small", ("small",))
    keys = names(1, 2, 3, head="big@tp_rank:0") + names(1, 2, head="small@tp_rank:0")
    list_keys(pool, [*keys, *names(7, 8, head="unknown@tp_rank:0")])

    assert pool.match("big", chain(1, 2, 3)) == 3
    assert pool.match("small", chain(1, 2, 3)) == 2
    assert pool.counters.num_unclaimed == 2


def test_an_emptied_pool_keeps_the_layout() -> None:
    """Verification can name objects even if there are none at the moment."""
    pool = a_pool()
    list_keys(pool, names(1))
    list_keys(pool, [])

    assert pool.match("tiny", chain(1)) == 0
    assert pool.names("tiny", digest(1)) == names(1)


def test_a_block_counts_if_all_ranks_have_it() -> None:
    pool = a_pool()
    other = "tiny@tp_rank:1@group:0"
    list_keys(pool, names(1, 2, 3) + names(1, 3, head=other))
    assert pool.match("tiny", chain(1, 2, 3)) == 1
    assert len(pool.names("tiny", digest(1))) == 2

    list_keys(pool, names(1, 2, 3) + names(1, 2, 3, head=other))
    assert pool.match("tiny", chain(1, 2, 3)) == 3


def test_a_correction_by_the_master_wants_a_listing() -> None:
    """Evictions do not come alone."""
    pool = a_pool()
    list_keys(pool, names(1, 2, 3, 4))
    assert pool.verified("tiny", chain(1, 2), chain(9)) == 0
    assert not pool.wants_listing

    assert pool.verified("tiny", chain(5), chain(3)) == 2
    assert pool.wants_listing
    assert pool.match("tiny", chain(1, 2, 3)) == 2
    assert pool.counters.num_corrections == 2


def test_an_incomplete_listing_drops_nothing_and_is_wanted_again() -> None:
    pool = a_pool()
    list_keys(pool, names(1, 2, 3, 4))
    pool.begin_listing()
    pool.listed(names(1))
    pool.add_replica("late", "late", ())
    pool.abandon_listing()

    assert pool.wants_listing
    assert pool.match("tiny", chain(1, 2, 3, 4, 5)) == 4


def test_blocks_stored_during_a_listing_stay() -> None:
    """The master took its snapshot before."""
    pool = a_pool()
    list_keys(pool, names(1))
    pool.begin_listing()
    pool.listed(names(1, 2))
    pool.stored("tiny", chain(3), replica="r1")
    reconciling = pool.reconcile(1)
    next(reconciling)
    pool.stored("tiny", chain(4), replica="r1")
    for _ in reconciling:
        pass

    assert pool.match("tiny", chain(1, 2, 3, 4)) == 4


def test_blocks_between_two_on_disk_are_taken_to_be_on_disk() -> None:
    pool = a_pool()
    list_keys(pool, names(*range(1, 11)))
    pool.verified("tiny", chain(1, 10), (), chain(2, 5, 6, 9))
    pool.fill("tiny", chain(*range(1, 11)), [0, 1, 4, 5, 8, 9])

    assert pool.on_disk("tiny", chain(*range(1, 11))) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_block_s_size_is_the_sum_over_its_objects() -> None:
    pool = a_pool()
    pool.figures = MasterFigures(
        num_keys=3,
        allocated_bytes=300,
        capacity_bytes=None,
        num_evicted_keys=None,
        num_put_keys=None,
    )
    assert pool.bytes_per_block("tiny") is None
    list_keys(pool, names(1) + names(1, head="tiny@tp_rank:1@group:0"))

    assert pool.bytes_per_block("tiny") == 200.0


# -- replicas that differ ------------------------------------------------------------------------


def two_prefixes(**layouts: str | None) -> PoolCatalog:
    """Create a pool with objects of two deployments, and of replicas with these layouts."""
    pool = PoolCatalog()
    for replica, layout in layouts.items():
        pool.add_replica(replica, "tiny", ("tiny",), layout=layout)
    pool.found()
    list_keys(pool, names(1, 2, head=f"a@{HEAD}") + names(3, 4, head=f"b@{HEAD}"))
    return pool


def test_each_replica_is_credited_with_its_configured_layout() -> None:
    pool = two_prefixes(r1="a", r2="b")
    of_r1 = pool.directory_of("tiny", CandidateId("r1#1"))
    of_r2 = pool.directory_of("tiny", CandidateId("r2"))

    assert (of_r1, of_r2) == ("tiny@@a", "tiny@@b")
    assert pool.match("tiny@@a", chain(1, 2, 3)) == 2
    assert pool.match("tiny@@b", chain(3, 4)) == 2
    pool.stored("tiny", chain(5), replica="r2")
    assert pool.match("tiny@@b", chain(3, 4, 5)) == 3


def test_a_replica_that_several_layouts_fit_is_credited_with_none() -> None:
    pool = two_prefixes(r1="a", r2=None)

    assert pool.directory_of("tiny", CandidateId("r1")) == "tiny@@a"
    assert pool.directory_of("tiny", CandidateId("r2")) is None
    assert "several layouts fit: a@tiny@tp_rank:0" in pool.unreadable["tiny"].text
    assert not pool.unreadable["tiny"].engines_fail
    pool.stored("tiny", chain(9), replica="r2")
    assert not pool.lacks_layouts  # another listing would show the same


def test_layouts_that_share_object_names_are_not_credited() -> None:
    """An engine of TP 2 finds the first objects of a TP 4 block, and cannot read them."""
    pool = PoolCatalog()
    pool.add_replica("r1", "tiny", ("tiny",), layout="tp_rank:0-1")
    pool.add_replica("r2", "tiny", ("tiny",), layout="tp_rank:0-3")
    pool.found()
    list_keys(
        pool, [key for rank in range(4) for key in names(1, head=f"tiny@tp_rank:{rank}@group:0")]
    )

    assert set(pool.unreadable) == {"tiny@@tp_rank:0-1", "tiny@@tp_rank:0-3"}
    assert all(each.engines_fail for each in pool.unreadable.values())
    pool.remove_replica("r2")
    assert pool.directory_of("tiny", CandidateId("r1")) == "tiny@@tp_rank:0-1"


@pytest.mark.parametrize(
    ("dtypes", "is_mixed"),
    [
        (("auto", "auto"), False),
        (("auto", "bfloat16"), False),
        (("auto", None), False),
        (("auto", "fp8"), True),
        (("bfloat16", "float16"), True),
        (("fp8_e4m3", "fp8_e5m2"), True),
    ],
)
def test_replicas_with_different_kv_data_types_are_not_credited(
    dtypes: tuple[str | None, str | None], is_mixed: bool
) -> None:
    """Keys do not name the type; `auto` may be any type of 16 bits."""
    pool = a_pool()
    for replica, dtype in zip(("r1", "r2"), dtypes, strict=True):
        pool.add_replica(replica, "tiny", ("tiny",), kv_dtype=dtype)
    assert (pool.directory_of("tiny", CandidateId("r1")) is None) == is_mixed
    assert [each.about for each in pool.unreadable.values()] == ["data types"] * is_mixed

    pool.add_replica("r2", "tiny", ("tiny",), kv_dtype=dtypes[1], layout="b")
    assert pool.unreadable == {}
