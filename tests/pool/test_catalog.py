"""router.pool.catalog: whose objects are whose, from events, listings, streams, answers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from policies.view import CandidateId
from router.contracts import BlockKey, block_key
from router.pool.catalog import PoolCatalog


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int) -> BlockKey:
    return block_key(digest(number))


def chain(*numbers: int) -> list[BlockKey]:
    return [block(number) for number in numbers]


def name(number: int, *, head: str = "tiny@tp_rank:0@group:0") -> str:
    return f"{head}@{digest(number).hex()}"


def names(numbers: Iterable[int], *, head: str = "tiny@tp_rank:0@group:0") -> list[str]:
    return [name(number, head=head) for number in numbers]


def listing(pool: PoolCatalog, keys: Iterable[str]) -> None:
    pool.begin_listing()
    pool.listed(keys)
    while pool.reconcile(7):
        pass


def a_pool(*models: str) -> PoolCatalog:
    pool = PoolCatalog()
    for model in models or ("tiny",):
        pool.add_model(model, (model, ""))
    pool.found()
    return pool


def test_a_listing_fills_the_directory_of_the_model_it_names() -> None:
    """Also before any engine or prompt has said a word."""
    pool = a_pool()
    listing(pool, [*names(range(1, 31)), "another program's object", "x@12"])

    assert pool.match("tiny", chain(*range(1, 41))) == 30
    assert pool.names("tiny", digest(5)) == [name(5)]
    assert pool.counters.num_objects == 32
    assert pool.counters.num_unknown_keys == 2
    assert pool.match("other", chain(1)) == 0
    assert pool.names("other", digest(5)) == []


def test_a_pool_that_is_lost_is_not_counted_on() -> None:
    """What is known of it stays, for it may come back as it was."""
    pool = a_pool()
    listing(pool, names(range(1, 5)))
    pool.lost("cannot connect")
    assert pool.match("tiny", chain(1, 2)) == 0
    assert pool.reason == "cannot connect"
    assert pool.wants_listing

    pool.found()
    assert pool.match("tiny", chain(1, 2)) == 2


def test_a_restarted_master_has_nothing() -> None:
    """And has to be listed."""
    pool = a_pool()
    listing(pool, [*names(range(1, 5)), *names((8,), head="b@tp_rank:0")])
    pool.restarted()

    assert pool.match("tiny", chain(1, 2)) == 0
    assert pool.wants_listing
    assert pool.counters.num_restarts == 1


def test_digests_show_whose_objects_they_are() -> None:
    """Where the model's name is another: what an engine stored is found in the listing."""
    pool = a_pool("served")
    pool.stored("served", chain(1, 2))
    assert pool.wants_listing
    listing(pool, [*names((1, 2, 3), head="dir@tp_rank:0"), *names((8, 9), head="b@tp_rank:0")])

    assert pool.match("served", chain(1, 2, 3, 8)) == 3
    assert pool.counters.num_unclaimed == 2
    assert pool.layouts["served"].text == "dir@tp_rank:0"


def test_a_prompt_shows_whose_objects_they_are() -> None:
    """Its blocks' names are found among the unclaimed objects; the next listing counts."""
    pool = a_pool("served")
    listing(pool, names((1, 2, 3), head="dir@tp_rank:0"))
    assert pool.match("served", chain(1, 2)) == 0
    assert not pool.wants_listing

    pool.named("served", chain(7, 8))
    assert not pool.wants_listing
    pool.named("served", chain(1, 2))
    assert pool.wants_listing
    listing(pool, names((1, 2, 3), head="dir@tp_rank:0"))
    assert pool.match("served", chain(1, 2)) == 2


def test_a_name_decides_between_models_with_the_same_digests() -> None:
    """Two models with one tokenizer hash alike."""
    pool = a_pool("big", "small")
    pool.named("big", chain(1, 2))
    pool.named("small", chain(1, 2))
    listing(pool, [*names((1, 2, 3), head="big@tp_rank:0"), *names((1, 2), head="small@tp_rank:0")])

    assert pool.match("big", chain(1, 2, 3)) == 3
    assert pool.match("small", chain(1, 2, 3)) == 2


