"""router.pool.layouts, on listings that vLLM's own connector made (tests/fixtures/pool)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.view import CandidateId
from router.contracts import BlockKey, block_key
from router.index.hit_length import KvLayout
from router.messages import KvGroup
from router.pool.catalog import PoolCatalog
from tests.effort import examples

MODEL = "Qwen3-8B"
RECORDED: dict[str, dict[str, Any]] = {
    each["name"]: each
    for each in json.loads(
        (Path(__file__).parents[1] / "fixtures/pool/listings-0.32.0.json").read_text()
    )
}
ONE_GROUP = [name for name, each in RECORDED.items() if len(each["groups"]) == 1]


def chain_of(recorded: dict[str, Any]) -> list[BlockKey]:
    return [block_key(bytes.fromhex(digest)) for digest in recorded["chain"]]


def groups_of(recorded: dict[str, Any]) -> KvLayout | None:
    if len(recorded["groups"]) == 1:
        return None
    return KvLayout([KvGroup(*group) for group in recorded["groups"]], recorded["unit"])


def listing(pool: PoolCatalog, keys: list[str]) -> None:
    pool.begin_listing()
    pool.listed(keys)
    while pool.reconcile(7):
        pass


def a_pool() -> PoolCatalog:
    pool = PoolCatalog()
    pool.add_model(MODEL, (MODEL,))
    pool.found()
    return pool


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_pool_has_of_a_prompt_is_what_the_connector_finds(name: str) -> None:
    """After each save, and while objects go, in every KV group."""
    recorded, pool = RECORDED[name], a_pool()
    chain = chain_of(recorded)

    for absent, hit in zip(recorded["absent"], recorded["hits"], strict=True):
        gone = set(absent)
        listing(pool, [key for at, key in enumerate(recorded["keys"]) if at not in gone])
        assert pool.match(MODEL, chain, groups_of(recorded)) == hit


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in ONE_GROUP])
def test_without_knowing_the_groups_never_more_is_credited(name: str) -> None:
    """Windows and states are known from an engine's events only."""
    recorded, pool = RECORDED[name], a_pool()

    for absent, hit in zip(recorded["absent"], recorded["hits"], strict=True):
        gone = set(absent)
        listing(pool, [key for at, key in enumerate(recorded["keys"]) if at not in gone])
        assert pool.match(MODEL, chain_of(recorded)) <= hit


def test_a_replica_of_another_layout_is_found_out_as_it_stores() -> None:
    """Its first blocks ask for a listing, and as many as show fewer ranks; later ones do not."""
    one, two = RECORDED["tp1"], RECORDED["tp2"]
    pool, chain = a_pool(), chain_of(one)
    r1, r2 = CandidateId("r1"), CandidateId("r2")
    pool.stored(MODEL, chain, candidate=r1)
    listing(pool, one["keys"])

    wanted = []
    for key in chain_of(two):
        pool.stored(MODEL, [key], candidate=r2)
        wanted.append(pool.wants_listing)
        pool.wants_listing = False
    assert wanted == [number in (1, 8) for number in range(1, len(wanted) + 1)]
    pool.stored(MODEL, chain, candidate=r1)
    assert not pool.wants_listing


def test_of_several_groups_the_pool_has_what_was_listed() -> None:
    """Events tell of full attention alone: they ask for a listing, and add nothing."""
    recorded, pool = RECORDED["window first"], a_pool()
    chain = chain_of(recorded)
    gone = set(recorded["absent"][0])
    listing(pool, [key for at, key in enumerate(recorded["keys"]) if at not in gone])
    pool.stored(MODEL, chain)

    assert pool.match(MODEL, chain, groups_of(recorded)) == recorded["hits"][0] == 4
    assert pool.wants_listing


