"""The demo in one picture, PNG and SVG: first tokens, where tokens came from, hits, load.

matplotlib is optional (extra `plots`): without it there is no picture, and that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from loadtest.demo.report import Report
from loadtest.demo.run import Run, Sample
from loadtest.demo.workload import TOKENS_PER_TOKEN

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey.
_COLOURS: Final = {
    "round_robin": "#999999",
    "least_loaded": "#56B4E9",
    "session_sticky": "#E69F00",
    "kv_aware": "#009E73",
}
_OTHER_COLOURS: Final = ("#0072B2", "#D55E00", "#CC79A7", "#F0E442")
_CACHED: Final = "#BBBBBB"
_WINDOW_S: Final = 4.0  # hits are shown over this much of the run


class NoMatplotlib(Exception):
    """There is no matplotlib here; the message says how to get it."""


def draw(report: Report, runs: Sequence[Run], out: Path) -> list[Path]:
    """Draw `demo.png` and `demo.svg` of the first seed's runs into `out`; return their paths.

    Raises:
        NoMatplotlib: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as exc:
        raise NoMatplotlib("no picture: pip install 'warmroute[plots]' for matplotlib") from exc
    matplotlib.use("agg")  # no display needed
    from matplotlib import pyplot

    shown = [run for run in runs if run.seed == report.seeds[0]]
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    _first_tokens(axes[0, 0], shown)
    _origins(axes[0, 1], report, shown)
    _hits(axes[1, 0], shown)
    _loads(axes[1, 1], report, shown)
    workload = report.workload
    figure.suptitle(
        f"warmroute demo: {workload.num_sessions} coding agents, {report.plans[0].num_turns} turns,"
        f" three emulated replicas, clock {workload.speed:g}:1, tokens {TOKENS_PER_TOKEN}:1,"
        f" seed {report.seeds[0]}"
    )
    paths = [out / "demo.png", out / "demo.svg"]
    for path in paths:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return paths


def colour(policy: str) -> str:
    """Give a policy its colour, the same in every picture."""
    return _COLOURS.get(policy) or _OTHER_COLOURS[sum(policy.encode()) % len(_OTHER_COLOURS)]


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


def _first_tokens(axis: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        ttfts = np.sort([turn.ttft_s for turn in run.results if turn.ttft_s is not None])
        if not len(ttfts):
            continue
        share = np.arange(1, len(ttfts) + 1) / len(ttfts)
        axis.step(ttfts * 1e3, share, where="post", label=run.policy, color=colour(run.policy))
    axis.set(xscale="log", xlabel="time to first token, ms (wall clock)", ylabel="share of turns")
    axis.set_title("First tokens: further left is sooner")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="lower right")


def _origins(axis: Any, report: Report, runs: Sequence[Run]) -> None:
    names = [run.policy for run in runs]
    summaries = [r.summary for r in report.runs if r.seed == report.seeds[0]]
    recomputed = np.array([s.num_recomputed_tokens for s in summaries]) / 1e3
    cached = np.array([s.num_prompt_tokens for s in summaries]) / 1e3 - recomputed
    bars = axis.bar(names, recomputed, color=[colour(name) for name in names], label="_")
    axis.bar(names, cached, bottom=recomputed, color=_CACHED, label="from the cache")
    axis.bar_label(bars, [f"{value:,.0f}K" for value in recomputed], label_type="center")
    axis.set_ylabel("prompt tokens, thousands")
    axis.set_title("Where prompt tokens came from: colour is recomputed")
    axis.set_ylim(0, 1.15 * max(recomputed + cached, default=1.0))  # room for the legend
    axis.legend(loc="upper right")


def _hits(axis: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        times, ratios = hit_series(run.samples)
        axis.plot(times, ratios, label=run.policy, color=colour(run.policy))
    axis.set(xlabel="seconds from the first turn", ylabel="hit ratio", ylim=(0, 1))
    axis.set_title(f"Cache hits over the last {_WINDOW_S:g} s")
    axis.grid(alpha=0.3)


def _loads(axis: Any, report: Report, runs: Sequence[Run]) -> None:
    reports = [r for r in report.runs if r.seed == report.seeds[0]]
    num_replicas = max((len(r.recomputed_tokens) for r in reports), default=0)
    width = 0.8 / max(1, len(reports))
    for index, run in enumerate(reports):
        at = np.arange(len(run.recomputed_tokens)) + (index - (len(reports) - 1) / 2) * width
        tokens = np.array(run.recomputed_tokens) / 1e3
        axis.bar(at, tokens, width * 0.95, color=colour(run.policy), label=run.policy)
    axis.set_xticks(range(num_replicas), [f"r{i + 1}" for i in range(num_replicas)])
    axis.set_ylabel("prompt tokens computed, thousands")
    axis.set_title("Load per replica")
    axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
    axis.legend(loc="upper right", ncols=2)


def _prompt(sample: Sample) -> int:
    return sum(load.num_prompt_tokens for load in sample.loads)


def _cached(sample: Sample) -> int:
    return sum(load.num_cached_tokens for load in sample.loads)
