"""Bailian lines: chains of blocks, links between chats."""

from __future__ import annotations

from pathlib import Path

from loadtest.traces import read_workload
from tests.loadtest.traces.samples import bailian, write


def test_blocks_are_chained_into_prefixes(tmp_path: Path) -> None:
    """The same block behind other blocks is another prefix."""
    lines = [
        bailian(1, -1, 0.0, hash_ids=[7, 8, 9]),
        bailian(2, -1, 1.0, hash_ids=[7, 8, 10]),
        bailian(3, -1, 2.0, hash_ids=[5, 8, 9]),
    ]
    first, second, third = read_workload(write(tmp_path / "t.jsonl", lines)).turns

    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert first.hash_ids[2] != second.hash_ids[2]
    assert not set(third.hash_ids) & set(first.hash_ids)


def test_chats_follow_their_parents(tmp_path: Path) -> None:
    """One session from each root; two answers to one parent both come after it."""
    lines = [
        bailian(10, -1, 61.114),
        bailian(11, -1, 62.0),
        bailian(12, 10, 80.0),
        bailian(13, 10, 90.0),
        bailian(14, 13, 99.0),
    ]
    workload = read_workload(write(tmp_path / "t.jsonl", lines))

    assert workload.block_size == 16
    assert [turn.key for turn in workload.turns] == [
        ("10", 0),
        ("11", 0),
        ("10", 1),
        ("10", 2),
        ("10", 3),
    ]
    afters = [turn.after for turn in workload.turns]
    assert afters == [(), (), (("10", 0),), (("10", 0),), (("10", 2),)]
    assert abs(workload.turns[2].arrival_s - 18.886) < 1e-9
    assert 18.0 < workload.turns[2].wait_s < 18.886
