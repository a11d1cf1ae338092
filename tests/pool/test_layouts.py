"""router.pool.layouts, on listings that vLLM's own connector made (tests/fixtures/pool).

router.pool.layouts: the keys of several releases, and keys of other programs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.contracts import BlockKey, block_key
from router.base.messages import KvGroup
from router.index.hit_length import KvLayout
from router.pool.catalog import PoolCatalog
from router.pool.layouts import Head, Layout, Listing, find_layout, read_head
from tests.effort import examples
from tests.pool.samples import a_pool, list_keys

MODEL = "Qwen3-8B"
RECORDED: dict[str, dict[str, Any]] = {
    each["name"]: each
    for each in json.loads(
        (Path(__file__).parents[1] / "fixtures/pool/listings-0.32.0.json").read_text()
    )
}
ONE_GROUP = [name for name, each in RECORDED.items() if len(each["groups"]) == 1]
TAIL = "pcp0@dcp0@pp_rank:0@group:0"


def chain_of(recorded: dict[str, Any]) -> list[BlockKey]:
    return [block_key(bytes.fromhex(digest)) for digest in recorded["chain"]]


def groups_of(recorded: dict[str, Any]) -> KvLayout | None:
    if len(recorded["groups"]) == 1:
        return None
    return KvLayout([KvGroup(*group) for group in recorded["groups"]], recorded["unit"])


def pool_without(recorded: dict[str, Any], absent: list[int]) -> PoolCatalog:
    """Create a pool whose listing lacks some of the recorded keys."""
    pool = a_pool(model=MODEL)
    list_keys(pool, [key for at, key in enumerate(recorded["keys"]) if at not in set(absent)])
    return pool


@pytest.mark.parametrize("name", RECORDED)
def test_the_pool_has_as_much_of_a_prompt_as_the_connector_finds(name: str) -> None:
    """After each save, and while objects disappear, in every KV group."""
    recorded = RECORDED[name]

    for absent, hit in zip(recorded["absent"], recorded["hits"], strict=True):
        pool = pool_without(recorded, absent)
        assert pool.match(MODEL, chain_of(recorded), groups_of(recorded)) == hit
        assert pool.match(MODEL, chain_of(recorded)) <= hit  # groups unknown: never more


@pytest.mark.parametrize("name", RECORDED)
def test_a_block_s_objects_are_those_that_the_connector_looks_up(name: str) -> None:
    """Verification asks the master for them by name, for the first KV group."""
    recorded = RECORDED[name]
    pool, digest = pool_without(recorded, []), recorded["chain"][0]

    expected = [f"{head}@{digest}" for head in recorded["looked_up"][0]]
    assert sorted(pool.names(MODEL, bytes.fromhex(digest))) == sorted(expected)


def test_events_add_nothing_for_several_groups() -> None:
    """They report full attention only, so they ask for a listing."""
    recorded = RECORDED["window first"]
    pool, chain = pool_without(recorded, recorded["absent"][0]), chain_of(recorded)
    pool.stored(MODEL, chain, replica="r1")

    assert pool.match(MODEL, chain, groups_of(recorded)) == recorded["hits"][0] == 4
    assert pool.wants_listing


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(ONE_GROUP), data=st.data())
def test_a_block_that_lacks_an_object_is_not_credited(name: str, data: st.DataObject) -> None:
    """For any part of a listing, as long as it has an object of each rank."""
    recorded = RECORDED[name]
    heads, keys = recorded["looked_up"][0], recorded["keys"]
    left = {keys[at] for at in data.draw(st.sets(st.integers(0, len(keys) - 1)))}
    pool = a_pool(model=MODEL)
    list_keys(pool, [*left, *(f"{head}@{'ab' * 32}" for head in heads)])

    whole = [all(f"{head}@{each}" in left for head in heads) for each in recorded["chain"]]
    assert pool.match(MODEL, chain_of(recorded)) == [*whole, False].index(False)


# -- what is configured --------------------------------------------------------------------------


def listed(*heads: str) -> list[Head]:
    return [read_head(head) for head in heads]


def of_ranks(num_ranks: int, start: str = "m") -> list[str]:
    return [f"{start}@tp_rank:{rank}@{TAIL}" for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("wanted", "heads"),
    [
        (None, of_ranks(4)),
        ("tp_rank:0-3", of_ranks(4)),
        ("tp_rank:0-1", of_ranks(2)),
        (f"m@tp_rank:0-1@{TAIL}", of_ranks(2)),
        ("pcp0@group:0", of_ranks(4)),
    ],
)
def test_configured_ranges_choose_the_ranks(wanted: str | None, heads: list[str]) -> None:
    found = find_layout(listed(*of_ranks(4)), {"m"}, wanted)

    assert isinstance(found, Layout)
    assert found.heads == {0: tuple(heads)}
    assert found.text == f"m@tp_rank:0-{len(heads) - 1}@{TAIL}"


@pytest.mark.parametrize("wanted", ["tp_rank:0-5", "tp_rank:3-4"])
def test_a_configured_layout_counts_only_if_the_listing_has_every_rank(wanted: str) -> None:
    assert find_layout(listed(*of_ranks(4)), {"m"}, wanted) == f"no object of {wanted} is listed"


@pytest.mark.parametrize("wanted", ["other", "tp_rank:7", "tp_rank:0-999999999", "ep_rank:0"])
def test_a_configured_layout_without_objects_is_unknown(wanted: str) -> None:
    assert find_layout(listed(*of_ranks(4)), {"m"}, wanted) is None


def test_a_prefix_may_look_like_a_rank() -> None:
    """`tp2` and `tp4` are words of two deployments, not ranks of one."""
    heads = listed(*of_ranks(2, "tp2@m"), *of_ranks(4, "tp4@m"))
    found = find_layout(heads, {"m"}, "tp2")

    assert isinstance(found, Layout)
    assert found.text == f"tp2@m@tp_rank:0-1@{TAIL}"
    several = find_layout([*heads, *listed(*of_ranks(2))], {"m"}, None)
    assert isinstance(several, str)
    assert several.startswith("several layouts fit: m@tp_rank:0-1@")


def test_a_whole_pattern_chooses_the_layout_without_a_prefix() -> None:
    heads = listed(*of_ranks(2), *of_ranks(2, "prefix@m"))
    found = find_layout(heads, {"m"}, f"m@tp_rank:0-1@{TAIL}")

    assert isinstance(found, Layout)
    assert found.text == f"m@tp_rank:0-1@{TAIL}"


@pytest.mark.parametrize(
    ("namespace", "num_ranks"),
    [
        ("@store_tp:4@store_pp:2@store_format:x", 8),
        ("@store_pp:2@store_format:x", 1),
        ("@store_tp:9999@store_pp:9999", 1),
        ("@store_tp:0@store_pp:1", 1),
    ],
)
def test_a_namespace_says_how_many_ranks_there_are(namespace: str, num_ranks: int) -> None:
    """If tensor-parallel sizes share objects; a number that cannot be is ignored."""
    found = find_layout(listed(f"m{namespace}@tp_rank:0@{TAIL}"), {"m"}, None)

    assert isinstance(found, Layout)
    assert found.num_ranks == num_ranks


def test_an_impossible_rank_costs_nothing() -> None:
    """Any client may write such a key."""
    found = find_layout(listed("m@tp_rank:999999999@group:99999"), {"m"}, None)

    assert isinstance(found, Layout)
    assert found.num_ranks == 1


DIGEST = bytes(range(32))
HEADS = [
    "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    "team-a@tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    "org/tiny@cfg:0123456789ab@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    "tiny@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0",
    "tiny",
]


@pytest.mark.parametrize("head", HEADS)
def test_a_block_is_named_as_the_listing_names_others(head: str) -> None:
    listing = Listing()
    listing.add([f"{head}@{DIGEST.hex()}"])
    layout = find_layout(listing.heads, {"tiny", "org/tiny"}, None)

    assert isinstance(layout, Layout)
    assert layout.names(b"\xff" * 32) == [f"{head}@{'ff' * 32}"]
    assert list(listing.whole([head], 10)) == [[block_key(DIGEST)]]


@pytest.mark.parametrize("key", ["", "x", DIGEST.hex(), "tiny@", "tiny@xyz", "tiny@abc", "a@b c"])
def test_a_key_of_another_program_names_no_block(key: str) -> None:
    listing = Listing()
    listing.add([key])

    assert (listing.num_objects, listing.num_unknown) == (1, 1)


def test_only_whole_blocks_are_listed_in_slices() -> None:
    heads = [f"m@tp_rank:{rank}@group:0" for rank in range(2)]
    listing = Listing()
    listing.add(f"{heads[0]}@{number:064x}" for number in range(10))
    listing.add(f"{heads[1]}@{number:064x}" for number in range(0, 10, 2))

    assert list(listing.whole(heads, 4)) == [[0, 2], [4, 6], [8]]
    assert list(listing.whole([*heads, "m@tp_rank:2@group:0"], 4)) == []
    assert listing.num_blocks_beside([]) == 10
    assert listing.num_blocks_beside(heads[:1]) == 0


def test_numbers_of_ranks_and_groups_are_not_part_of_the_pattern() -> None:
    one, other = read_head("m@tp_rank:0@pp_rank:1@group:1"), read_head("m@tp_rank:3@pp_rank:0")

    assert (one.numbers, one.group) == ((0, 1, 1), 1)
    assert (other.numbers, other.group) == ((3, 0), 0)
    assert one.pattern == read_head("m@tp_rank:7@pp_rank:7@group:7").pattern
    assert one.words == {"m"}


def test_an_asterisk_in_a_name_is_a_character() -> None:
    head = read_head("m*@tp_rank:*@tp_rank:1")

    assert head.pattern.head((7,)) == "m*@tp_rank:*@tp_rank:7"


def test_other_clients_keys_cannot_fill_the_memory() -> None:
    listing = Listing()
    listing.add(f"kind{number}@{DIGEST.hex()}" for number in range(5000))

    assert len(listing.heads) == 4096
    assert listing.num_unknown == 5000 - 4096