@pytest.mark.parametrize("name", RECORDED)
def test_a_block_s_objects_are_those_that_the_connector_looks_up(name: str) -> None:
    """Verification asks the master for them by name, for the first KV group."""
    recorded, pool = RECORDED[name], a_pool()
    listing(pool, recorded["keys"])
    digest = recorded["chain"][0]

    expected = [f"{head}@{digest}" for head in recorded["looked_up"][0]]
    assert sorted(pool.names(MODEL, bytes.fromhex(digest))) == sorted(expected)


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(ONE_GROUP), data=st.data())
def test_no_block_is_credited_that_lacks_an_object(name: str, data: st.DataObject) -> None:
    """Whatever a later listing still has; one object of each rank shows who there is."""
    recorded, pool = RECORDED[name], a_pool()
    listing(pool, recorded["keys"])
    keys = recorded["keys"]
    kept = data.draw(st.sets(st.integers(0, len(keys) - 1)))
    others = [f"{head}@{'ab' * 32}" for head in recorded["looked_up"][0]]
    left = {keys[at] for at in kept}
    listing(pool, [*left, *others])
    whole = [
        all(f"{head}@{digest}" in left for head in recorded["looked_up"][0])
        for digest in recorded["chain"]
    ]

    assert len(pool.names(MODEL, b"x")) == len(recorded["looked_up"][0])
    assert pool.match(MODEL, chain_of(recorded)) == [*whole, False].index(False)


def test_a_window_that_was_evicted_is_not_credited() -> None:
    """What full attention has of a prompt does not help where the window's blocks are gone."""
    recorded, pool = RECORDED["window"], a_pool()
    gone = set(recorded["absent"][1])
    listing(pool, [key for at, key in enumerate(recorded["keys"]) if at not in gone])

    assert recorded["hits"][1] == 4
    assert pool.directory(MODEL).match(chain_of(recorded)) == 8
    assert pool.match(MODEL, chain_of(recorded)) <= 4


# -- several layouts of a model ------------------------------------------------------------------

TWO, FOUR = CandidateId("two"), CandidateId("four")


def both() -> list[str]:
    """List the blocks of a TP 2 deployment, and those of a TP 4 one under a prefix of its own.

    Both have the same prompts, and each a block that the other has not.
    """
    two, four = RECORDED["tp2"], RECORDED["tp4"]
    return [
        *two["keys"],
        *(f"{head}@{'22' * 32}" for head in two["looked_up"][0]),
        *(f"four@{key}" for key in four["keys"]),
        *(f"four@{head}@{'44' * 32}" for head in four["looked_up"][0]),
    ]


def store_own(pool: PoolCatalog) -> None:
    """Have each deployment's replica report what it stored."""
    for candidate, name, own in ((TWO, "tp2", b"\x22"), (FOUR, "tp4", b"\x44")):
        pool.stored(MODEL, chain_of(RECORDED[name]), candidate=candidate)
        pool.stored(MODEL, [block_key(own * 32)], candidate=candidate)


def test_two_deployments_are_kept_apart() -> None:
    """Each replica reads what is cut as its own blocks are; one that is not known reads nothing."""
    pool = a_pool()
    chains = {name: chain_of(RECORDED[name]) for name in ("tp2", "tp4")}
    store_own(pool)
    listing(pool, both())
    of_two, of_four = pool.directory_of(MODEL, TWO), pool.directory_of(MODEL, FOUR)

    assert of_two is not None
    assert of_four is not None
    assert (pool.match(of_two, chains["tp2"]), pool.match(of_four, chains["tp4"])) == (12, 12)
    assert (len(pool.names(of_two, b"x")), len(pool.names(of_four, b"x"))) == (2, 4)
    assert pool.directory_of(MODEL, CandidateId("third")) is None
    assert pool.match(MODEL, chains["tp2"]) == 0
    assert pool.clashing == ()


