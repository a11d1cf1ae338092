"""`warmroute compare`: run files in, a report out.

Exit status: 0 every turn was answered; 1 some failed, or runs are missing; 2 the run files cannot
be compared.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
from msgspec.structs import replace
from rich.console import Console

from loadtest.compare.report import Report, make_report
from loadtest.compare.shown import make_page, show
from loadtest.output_options import output_option
from loadtest.pages import render
from loadtest.results import Run
from loadtest.runner.run_file import RunFileError, read_run

_WIDTH: Final = 140  # where the width of the screen is unknown
_POSITIVE: Final = click.FloatRange(min=0.0, min_open=True)


class Refused(click.ClickException):
    """The run files cannot be compared."""

    exit_code = 2


@click.command("compare", context_settings={"max_content_width": 100, "show_default": True})
@click.argument(
    "paths", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "--baseline", metavar="LABEL", help="What the others are held against.  [default: the first]"
)
@click.option("--slo-ttft", type=_POSITIVE, metavar="S", help="TTFT limit for goodput, in seconds.")
@click.option(
    "--slo-tbt",
    type=_POSITIVE,
    metavar="S",
    help="For goodput: highest mean inter-token latency of a turn.",
)
@output_option(is_file=False, help="Write report.html and report.json there.")
def compare(
    paths: tuple[Path, ...],
    baseline: str | None,
    slo_ttft: float | None,
    slo_tbt: float | None,
    out: Path | None,
) -> None:
    """Compare runs of one workload.

    RUN is a run file of `warmroute replay` or `warmroute simulate`, or a directory of them. The
    label of a run names its variant; several runs of one label are its rounds. Differences come
    with intervals, and with what speaks against them.

    \b
    Simulated:  warmroute simulate --generate agents --policies kv_aware,least_loaded \\
                    --rounds 4 -o runs
                warmroute compare runs
    Live:       warmroute replay URL --generate agents --loop closed --label ours --salt 1 \\
                    -o runs/ours-1.jsonl                (and so on, in turns)
                warmroute compare runs
    """
    runs = read_runs(paths)
    labels = list(dict.fromkeys(run.info.label for run in runs))
    if len(labels) < 2:
        raise Refused(
            f"every run is called {labels[0]!r}; a comparison needs two variants: replay --label "
            "names them"
        )
    if baseline is not None and baseline not in labels:
        raise Refused(f"--baseline {baseline!r} is none of {', '.join(labels)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    with Console(stderr=True).status("resampling sessions"):
        report = make_report(
            numbered(runs), baseline=baseline or labels[0], slo_ttft_s=slo_ttft, slo_tbt_s=slo_tbt
        )
    show(report, console)
    if out is not None:
        try:
            write_report(out, report)
        except OSError as exc:
            raise click.ClickException(f"{out}: {exc.strerror or exc}") from exc
        console.print(f"\n{out}/: report.html, report.json", highlight=False, markup=False)
    sys.exit(0 if report.is_complete and not report.num_errors else 1)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run files, and those of directories.

    Raises:
        Refused: There is none, one is no run file, or two have different workloads.
    """
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    if not files:
        raise Refused(f"{paths[0]}: no run file (*.jsonl)")
    runs: list[Run] = []
    for file in files:
        try:
            runs.append(read_run(file))
        except (RunFileError, OSError) as exc:
            raise Refused(str(exc)) from exc
        ours, theirs = runs[0].info.workload, runs[-1].info.workload
        if ours != theirs:
            raise Refused(f"{file} has the workload {theirs!r}, {files[0]} has {ours!r}")
    return runs


def numbered(runs: Sequence[Run]) -> list[Run]:
    """Number rounds: the n-th run of each label, in order of time, is its round n."""
    counts: Counter[str] = Counter()
    found = []
    for run in sorted(runs, key=lambda run: (run.info.started_at, run.info.round)):
        counts[run.info.label] += 1
        found.append(replace(run, info=replace(run.info, round=counts[run.info.label])))
    return found


def write_report(out: Path, report: Report) -> None:
    """Write `report.json` and `report.html`.

    Raises:
        OSError: They cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (out / "report.json").write_bytes(text + b"\n")
    (out / "report.html").write_text(render(make_page(report)), encoding="utf-8")
