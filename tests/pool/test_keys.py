"""router.pool.keys: objects' keys of several releases, and what is none."""

from __future__ import annotations

import pytest

from router.pool.keys import PatternTable, all_ranks
from router.pool.layouts import GroupLayout

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
    layout = GroupLayout(found.group, found.group.all_bits)
    assert layout.names(b"\xff" * 32) == [f"{head}@{'ff' * 32}"]
    assert layout.num_ranks == 1
    assert table.patterns == [found.group.pattern]


@pytest.mark.parametrize("head", HEADS[:3])
def test_the_model_stands_in_front_of_the_ranks(head: str) -> None:
    """So its names are looked for there, and nowhere else."""
    found = PatternTable().parse(f"{head}@{DIGEST.hex()}")

    assert found is not None
    pattern = found.group.pattern
    assert pattern.matches({"tiny", "org/tiny"})
    assert not pattern.matches({"group:0", "group:", "pcp", "large"})


@pytest.mark.parametrize("key", ["", "x", DIGEST.hex(), "tiny@", "tiny@xyz", "tiny@abc", "a@b c"])
def test_other_objects_name_no_block(key: str) -> None:
    """They are another program's."""
    assert PatternTable().parse(key) is None


def test_ranks_and_groups_share_a_pattern() -> None:
    """Whoever reads a listing finds the objects of one deployment together."""
    table = PatternTable()
    tail = DIGEST.hex()
    found = [
        table.parse(f"m@tp_rank:{tp}@pp_rank:{pp}@group:{group}@{tail}")
        for group in (0, 1)
        for tp in (0, 1)
        for pp in (0, 1)
    ]

    (pattern,) = table.patterns
    assert [entry.bit for entry in found if entry] == [1, 2, 4, 8] * 2
    assert sorted(pattern.groups) == [0, 1]
    assert pattern.groups[0].ranks_of(0b1010) == [(0, 1), (1, 1)]
    assert pattern.head((3, 0), 1) == "m@tp_rank:3@pp_rank:0@group:1"


def test_an_asterisk_in_a_name_is_only_that() -> None:
    """Whoever writes to the pool may call a model so."""
    table = PatternTable()
    starred = table.parse(f"m*@tp_rank:*@tp_rank:1@{DIGEST.hex()}")

    assert starred is not None
    assert starred.group.pattern.head((7,), 0) == "m*@tp_rank:*@tp_rank:7"


@pytest.mark.parametrize(
    ("namespace", "num_ranks"),
    [
        ("@store_tp:4@store_pp:2@store_format:x", 8),
        ("@store_pp:2@store_format:x", None),
        ("@store_tp:9999@store_pp:9999", None),
        ("@store_tp:0@store_pp:1", None),
        ("", None),
    ],
)
def test_a_namespace_says_how_many_there_are(namespace: str, num_ranks: int | None) -> None:
    """Where tensor parallel sizes share objects; nonsense says nothing."""
    table = PatternTable()
    table.parse(f"m{namespace}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{DIGEST.hex()}")
    found = all_ranks(table.patterns[0])

    assert (len(found) if found is not None else None) == num_ranks


def test_what_others_write_cannot_fill_the_memory() -> None:
    """Beyond some thousands, new kinds of keys are not looked at."""
    table = PatternTable()
    for number in range(5000):
        table.parse(f"kind{number}@{DIGEST.hex()}")

    assert len(table.patterns) == 4096
    assert table.parse(f"kind7@{DIGEST.hex()}") is not None
