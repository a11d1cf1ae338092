"""Decision records as a trace: sessions that continue, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.traces import WorkloadError, read_workload
from tests.loadtest.traces.samples import write
from tests.samples import decision_record


def record(at: float, session_hash: int | None, num_prompt_tokens: int, **fields: Any) -> Any:
    return {
        "at": at,
        "total_ms": 1000.0,
        "model": "m",
        "snapshot": {"request": {"session_hash": session_hash, "num_tokens": 1}},
        "status": 200,
        "num_prompt_tokens": num_prompt_tokens,
        "num_completion_tokens": 10,
        "num_reported_cached_tokens": 0,
        **fields,
    }


def test_a_session_continues_its_last_prompt(tmp_path: Path) -> None:
    """Whole blocks of a prompt are the next one's beginning; its partial block is not."""
    lines = [record(101.0, 7, 1100), record(105.0, 7, 2000)]

    first, second = read_workload(write(tmp_path / "d.jsonl", lines)).turns

    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert first.hash_ids[2] != second.hash_ids[2]
    assert len(second.hash_ids) == 4
    assert (second.after, second.wait_s) == ((first.key,), pytest.approx(3.0))
    assert (first.arrival_s, second.arrival_s) == (0.0, pytest.approx(4.0))
    assert second.num_output_tokens == 10


def test_a_shorter_prompt_is_a_rewritten_conversation(tmp_path: Path) -> None:
    """Only the beginning that is shared with other sessions stays."""
    lines = [
        record(101.0, 7, 2000, num_reported_cached_tokens=600),
        record(105.0, 7, 1500, num_reported_cached_tokens=1500),
    ]

    first, second = read_workload(write(tmp_path / "d.jsonl", lines)).turns

    assert first.hash_ids[0] == second.hash_ids[0]
    assert not set(first.hash_ids[1:]) & set(second.hash_ids[1:])


def test_sessions_of_a_model_share_what_their_first_turns_found_cached(tmp_path: Path) -> None:
    """The longer of two shared beginnings contains the shorter; another model shares nothing."""
    lines = [
        record(101.0, 1, 2000),
        record(102.0, 2, 2000, num_reported_cached_tokens=1100),
        record(103.0, 3, 2000, num_reported_cached_tokens=600),
        record(104.0, 4, 2000, num_reported_cached_tokens=1100, model="other"),
    ]

    one, two, three, other = (
        turn.hash_ids for turn in read_workload(write(tmp_path / "d.jsonl", lines)).turns
    )

    assert two[0] == three[0]
    assert len(set(two) & set(three)) == 1
    assert not set(one) & set(two)
    assert not set(other) & set(two)


def test_turns_come_in_order_of_arrival(tmp_path: Path) -> None:
    """Records are written when requests end, so a long request may come after a later one."""
    lines = [record(110.0, 2, 600), record(120.0, 1, 600, total_ms=15_000.0)]

    workload = read_workload(write(tmp_path / "d.jsonl", lines))

    assert [turn.session_id for turn in workload.turns] == ["m 1", "m 2"]
    assert workload.span_s == pytest.approx(4.0)


def test_a_request_without_a_session_stands_alone(tmp_path: Path) -> None:
    """Two of them have no block in common."""
    lines = [record(101.0, None, 600), record(102.0, None, 600)]

    one, two = read_workload(write(tmp_path / "d.jsonl", lines)).turns

    assert one.session_id != two.session_id
    assert not set(one.hash_ids) & set(two.hash_ids)


def test_failed_and_unread_requests_are_left_out(tmp_path: Path) -> None:
    """What was refused, and what has no known tokens, is no traffic to place."""
    lines = [record(101.0, 1, 600, status=503), record(102.0, 1, 0), record(103.0, 1, 600)]

    assert len(read_workload(write(tmp_path / "d.jsonl", lines)).turns) == 1


def test_a_routers_own_record_is_read(tmp_path: Path) -> None:
    """The format is detected, and every field has the router's name."""
    path = tmp_path / "d.jsonl"
    path.write_bytes(msgspec.json.encode(decision_record()) + b"\n")

    assert len(read_workload(path).turns) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_prompt_tokens": "many"}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 1 << 40}, "input_length"),
        ({"at": -1.0}, "at"),
        ({"snapshot": 3}, "snapshot"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """With the line and what is allowed."""
    path = write(tmp_path / "d.jsonl", [record(101.0, 1, 600), record(102.0, 1, 600) | fields])

    with pytest.raises(WorkloadError, match=rf"line 2: {problem}.*allowed"):
        read_workload(path)
