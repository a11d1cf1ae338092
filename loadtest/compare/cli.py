"""`warmroute compare`: run or read, report.

Exit status: 0 everything ran and every turn was answered; 1 some failed, or runs are missing;
2 what was asked for cannot be done, and nothing was run.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click
import uvloop
from msgspec.structs import replace
from rich.console import Console

from loadtest.compare.arms import check_arms
from loadtest.compare.asked import Job, make_job, make_place
from loadtest.compare.options import compare_options, refuse_with_from
from loadtest.compare.report import make_report
from loadtest.compare.setting import Setting
from loadtest.compare.store import StoreError, load, prepare, save_run, write_report
from loadtest.compare.study import study
from loadtest.compare.terminal import show
from loadtest.results import Run
from loadtest.runner import ReplayError
from loadtest.runner.display import Display
from loadtest.runner.stop import Stop
from loadtest.traces.options import WorkloadError, workload_options

_WIDTH: Final = 140  # where the width of the screen is unknown


@click.command("compare", context_settings={"max_content_width": 100, "show_default": True})
@workload_options
@compare_options
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    source: Path | None,
    baseline: str | None,
    slo_ttft: float | None,
    slo_tbt: float | None,
    out: Path | None,
    **options: Any,
) -> None:
    """Compare policies or routers on one workload.

    All variants run the same workload, from cold caches, in interleaved rounds; differences come
    with intervals, and with what speaks against them. WORKLOAD is --trace FILE or --generate NAME.
    Options of sending apply to live runs; model, salt, header and key to given URLs.

    \b
    Simulated:         warmroute compare WORKLOAD --simulate --policies kv_aware,least_loaded
    Emulated replicas: warmroute compare WORKLOAD --policies kv_aware,least_loaded
    Real engines:      warmroute compare WORKLOAD --policies … --replica URL --replica URL
    Other routers:     warmroute compare WORKLOAD --target ours=URL --target theirs=URL
    The report again:  warmroute compare --from DIR
    """
    slo = (slo_ttft, slo_tbt)
    try:
        if source is not None:
            refuse_with_from(ctx)
            setting, runs = _read(source, baseline, slo)
            sys.exit(_finish(setting, runs, source, _console()))
        job = make_job(ctx, baseline=baseline, slo=slo, options=options)
        if out is not None:
            prepare(out, job.setting)
    except (StoreError, WorkloadError, ReplayError) as error:
        raise _Refused(str(error)) from error
    sys.exit(_run(job, out, _console()))


class _Refused(click.ClickException):
    exit_code = 2


def _read(
    source: Path, baseline: str | None, slo: tuple[float | None, float | None]
) -> tuple[Setting, list[Run]]:
    """Read a comparison, with another baseline or SLO where one is given."""
    setting, runs = load(source)
    arms, chosen = check_arms(setting.arms, baseline or setting.baseline)
    if slo == (None, None):
        slo = setting.slo_ttft_s, setting.slo_tbt_s
    changed = replace(setting, arms=arms, baseline=chosen, slo_ttft_s=slo[0], slo_tbt_s=slo[1])
    return changed, runs


def _run(job: Job, out: Path | None, console: Console) -> int:
    with ExitStack() as stack:
        if out is not None:
            logs = out / "logs"
        else:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
        runs, note = uvloop.run(_study(job, logs, out, console))
    return _finish(job.setting, runs, out, console, note=note)


async def _study(job: Job, logs: Path, out: Path | None, console: Console) -> tuple[list[Run], str]:
    stop = Stop()
    stop.listen()

    def keep(run: Run) -> None:
        if out is not None:
            save_run(out, run)

    with Display(console, job.setting.labels, len(job.setting.order)) as display:
        place = make_place(job, logs=logs)
        runs = await study(job.setting, place, display, keep, stop)
    return runs, stop.reason


def _finish(
    setting: Setting, runs: list[Run], out: Path | None, console: Console, *, note: str = ""
) -> int:
    """Report what there is; return the exit status."""
    if not runs:
        console.print(f"Nothing ran: {note}." if note else "Nothing ran.", markup=False)
        return 1
    if note:
        done = sum(run.info.is_complete for run in runs)
        note = f"{note} after {done} of {setting.num_runs} runs; this is what there is by then"
    with Console(stderr=True).status("resampling sessions"):
        report = make_report(setting, runs, note=note)
    console.print()
    show(report, console)
    if out is not None:
        try:
            write_report(out, report, runs)
        except StoreError as error:
            raise click.ClickException(str(error)) from error
        console.print(f"\n{out}/: report.html, report.json, runs/", highlight=False, markup=False)
    return 0 if report.is_complete and not report.num_errors else 1


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
