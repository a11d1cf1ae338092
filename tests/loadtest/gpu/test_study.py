"""The GPU study in front of emulated replicas: its order, and what an early end leaves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from loadtest.dev.gpu.run import REHEARSAL
from loadtest.dev.gpu.run_replicas import GpuReplica, ReplicaDied
from loadtest.dev.gpu.run_setting import Setting
from loadtest.dev.gpu.run_study import Study

pytestmark = pytest.mark.timeout(400)  # a busy machine starts routers slowly
SETTING = replace(
    REHEARSAL,
    num_context_tokens=1_500,
    num_cache_tokens=8_000,
    working_sets=(0.5,),
    arms=("session_hash", "kv_aware"),
    think_s=0.1,
    prefill_lengths=(500,),
    hand_over_lengths=(),
    num_repeats=2,
)


class Emulated(GpuReplica):
    """An emulated replica in the place of a vLLM."""

    def __init__(self, name: str, log_dir: Path, setting: Setting) -> None:
        super().__init__(name, log_dir, python=Path(sys.executable), num_blocks=setting.num_blocks)
        port, events, replay = (
            str(urlsplit(url).port)
            for url in (self.url, self.events_endpoint, self.replay_endpoint)
        )
        self._command = [
            sys.executable, "-m", "loadtest.emulator", "--preset", "instant", "--port", port,
            "--events-port", events, "--replay-port", replay, "--block-size", "32",
            "--num-gpu-blocks", str(setting.num_blocks), "--hash-seed", "0",
        ]  # fmt: skip


class Kept:
    """What a study handed over; it may kill a replica when a run of a variant begins."""

    def __init__(self, setting: Setting, log_dir: Path, kill_at: str | None = None) -> None:
        self.found: dict[str, list[Any]] = {"runs": [], "prefills": [], "notes": []}
        self.engines = [Emulated(name, log_dir, setting) for name in ("r1", "r2")]
        self.study = Study(setting, self.engines, log_dir, self._keep, self._say)
        self._kill_at = kill_at

    def _keep(self, **found: tuple[Any, ...]) -> None:
        for name, values in found.items():
            self.found[name] += values

    def _say(self, text: str) -> None:
        if self._kill_at is not None and text.endswith("sessions") and self._kill_at in text:
            os.killpg(self.engines[1].pid, signal.SIGKILL)


def test_rounds_alternate_and_an_early_end_leaves_what_was_measured(tmp_path: Path) -> None:
    """The second round is in reverse order; one line names the run that a replica ended in."""
    kept = Kept(replace(SETTING, num_rounds=2), tmp_path, kill_at="seed 102: kv_aware")

    with pytest.raises(ReplicaDied, match=r"r2 ended: .*seed 102: kv_aware") as died:
        kept.study.run()

    assert "\n" not in str(died.value)
    runs = kept.found["runs"]
    assert [run.arm for run in runs] == ["session_hash", "kv_aware"]
    assert len({(run.seed, run.num_prompt_tokens) for run in runs}) == 1
    assert [run.num_errors for run in runs] == [0, 0]
    assert all(run.num_exact > 0.9 * run.num_predicted > 0 for run in runs)
    (prefill,) = kept.found["prefills"]
    assert len(prefill.measured_ms) == len(prefill.predicted_ms) == 2
    assert kept.found["notes"] == []