def test_two_deployments_of_a_name_are_distinguished_by_what_is_stored() -> None:
    """Until then neither is taken: a wrong one would credit blocks that no engine can read."""
    pool = a_pool()
    both = [*names((1, 2), head="a@tiny@tp_rank:0"), *names((3, 4), head="b@tiny@tp_rank:0")]
    listing(pool, both)
    assert pool.match("tiny", chain(1)) == pool.match("tiny", chain(3)) == 0

    pool.stored("tiny", chain(3))
    listing(pool, both)
    assert pool.match("tiny", chain(3, 4)) == 2
    assert pool.match("tiny", chain(1)) == 0


def test_a_new_deployment_takes_over() -> None:
    """When what is stored now has other keys than before."""
    pool = a_pool()
    listing(pool, names((1, 2), head="tiny@cfg:a@tp_rank:0"))
    pool.stored("tiny", chain(7))
    listing(
        pool,
        [*names((1, 2), head="tiny@cfg:a@tp_rank:0"), *names((7, 8), head="tiny@cfg:b@tp_rank:0")],
    )

    assert pool.names("tiny", digest(1)) == [name(1, head="tiny@cfg:b@tp_rank:0")]
    assert pool.match("tiny", chain(7, 8)) == 2


def test_an_emptied_pool_leaves_the_pattern_known() -> None:
    """Verification can name keys even if there is none at the moment."""
    pool = a_pool()
    listing(pool, names((1,)))
    listing(pool, [])

    assert pool.match("tiny", chain(1)) == 0
    assert pool.names("tiny", digest(1)) == [name(1)]


def test_a_block_counts_when_all_ranks_have_it() -> None:
    """In a listing, and when the missing rank's object comes or one goes later."""
    pool = a_pool()
    heads = ["tiny@tp_rank:0@group:0", "tiny@tp_rank:1@group:0"]
    listing(pool, [*names((1, 2, 3), head=heads[0]), *names((1, 3), head=heads[1])])
    assert pool.match("tiny", chain(1, 2, 3)) == 1

    pool.object_stored(name(2, head=heads[1]))
    assert pool.match("tiny", chain(1, 2, 3)) == 3
    pool.object_removed(name(3, head=heads[0]))
    assert pool.match("tiny", chain(1, 2, 3)) == 2
    pool.object_removed(name(3, head=heads[0]))
    pool.object_removed(name(3, head=heads[1]))
    pool.object_stored(name(3, head=heads[1]))
    assert pool.match("tiny", chain(1, 2, 3)) == 2
    pool.object_stored(name(3, head=heads[0]))
    assert pool.match("tiny", chain(1, 2, 3)) == 3
    assert len(pool.names("tiny", digest(1))) == 2


def test_the_stream_speaks_of_everybody_s_objects() -> None:
    """Unknown kinds are a reason to list once, not for ever; no kind at all is counted only."""
    pool = a_pool()
    listing(pool, names((1,)))
    pool.object_stored(name(1))  # known already
    pool.object_stored("junk")
    pool.object_removed("junk")
    pool.object_removed(name(9))
    assert not pool.wants_listing

    pool.object_stored(name(1, head="new@tp_rank:0"))
    assert pool.wants_listing
    listing(pool, names((1,), head="new@tp_rank:0"))
    pool.object_stored(name(2, head="new@tp_rank:0"))
    assert not pool.wants_listing
    assert pool.counters.num_events == 6


def test_a_wrong_verification_corrects_and_wants_a_listing() -> None:
    """What the master said now is known; evictions do not come alone."""
    pool = a_pool()
    listing(pool, names(range(1, 5)))
    assert pool.verified("tiny", chain(1, 2), chain(9)) == 0
    assert not pool.wants_listing

    assert pool.verified("tiny", chain(5), chain(3)) == 2
    assert pool.wants_listing
    assert pool.match("tiny", chain(1, 2, 3)) == 2
    assert pool.counters.num_corrections == 2


