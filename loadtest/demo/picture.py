"""The demo in one picture, PNG and SVG: first tokens, where tokens came from, hits, load.

matplotlib is optional (extra `plots`): without it there is no picture, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from loadtest.demo.report import Report
from loadtest.demo.run import Run, Sample
from loadtest.demo.workload import TOKENS_PER_TOKEN
from loadtest.pictures import Look, looks, origin
from loadtest.pictures import draw as make_picture
from loadtest.pictures.first_tokens import paint_first_tokens
from loadtest.pictures.look import ttfts
from loadtest.pictures.origins import paint_origins

_WINDOW_S: Final = 4.0  # hits are shown over this much of the run


def draw(report: Report, runs: Sequence[Run], out: Path) -> list[Path]:
    """Draw `demo.png` and `demo.svg` of the first seed's runs into `out`; return their paths.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    shown = [run for run in runs if run.seed == report.seeds[0]]
    look_of = looks(run.policy for run in shown)

    def paint(figure: Any) -> None:
        axes = figure.subplots(2, 2)
        times = {run.policy: [ttfts(run.results)] for run in shown}
        paint_first_tokens(axes[0, 0], times, look_of)
        axes[0, 0].set_title("First tokens: further left is sooner")
        _origins(axes[0, 1], shown)
        _hits(axes[1, 0], shown, look_of)
        _loads(axes[1, 1], report, look_of)
        workload = report.workload
        figure.suptitle(
            f"warmroute demo: {workload.num_sessions} coding agents, "
            f"{report.plans[0].num_turns} turns, three emulated replicas, "
            f"clock {workload.speed:g}:1, tokens {TOKENS_PER_TOKEN}:1, seed {report.seeds[0]}",
            weight="normal",
        )

    paths = [out / "demo.png", out / "demo.svg"]
    for path in paths:
        path.write_bytes(make_picture(paint, width=13, height=8, kind=path.suffix[1:]))
    return paths


def hit_series(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Compute the hit ratio of the last few seconds at every sample, by the engines' counters.

    Returns:
        Seconds from the first turn, and ratios; samples without prompts behind them are left out.
    """
    times: list[float] = []
    ratios: list[float] = []
    for index, sample in enumerate(samples):
        before = next(s for s in samples[: index + 1] if s.at_s >= sample.at_s - _WINDOW_S)
        prompt = _prompt(sample) - _prompt(before)
        if prompt > 0:
            times.append(sample.at_s)
            ratios.append((_cached(sample) - _cached(before)) / prompt)
    return times, ratios


def _origins(axis: Any, runs: Sequence[Run]) -> None:
    found = {run.policy: origin(run.results) for run in runs}
    # The demo has no pool and no CPU cache: what the router did not predict was in a GPU's too.
    found = {
        policy: replace(parts, gpu=parts.gpu + parts.unknown, unknown=0)
        for policy, parts in found.items()
        if parts.total
    }
    axis.set_title("Where prompt tokens came from", pad=26)
    if found:
        paint_origins(axis, found)


def _hits(axis: Any, runs: Sequence[Run], look_of: Mapping[str, Look]) -> None:
    for run in runs:
        times, ratios = hit_series(run.samples)
        axis.plot(times, ratios, color=look_of[run.policy].colour, lw=1.6)
    axis.set(xlabel="seconds from the first turn", ylabel="hit ratio", ylim=(0, 1))
    axis.set_title(f"Cache hits over the last {_WINDOW_S:g} s")


def _loads(axis: Any, report: Report, look_of: Mapping[str, Look]) -> None:
    reports = [r for r in report.runs if r.seed == report.seeds[0]]
    num_replicas = max((len(r.recomputed_tokens) for r in reports), default=0)
    width = 0.8 / max(1, len(reports))
    for index, run in enumerate(reports):
        at = np.arange(len(run.recomputed_tokens)) + (index - (len(reports) - 1) / 2) * width
        tokens = np.array(run.recomputed_tokens) / 1e3
        axis.bar(at, tokens, width * 0.95, color=look_of[run.policy].colour)
    axis.set_xticks(range(num_replicas), [f"r{i + 1}" for i in range(num_replicas)])
    axis.set_ylabel("prompt tokens computed, thousands")
    axis.set_title("Load per replica")
    axis.grid(visible=False, axis="x")


def _prompt(sample: Sample) -> int:
    return sum(load.num_prompt_tokens for load in sample.loads)


def _cached(sample: Sample) -> int:
    return sum(load.num_cached_tokens for load in sample.loads)
