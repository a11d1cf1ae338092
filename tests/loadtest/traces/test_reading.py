"""Bad lines are named, or left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.traces import WorkloadError, read_workload
from tests.loadtest.traces.samples import messages, mooncake, write

ASKED = messages("a", session_id="s")
GOOD = {"mooncake": mooncake(5000, 600, [1, 2]), "messages": ASKED}


def without(line: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != field}


BAD = [
    ("mooncake", b"{nonsense", "JSON is malformed"),
    ("mooncake", b"[1, 2]", "Expected `object`, got `array`"),
    (
        "mooncake",
        mooncake(4000, 600, [1, 2]),
        "timestamp: 4,000 ms is before the last line's 5,000",
    ),
    ("mooncake", mooncake(-1, 600, [1, 2]), "timestamp: -1.* out of range; allowed: 0 to"),
    ("mooncake", mooncake(9e13, 600, [1, 2]), "timestamp: .* more than a year after"),
    ("mooncake", mooncake("soon", 600, [1, 2]), "timestamp: Expected `float.*got `str`; allowed"),  # type: ignore[arg-type]
    (
        "mooncake",
        mooncake(5000, 0, []),
        "input_length: 0 is out of range; allowed: 1 to 16,777,216",
    ),
    ("mooncake", b'{"timestamp":1,"input_length":1' + b"0" * 5000 + b"}", ".*"),
    ("mooncake", mooncake(5000, 600, [1]), "hash_ids: 1 ids for input_length 600; allowed: 2"),
    ("mooncake", mooncake(5000, 600, [1, -2]), "hash_ids: -2 is out of range"),
    (
        "mooncake",
        mooncake(5000, 600, [1, 2], output_length=-1),
        "output_length: -1 is out of range",
    ),
    ("mooncake", mooncake(5000, 600, [1, 2], delay=-5), "delay: -5.* is out of range"),
    (
        "mooncake",
        mooncake(5000, 600, [1, 2], context_mode="x"),
        "context_mode: Invalid .*allowed: m",
    ),
    ("mooncake", mooncake(5000, 600, [1, 2], block_size=16), "block_size: 16; allowed: 512"),
    ("mooncake", without(GOOD["mooncake"], "hash_ids"), "hash_ids: missing; allowed: a list"),
    ("mooncake", without(GOOD["mooncake"], "timestamp"), "timestamp: missing; allowed: a number"),
    ("messages", {**ASKED, "messages": []}, "messages: missing or empty"),
    ("messages", {**ASKED, "messages": [{"content": "a"}]}, "messages: number 0 has no role"),
    ("messages", {**ASKED, "pre_gap": -1}, "pre_gap: -1"),
    ("messages", without(ASKED, "output_length"), "output_length: missing"),
]


@pytest.mark.parametrize(("format", "line", "problem"), BAD)
def test_a_bad_line_is_named_or_left_out(
    tmp_path: Path, format: str, line: Any, problem: str
) -> None:
    """File, line, field, what it is and what is allowed; with `skip_bad` it is only counted."""
    path = write(tmp_path / "bad.jsonl", [GOOD[format], b"", line])

    with pytest.raises(WorkloadError, match=rf"bad\.jsonl: line 3: {problem}"):
        read_workload(path)
    workload = read_workload(path, skip_bad=True)
    assert (len(workload.turns), workload.num_skipped) == (1, 1)


def test_a_bad_line_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither its time nor its name is held against the lines after it."""
    lines = [
        mooncake(1000, 600, [1, 2]),
        mooncake(8000, 600, [1]),
        mooncake(2000, 600, [1, 3]),
    ]
    workload = read_workload(write(tmp_path / "t.jsonl", lines), skip_bad=True)

    assert [turn.arrival_s for turn in workload.turns] == [0.0, 1.0]


def test_no_error_quotes_a_prompt(tmp_path: Path) -> None:
    """What people said stays in the file."""
    secret = "correct horse battery staple"
    for bad in (
        {**ASKED, "messages": [{"role": 5, "content": secret}]},
        json.dumps(messages(secret)).encode()[:-3],
    ):
        path = write(tmp_path / "bad.jsonl", [ASKED, bad])

        with pytest.raises(WorkloadError) as raised:
            read_workload(path)
        assert "correct" not in str(raised.value)


@pytest.mark.parametrize("format", GOOD)
def test_the_format_is_found_out(tmp_path: Path, format: str) -> None:
    """From the first lines, even if the very first is bad."""
    path = write(tmp_path / "t.jsonl", [b"{oops", GOOD[format]])

    assert len(read_workload(path, skip_bad=True).turns) == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"PK\x03\x04", "line 1: the format is unknown; allowed: .*num_prompt_tokens"),
        (b'{"prompt": "x"}', "line 1: the format is unknown"),
        (b'[{"messages": ', "line 1: the format is unknown"),
    ],
)
def test_files_of_no_format_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    """Empty, binary, of other fields, or cut off."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)

    with pytest.raises(WorkloadError, match=problem):
        read_workload(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """Missing, or a directory."""
    with pytest.raises(WorkloadError, match="nowhere: No such file"):
        read_workload(tmp_path / "nowhere")
    with pytest.raises(WorkloadError, match="directory"):
        read_workload(tmp_path)


def test_nothing_but_bad_lines_is_no_workload(tmp_path: Path) -> None:
    """The first of them is quoted."""
    path = write(tmp_path / "t.jsonl", [mooncake(0, 600, [1]), mooncake(0, 600, [])])

    with pytest.raises(WorkloadError, match=r"no requests, 2 bad lines, the first: .*line 1: hash"):
        read_workload(path, skip_bad=True)


def test_only_the_first_requests(tmp_path: Path) -> None:
    """As many as asked for."""
    path = write(tmp_path / "t.jsonl", [mooncake(n, 600, [0, n]) for n in range(9)])

    assert len(read_workload(path, max_requests=4).turns) == 4
    assert len(read_workload(path).turns) == 9


def test_turns_after_what_is_not_there_are_refused(tmp_path: Path) -> None:
    """Session, turn and field are named."""
    line = mooncake(0, 10, [1], session_id="a", after=[["b", 3]])

    with pytest.raises(WorkloadError, match=r"session a, turn 0: after: \['b', 3\] is unknown"):
        read_workload(write(tmp_path / "t.jsonl", [line]))


def test_windows_files_are_read(tmp_path: Path) -> None:
    """A byte order mark and CRLF do no harm."""
    path = tmp_path / "t.jsonl"
    raw = json.dumps(mooncake(0, 600, [1, 2])).encode()
    path.write_bytes(b"\xef\xbb\xbf" + raw + b"\r\n" + raw + b"\r\n")

    assert len(read_workload(path).turns) == 2
