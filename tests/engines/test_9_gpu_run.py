"""The rehearsal of the GPU study on two CPU engines: its files, and what a lost replica leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from loadtest.dev.gpu.__main__ import main
from loadtest.dev.gpu.run import REHEARSAL
from loadtest.dev.gpu.run_record import Found
from loadtest.dev.gpu.run_replicas import ReplicaDied, make_replicas
from loadtest.dev.gpu.run_study import Study
from tests.engines.harness import engine_python

SHORT = {
    "--context": "1500",
    "--cache-tokens": "8000",
    "--working-set": "0.8",
    "--think": "0.2",
    "--prefill": "500",
    "--hand-over": "2000",
    "--repeats": "2",
    "--minutes": "5",
}


@pytest.mark.timeout(500)
def test_a_rehearsal_ends_with_a_page(tmp_path: Path) -> None:
    """Two variants get the same sessions; everything that the page has was measured."""
    words = [word for pair in SHORT.items() for word in pair]
    arms = ["session_hash", "kv_aware"]

    status = main(["run", "--rehearse", "--out", str(tmp_path), "--arms", *arms, *words])

    found = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=Found)
    assert (status, found.notes) == (0, ())
    assert [run.arm for run in found.runs] == arms
    assert len({(run.num_turns, run.num_prompt_tokens) for run in found.runs}) == 1
    assert [run.num_errors for run in found.runs] == [0, 0]
    assert all(run.num_exact > 0.8 * run.num_predicted > 0 for run in found.runs)
    assert all(run.num_computed_tokens >= run.num_ideal_tokens for run in found.runs)
    (prefill,), (hand_over,) = found.prefills, found.hand_overs
    assert prefill.num_tokens > 400
    assert min(*prefill.measured_ms, *prefill.predicted_ms) > 0
    assert hand_over.num_handed == len(hand_over.on_ms) == len(hand_over.off_ms) == 2
    page = (tmp_path / "gpu.md").read_text()
    assert "| kv_aware | " in page
    assert "rehearsal" in page
    assert "<table" in (tmp_path / "gpu.html").read_text()


@pytest.mark.timeout(500)
def test_a_replica_that_dies_midway_leaves_what_was_measured(tmp_path: Path) -> None:
    """The first run is kept; one line names the replica and the run."""
    setting = msgspec.structs.replace(
        REHEARSAL,
        num_context_tokens=1_500,
        num_cache_tokens=8_000,
        working_sets=(0.8,),
        arms=("session_hash", "round_robin"),
        think_s=0.2,
        hand_over_lengths=(),
        prefill_lengths=(),
    )
    kept: list[str] = []

    def keep(**found: tuple[object, ...]) -> None:
        kept.extend(found)

    def say(text: str) -> None:
        if text.endswith("sessions") and "round_robin" in text:
            os.killpg(engines[1].pid, signal.SIGKILL)

    engines = make_replicas(setting, engine_python(), tmp_path, ())
    study = Study(setting, engines, tmp_path, keep, say)
    with pytest.raises(ReplicaDied, match=r"r2 ended: .*round_robin") as died:
        study.run()

    assert "\n" not in str(died.value)
    assert "runs" in kept
