from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.studies import predictions
from loadtest.studies.predictions import LAGS, PredictionRun, main, report

RUN = PredictionRun(
    window=1,
    lag=LAGS[0].name,
    seed=1,
    num_turns=1_000,
    num_right_now=900,
    num_right_then=981,
    num_computed_tokens=4_000_000,
    ttft_mean_s=6.0,
    goodput=0.3,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sessions, short ones, still more than the caches hold."""
    monkeypatch.setattr(predictions, "NUM_SESSIONS", 16)
    monkeypatch.setattr(predictions, "NUM_TURNS", 3)
    monkeypatch.setattr(predictions, "NUM_BLOCKS", 100)
    monkeypatch.setattr(predictions, "LAGS", LAGS[:1])


def test_a_row_for_each_prediction_and_a_share_for_each_draw() -> None:
    """What a stopped run has not come to stays empty."""
    runs = [
        RUN,
        replace(RUN, seed=2, num_turns=500, num_right_now=400, num_right_then=499),
        replace(RUN, window=None, lag=LAGS[2].name),
    ]

    found = report(runs)

    assert "1,000 (seed 1), 500 (seed 2)." in found
    assert "| 1 (default) | now | 90.0%, 80.0% |  |  |" in found
    assert "| 1 (default) | then | 98.1%, 99.8% |  |  |" in found
    assert "| queue off | now |  |  | 90.0% |" in found


@pytest.mark.usefixtures("small")
def test_the_command_prints_the_table_and_writes_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Foreseeing what those in front evict is right more often where engines have queues."""
    file = tmp_path / "runs.json"

    assert main(["--seeds", "3", "3", "--json", str(file)]) == 0

    runs = msgspec.json.decode(file.read_bytes(), type=list[PredictionRun])
    assert [one.window for one in runs] == [0, 1, None]  # a draw that is named twice is run once
    assert capsys.readouterr().out == report(runs) + "\n"
    assert all(one.num_turns == runs[0].num_turns > 0 for one in runs)
    assert all(0 < one.num_right_now <= one.num_turns for one in runs)
    assert runs[2].num_right_then > runs[2].num_right_now


@pytest.mark.usefixtures("small")
def test_a_stopped_run_shows_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C the table has the rows of the runs before it."""
    simulate = predictions.run

    def stopped(workload: object, window: int | None, *others: object) -> PredictionRun:
        if window is None:
            raise KeyboardInterrupt
        return simulate(workload, window, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(predictions, "run", stopped)

    assert main(["--seeds", "3"]) == 130

    shown = capsys.readouterr().out
    assert "| 1 (default) | then |" in shown
    assert "queue off" not in shown


def test_what_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error names the folder that is not there, before minutes are spent."""
    with pytest.raises(SystemExit) as ended:
        main(["--json", str(tmp_path / "none" / "runs.json")])

    assert ended.value.code == 2
    assert "no such directory" in capsys.readouterr().err