def test_a_prefix_may_be_called_as_a_rank_is() -> None:
    """`tp2` and `tp4` are two deployments' words, not the ranks of one."""
    pool = a_pool()
    pool.stored(MODEL, chain_of(RECORDED["tp2"]), candidate=TWO)
    pool.stored(MODEL, [block_key(b"\x44" * 32)], candidate=FOUR)
    keys = [f"tp2@{key}" for key in RECORDED["tp2"]["keys"]]
    keys += [f"tp4@{head}@{'44' * 32}" for head in RECORDED["tp4"]["looked_up"][0]]
    listing(pool, keys)
    of_two = pool.directory_of(MODEL, TWO)

    assert of_two is not None
    assert of_two.startswith(f"{MODEL}@@tp2@")
    assert pool.match(of_two, chain_of(RECORDED["tp2"])) == 12
    assert pool.directory_of(MODEL, FOUR) != of_two


def test_the_configuration_says_which_layout_a_replica_has() -> None:
    """Some fields of its name are enough; one that nothing has credits nothing."""
    pool = a_pool()
    pool.add_model(MODEL, (MODEL,), replica="two", layout="tp_rank:0-1")
    pool.add_model(MODEL, (MODEL,), replica="five", layout="tp_rank:0-4")
    listing(pool, RECORDED["tp2"]["keys"])
    name = pool.directory_of(MODEL, CandidateId("two#1"))

    assert name is not None
    assert pool.match(name, chain_of(RECORDED["tp2"])) == 12
    assert pool.directory_of(MODEL, CandidateId("five")) is None


def test_sizes_that_share_names_are_told_apart_by_their_blocks() -> None:
    """Without a prefix TP 2 finds the first objects of a TP 4 block, and cannot read them."""
    pool = a_pool()
    own = [block_key(bytes([at]) * 32) for at in range(1, 11)]
    other = [block_key(bytes([at]) * 32) for at in range(21, 31)]
    head = "Qwen3-8B@tp_rank:{}@pcp0@dcp0@pp_rank:0@group:0@{}"
    keys = [head.format(t, bytes([at]).hex() * 32) for at in range(1, 11) for t in range(2)]
    keys += [head.format(t, bytes([at]).hex() * 32) for at in range(21, 31) for t in range(4)]
    for at in range(10):
        pool.stored(MODEL, [own[at]], candidate=TWO)
        pool.stored(MODEL, [other[at]], candidate=FOUR)
    listing(pool, keys)
    of_two, of_four = pool.directory_of(MODEL, TWO), pool.directory_of(MODEL, FOUR)

    assert of_two is not None
    assert of_four is not None
    assert (pool.match(of_two, own), pool.match(of_two, other)) == (10, 0)
    assert (pool.match(of_four, own), pool.match(of_four, other)) == (0, 10)
    tail = "pcp0@dcp0@pp_rank:0@group:0"
    assert pool.clashing == (f"{MODEL}@tp_rank:0-1@{tail}", f"{MODEL}@tp_rank:0-3@{tail}")


def test_a_deployment_that_ends_leaves_the_other_s_name() -> None:
    """When its replica is another process, and its objects are gone, the model has one layout."""
    pool = a_pool()
    store_own(pool)
    listing(pool, both())
    pool.forget(FOUR)
    listing(pool, RECORDED["tp2"]["keys"])

    assert pool.directory_of(MODEL, FOUR) == pool.directory_of(MODEL, TWO) == MODEL
    assert pool.match(MODEL, chain_of(RECORDED["tp2"])) == 12
    assert sum(map(len, pool.directories.values())) == len(pool.directory(MODEL))


@pytest.mark.parametrize(
    "key", ["m@tp_rank:999999999@pcp0@dcp0@pp_rank:0@group:0", "m@tp_rank:0@pp_rank:7@group:99999"]
)
def test_a_rank_that_cannot_be_costs_nothing(key: str) -> None:
    """Any client may write such a key."""
    pool = PoolCatalog()
    pool.add_model("m", ("m",))
    pool.found()
    listing(pool, [f"{key}@{'ab' * 32}"])

    assert len(pool.names("m", b"x")) == 1
