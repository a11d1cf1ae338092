"""router.pool.keys: objects' keys of several releases, and what is none."""

from __future__ import annotations

import pytest

from router.pool.keys import KeyPattern, PatternTable

DIGEST = bytes(range(32))
HEADS = [
    "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    "team-a@tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    "org/tiny@cfg:0123456789ab@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    "tiny@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0",
    "tiny",
]


@pytest.mark.parametrize("head", HEADS)
def test_names_a_block_as_it_was_named(head: str) -> None:
    """Whatever stands in front of the digest is learned from one key and used for others."""
    table = PatternTable()
    found = table.parse(f"{head}@{DIGEST.hex()}")

    assert found is not None
    assert found.block == int(DIGEST.hex(), 16) & ((1 << 60) - 1)
    assert found.pattern.names(b"\xff" * 32) == [f"{head}@{'ff' * 32}"]
    assert found.pattern.num_ranks == 1
    assert table.patterns == [found.pattern]


@pytest.mark.parametrize("head", HEADS[:3])
def test_the_model_stands_in_front_of_the_ranks(head: str) -> None:
    """So its names are looked for there, and nowhere else."""
    found = PatternTable().parse(f"{head}@{DIGEST.hex()}")

    assert found is not None
    assert found.pattern.matches({"tiny", "org/tiny"})
    assert not found.pattern.matches({"group:0", "pcp*", "large"})


@pytest.mark.parametrize("key", ["", "x", DIGEST.hex(), "tiny@", "tiny@xyz", "tiny@abc", "a@b c"])
def test_other_objects_name_no_block(key: str) -> None:
    """They are another program's."""
    assert PatternTable().parse(key) is None


def test_ranks_share_a_pattern() -> None:
    """A block is whole when every rank's object is there."""
    table = PatternTable()
    tail = DIGEST.hex()
    found = [table.parse(f"m@tp_rank:{tp}@pp_rank:{pp}@{tail}") for tp in (0, 1) for pp in (0, 1)]
    pattern = found[0].pattern if found[0] else KeyPattern("")
    bits = [entry.bit for entry in found if entry]

    assert len(table.patterns) == 1
    assert bits == [1, 2, 4, 8]
    assert pattern.num_ranks == 4
    assert pattern.all_bits == 15
    assert pattern.is_whole(15)
    assert not pattern.is_whole(7)
    assert len(pattern.names(DIGEST)) == 4


def test_ranks_of_former_times_are_not_required() -> None:
    """Left-overs of another deployment must not make every block incomplete."""
    table = PatternTable()
    for rank, num_objects in ((0, 100), (1, 90), (7, 3)):
        for number in range(num_objects):
            found = table.parse(f"m@tp_rank:{rank}@{number:064x}")
            assert found is not None
            found.pattern.count(found.bit)
    pattern = table.patterns[0]
    pattern.infer_ranks()

    assert pattern.num_ranks == 2
    assert pattern.is_whole(3)
    pattern.begin_listing()
    pattern.infer_ranks()  # an empty pool says nothing about ranks
    assert pattern.num_ranks == 2


def test_groups_are_patterns_of_their_own() -> None:
    """KV groups have blocks of their own kind."""
    table = PatternTable()
    for group in (0, 1):
        table.parse(f"m@tp_rank:0@group:{group}@{DIGEST.hex()}")

    assert [pattern.text for pattern in table.patterns] == [
        "m@tp_rank:*@group:0",
        "m@tp_rank:*@group:1",
    ]


def test_what_others_write_cannot_fill_the_memory() -> None:
    """Beyond some thousands, new kinds of keys are not looked at."""
    table = PatternTable()
    for number in range(5000):
        table.parse(f"kind{number}@{DIGEST.hex()}")

    assert len(table.patterns) == 4096
    assert table.parse(f"kind7@{DIGEST.hex()}") is not None
