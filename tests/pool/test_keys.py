"""router.pool.keys: the keys of several releases, and keys of other programs."""

from __future__ import annotations

import pytest

from router.base.contracts import block_key
from router.pool.keys import Listing, read_head
from router.pool.layouts import Layout, find_layout

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
