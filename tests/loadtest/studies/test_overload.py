from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.simulator.rejection import LoadSample
from loadtest.studies import overload
from loadtest.studies.overload import Case, OverloadRun, correlation, draw_loads, main, report

EXTRACT = Path("tests/data/mooncake_extract.jsonl")
CASE = Case(pace=2.0, slowness=4.0)
RUN = OverloadRun(
    rule="baseline",
    case=CASE,
    num_turns=1_000,
    num_late_prompts=10,
    num_slow_answers=0,
    num_wasted=190,
    num_wasted_tokens=2_000_000,
    num_answered_tokens=8_000_000,
    num_good=700,
    samples=(LoadSample(0.0, 0.2, 0.9), LoadSample(1.0, 0.4, 0.9), LoadSample(6.0, 0.6, 0.3)),
)


def test_refused_side_by_side_with_the_paper() -> None:
    """Shares, and ratios to the baseline of the same case; what is not there yet stays empty."""
    other = replace(RUN, rule="early rejection", num_wasted=0, num_slow_answers=140)

    found = report([RUN, other])

    assert (
        "| published, 8P+8D at twice the pace | 18.2%, 1.00 | 16.4%, 0.90 | 15.6%, 0.86 |  |  |"
        in found
    )
    assert f"| ours, {CASE.name} | 20.0%, 1.00; 70.0% | 15.0%, 0.75; 70.0% |  |  |  |" in found
    assert "| baseline | 10 | 0 | 190 | 2.0M | 8.0M | 700 |" in found


def test_loads_that_swing_against_each_other_correlate_below_zero() -> None:
    """Over means of some seconds; a load that does not move correlates with nothing."""
    assert correlation(RUN.samples) == pytest.approx(-1.0)
    assert correlation([LoadSample(float(at), 0.5, at / 100) for at in range(100)]) == 0.0
    assert correlation(()) == 0.0


def test_a_panel_for_each_rule() -> None:
    """Same runs, same bytes."""
    pytest.importorskip("matplotlib")
    runs = [RUN, replace(RUN, rule="early rejection")]

    drawn = draw_loads(runs)

    assert drawn == draw_loads(runs)
    assert drawn.count(b'id="axes_') == 2


def test_command_simulates_and_reads_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table can be made again from the file of the runs."""
    again = replace(CASE, draw=1)
    monkeypatch.setattr(overload, "CASES", (CASE, again))
    file = tmp_path / "runs.json"
    words = ["--trace", str(EXTRACT), "--requests", "20"]

    assert main([*words, "--json", str(file)]) == 0

    table = capsys.readouterr().out
    assert f"| ours, {CASE.name} | 0.0%" in table
    assert f"| ours, {CASE.name}; draw 1 | 0.0%" in table
    assert main([*words, "--read", str(file)]) == 0
    assert capsys.readouterr().out == table


@pytest.mark.parametrize(
    "words",
    [["--trace", "/nowhere"], [], ["--trace", str(EXTRACT), "--requests", "0"],
     ["--trace", str(EXTRACT), "--read", "/nowhere"]],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    """A command line that asks for nothing possible ends with a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
