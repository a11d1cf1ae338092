"""The directory of a comparison: the setting, a file per run, and the reports made of them.

compare.json                       what was asked for (Setting)
runs/ROUND-PLACE-ARM.jsonl         each run, as `warmroute replay` writes it
report.html, report.json           made from those; `--from` makes them again
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.compare.page import make_page
from loadtest.compare.report import Report
from loadtest.compare.setting import SETTING_SCHEMA, Setting
from loadtest.pages import render
from loadtest.results import Run

SETTING_FILE: Final = "compare.json"
RUNS: Final = "runs"


class StoreError(ValueError):
    """The directory cannot be used; the message names the file and what is wrong with it."""


def prepare(out: Path, setting: Setting) -> None:
    """Make the directory and keep the setting in it.

    Raises:
        StoreError: there is a comparison in it already, or it cannot be written.
    """
    try:
        (out / RUNS).mkdir(parents=True, exist_ok=True)
        if (out / SETTING_FILE).exists() or any((out / RUNS).iterdir()):
            raise StoreError(
                f"{out} holds a comparison already; choose another --out, or remove it "
                f"(`--from {out}` makes its report again)"
            )
        (out / SETTING_FILE).write_bytes(_pretty(setting))
    except OSError as exc:
        raise StoreError(f"{out}: {exc.strerror or exc}") from exc


def clear(out: Path) -> None:
    """Remove an earlier comparison from a directory; other files stay."""
    if (out / SETTING_FILE).exists():
        (out / SETTING_FILE).unlink()
        shutil.rmtree(out / RUNS, ignore_errors=True)


def write_report(out: Path, report: Report, runs: Sequence[Run]) -> None:
    """Write `report.json` and `report.html`.

    Raises:
        StoreError: they cannot be written.
    """
    try:
        (out / "report.json").write_bytes(_pretty(report))
        (out / "report.html").write_text(render(make_page(report, runs)), encoding="utf-8")
    except OSError as exc:
        raise StoreError(f"{out}: {exc.strerror or exc}") from exc


def run_path(out: Path, run: Run) -> Path:
    """Name the file of a run."""
    name = re.sub(r"[^\w.=-]+", "_", run.info.label)[:80]
    position = run.info.settings.get("position", 0)
    return out / RUNS / f"{run.info.round:02}-{position:03}-{name}.jsonl"


def save_run(out: Path, run: Run) -> None:
    """Write a run, as soon as it is done."""
    from loadtest.runner import write_run

    write_run(run_path(out, run), run)


def load(out: Path) -> tuple[Setting, list[Run]]:
    """Read a comparison back, whole or not; runs in the order in which they ran.

    Raises:
        StoreError: there is nothing to read, a file is none of ours or of another version, or a
            run is not of this comparison.
    """
    from loadtest.runner import RunFileError, read_run

    if not (out / SETTING_FILE).is_file():
        raise StoreError(f"{out} has no {SETTING_FILE}; --from takes a directory that was --out")
    setting = _read_setting(out / SETTING_FILE)
    paths = sorted((out / RUNS).glob("*.jsonl"))
    if not paths:
        raise StoreError(f"{out}: no run file (*.jsonl) in {RUNS}/")
    runs = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except (RunFileError, OSError) as exc:
            raise StoreError(str(exc)) from exc
    _check_runs(paths, runs, setting)
    return setting, sorted(runs, key=_moment)


def _read_setting(path: Path) -> Setting:
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise StoreError(f"{path}: {exc.strerror or exc}") from exc
    try:
        schema = msgspec.json.decode(text, type=_Version).schema
        if schema != SETTING_SCHEMA:
            raise StoreError(
                f"{path}, schema: {schema!r} is another version; this one reads {SETTING_SCHEMA!r}"
            )
        return msgspec.json.decode(text, type=Setting)
    except msgspec.DecodeError as exc:
        raise StoreError(f"{path}: {exc}") from exc


def _check_runs(paths: Sequence[Path], runs: Sequence[Run], setting: Setting) -> None:
    """Refuse runs of another workload or variant, and two runs of one variant in one round."""
    seen: dict[tuple[str, int], Path] = {}
    for path, run in zip(paths, runs, strict=True):
        if run.info.workload != setting.workload:
            raise StoreError(
                f"{path}, line 1, workload: {run.info.workload!r} is not that of this comparison "
                f"({setting.workload!r})"
            )
        if run.info.label not in setting.labels:
            raise StoreError(
                f"{path}, line 1, label: {run.info.label!r} is no variant of this comparison "
                f"(they are: {', '.join(setting.labels)})"
            )
        first = seen.setdefault((run.info.label, run.info.round), path)
        if first != path:
            raise StoreError(
                f"{path}: {run.info.label!r} in round {run.info.round} is in {first.name} already"
            )


def _moment(run: Run) -> tuple[int, int, float]:
    return run.info.round, int(run.info.settings.get("position", 0)), run.info.started_at


def _pretty(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


class _Version(msgspec.Struct):
    schema: str
