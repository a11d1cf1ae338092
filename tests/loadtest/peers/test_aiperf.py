"""What AIPerf's files come to; tests/engines/test_5_aiperf.py runs AIPerf itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from loadtest.dev.peers.aiperf import (
    BLOCK_SIZE,
    MOONCAKE,
    as_traces,
    lay_out,
    profile_words,
    run_of,
)
from tests.docs_blocks import MODEL, ROOT, ROUTER_PORT, blocks


def record(session: str, start_s: float, took_s: float, **fields: Any) -> str:
    values = {
        "time_to_first_token": 500.0,
        "usage_prompt_tokens": 1_000,
        "usage_prompt_cache_read_tokens": 960,
    }
    return json.dumps(
        {
            "metadata": {
                "x_correlation_id": session,
                "request_start_ns": round(start_s * 1e9),
                "request_end_ns": round((start_s + took_s) * 1e9),
            },
            "metrics": {name: {"value": value, "unit": ""} for name, value in values.items()},
            "error": None,
            **fields,
        }
    )


def written(folder: Path, records: list[str], summary: dict[str, Any]) -> Path:
    (folder / "profile_export.jsonl").write_text("\n".join(records) + "\n")
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    return folder


def test_a_run_is_summed_up_by_its_records(tmp_path: Path) -> None:
    """A session lasts from its first request to its last answer; a failed request is counted."""
    records = [
        record("a", 0.0, 1.0),
        record("b", 0.0, 2.0),
        record("a", 5.0, 1.0),
        record("c", 0.0, 1.0, metrics={}, error={"code": 500}),
    ]
    summary = {"theoretical_prefix_cache_hit": {"unit": "%", "avg": 97.5}}

    found = run_of(written(tmp_path, records, summary), "x", 5)

    assert (found.num_requests, found.num_errors) == (4, 1)
    assert (found.num_prompt_tokens, found.num_cached_tokens) == (3_000, 2_880)
    assert (found.cached, found.theoretical) == (0.96, 0.975)
    assert (found.ttft_mean_s, found.ttft_p99_s) == (0.5, 0.5)
    assert (found.sessions.mean_s, found.sessions.longest_s) == (4.0, 6.0)


def test_only_some_formats_have_a_theoretical_figure(tmp_path: Path) -> None:
    """Sessions as AIPerf makes them have none."""
    assert run_of(written(tmp_path, [record("a", 0.0, 1.0)], {}), "x", 5).theoretical is None


def test_a_row_has_the_tokens_of_all_seeds(tmp_path: Path) -> None:
    """Times stand seed by seed, because they differ much."""
    out = written(tmp_path, [record("a", 0.0, 1.0)], {})

    row = lay_out([run_of(out, "x", 6), run_of(out, "x", 5)]).splitlines()[-1]

    assert row == "| x | 2, 0 | 80 | 96.0% | 0.50, 0.5 s; 0.50, 0.5 s | 1.0, 1 s |"


@pytest.mark.parametrize(("new", "num_blocks"), [(BLOCK_SIZE, 2), (BLOCK_SIZE + 1, 3)])
def test_a_trace_has_the_history_in_each_prompt(tmp_path: Path, new: int, num_blocks: int) -> None:
    """With the answers, in whole blocks; a wait is in seconds."""
    rows = [
        {"session_id": "s", "input_length": 40, "output_length": 0, "hash_ids": [1]},
        {"session_id": "s", "input_length": new, "output_length": 9, "hash_ids": [], "delay": 500},
    ]
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text("\n".join(map(json.dumps, rows)))

    [path] = as_traces(dataset, tmp_path).iterdir()
    first, second = json.loads(path.read_text())["requests"]

    assert (first["in"], first["hash_ids"]) == (BLOCK_SIZE, [0])
    assert second["hash_ids"] == list(range(num_blocks))
    assert (second["in"], second["out"]) == (num_blocks * BLOCK_SIZE, 9)
    assert second["think_time"] == 0.5


def test_the_page_has_the_command_that_is_run_here() -> None:
    """With the defaults of AIPerf's own sessions: their blocks have 512 tokens."""
    page = (ROOT / "docs/evaluate/aiperf.md").read_text()
    [code] = [b.code.replace("\\\n", "") for b in blocks(page) if " profile " in b.code]
    url, dataset = f"http://127.0.0.1:{ROUTER_PORT}", Path("sessions/*/dataset.jsonl")

    ours = profile_words(url, dataset, MOONCAKE, 40)

    exchanged = {"tiny": MODEL, str(BLOCK_SIZE): "512"}
    assert shlex.split(code)[1:] == [exchanged.get(word, word) for word in ours]