def test_a_listing_that_breaks_off_is_wanted_again() -> None:
    """Nothing is dropped for what it did not get to; new models are part of the next."""
    pool = a_pool()
    listing(pool, names(range(1, 5)))
    pool.begin_listing()
    pool.listed(names((1,)))
    pool.add_model("late", ())
    pool.abandon_listing()

    assert pool.wants_listing
    assert pool.match("tiny", chain(1, 2, 3, 4, 5)) == 4


def test_stores_during_a_listing_stay() -> None:
    """The master's picture was taken before."""
    pool = a_pool()
    pool.begin_listing()
    pool.listed(names((1, 2)))
    pool.stored("tiny", chain(3))
    assert pool.reconcile(1)
    pool.stored("tiny", chain(4))
    while pool.reconcile(1):
        pass

    assert pool.match("tiny", chain(1, 2, 3, 4)) == 4


def test_evidence_is_bounded() -> None:
    """The last few thousand blocks' names are enough to know a model by."""
    pool = a_pool()
    for number in range(5000):
        pool.stored("tiny", chain(number))

    assert len(pool._evidence._blocks["tiny"]) == 4096


def test_a_block_s_size_is_that_of_its_objects() -> None:
    """One per rank; unknown until the master and a listing have said it."""
    pool = a_pool()
    assert pool.bytes_per_block("tiny") is None
    pool.bytes_per_object = 100.0
    assert pool.bytes_per_block("tiny") is None
    listing(pool, [name(1, head="tiny@tp_rank:0"), name(1, head="tiny@tp_rank:1")])

    assert pool.bytes_per_block("tiny") == 200.0


@pytest.mark.parametrize(
    ("dtypes", "mixed"),
    [
        (("auto", "auto"), ()),
        (("auto", "bfloat16"), ()),
        (("auto", None), ()),
        (("auto", "fp8"), ("auto", "fp8")),
        (("bfloat16", "float16"), ("bfloat16", "float16")),
        (("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3", "fp8_e5m2")),
    ],
)
def test_replicas_whose_kv_differs_in_type_are_noticed(
    dtypes: tuple[str | None, str | None], mixed: tuple[str, ...]
) -> None:
    """Keys do not name it; `auto` may be any type of 16 bits."""
    pool = a_pool()
    for replica, dtype in zip(("r1", "r2"), dtypes, strict=True):
        pool.add_model("tiny", ("tiny",), replica=replica, kv_dtype=dtype)

    assert pool.mixed.get("tiny", ()) == tuple(sorted(mixed))

    pool.remove_replica("r2")
    assert pool.mixed == {}


def test_replicas_of_other_prefixes_may_differ_in_the_type_of_their_kv() -> None:
    """Each finds its own objects alone, as soon as it has stored some."""
    pool = a_pool()
    heads = {"r1": "one@tiny@tp_rank:0@group:0", "r2": "two@tiny@tp_rank:0@group:0"}
    for replica, dtype in zip(heads, ("auto", "fp8"), strict=True):
        pool.add_model("tiny", ("tiny",), replica=replica, kv_dtype=dtype)
    assert pool.mixed == {"tiny": ("auto", "fp8")}

    for at, replica in enumerate(heads):
        numbers = range(100 * at + 1, 100 * at + 31)
        pool.stored("tiny", chain(*numbers), candidate=CandidateId(replica))
    listing(
        pool,
        [
            *names(range(1, 31), head=heads["r1"]),
            *names(range(101, 131), head=heads["r2"]),
        ],
    )

    assert pool.mixed == {}
    assert pool.directory_of("tiny", CandidateId("r1")) != pool.directory_of(
        "tiny", CandidateId("r2")
    )
