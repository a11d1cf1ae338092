from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.machine import this_machine
from loadtest.studies import halves
from loadtest.studies.halves import HalvesFile, HalvesRun

RUN = HalvesRun(
    fleet="together",
    working_set=0.6,
    seed=101,
    num_turns=70,
    num_errors=0,
    num_prompt_tokens=200_000,
    num_computed_tokens=40_000,
    ttft_mean_s=0.2,
    ttft_p90_s=0.5,
    tbt_mean_s=0.012,
)


def file_of(tmp_path: Path, *runs: HalvesRun) -> str:
    path = tmp_path / "halves.json"
    found = HalvesFile(machine=this_machine(), command="test", runs=runs)
    path.write_bytes(msgspec.json.encode(found))
    return str(path)


def test_the_table_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds are summed; a fleet is compared with the same seeds of engines together alone."""
    apart = replace(RUN, fleet="apart, pool", num_computed_tokens=50_000, num_errors=1)
    path = file_of(tmp_path, RUN, replace(RUN, seed=102, num_computed_tokens=60_000), apart)

    assert halves.main(["--read", path]) == 0

    _, _, together, apart_row = capsys.readouterr().out.strip().splitlines()
    assert together == "| together | 0.6 | 140 | 0 | 100,000 | 1.00 | 0.20 | 0.50 | 12.0 |"
    assert apart_row == "| apart, pool | 0.6 | 70 | 1 | 50,000 | 1.25 | 0.20 | 0.50 | 12.0 |"


def test_wrong_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of another study, a file that is none, a working set of nothing."""
    other = tmp_path / "other.json"
    other.write_text('{"schema": "warmroute.grid/1"}')

    for words, said in (
        (["--read", str(other)], "other.json"),
        (["--read", str(tmp_path / "none.json")], "none.json"),
        (["--working-set", "0"], "--working-set 0: must be above 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            halves.main(words)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
