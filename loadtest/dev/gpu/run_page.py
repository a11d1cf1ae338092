"""The page of a study, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Final

from loadtest.dev.gpu.run_machine import GIB
from loadtest.dev.gpu.run_models import cache_bytes, weight_bytes
from loadtest.dev.gpu.run_record import Found
from loadtest.dev.studies.cells import Cell
from loadtest.dev.studies.grid_run import GridRun
from loadtest.markdown import table
from loadtest.pages import Note, Page, Section, Table

BASELINE: Final = "session_hash"


def make_page(found: Found) -> Page:
    """Lay out what was found; what is missing is named."""
    return Page(
        title=f"Routing on {_where(found)}",
        lead=_lead(found),
        sections=(
            Section(title="Variants", parts=tuple(_variants(found))),
            Section(title="Cost model against measured prefill", parts=tuple(_prefills(found))),
            Section(title="Token hand-over", parts=tuple(_hand_overs(found))),
            *_offload(found),
            Section(title="Hardware and setting", parts=tuple(_setting(found))),
        ),
        footer=f"{found.date}, warmroute {found.machine.warmroute}: {found.command}",
    )


def markdown(page: Page) -> str:
    """Write a page as Markdown."""
    parts = [f"# {page.title}", page.lead]
    for section in page.sections:
        parts.append(f"## {section.title}")
        for part in section.parts:
            if isinstance(part, Table):
                parts += [table(part.head, part.rows), part.caption]
            elif isinstance(part, Note):
                parts.append(part.text)
    return "\n\n".join([*filter(None, parts), page.footer]) + "\n"


def common(runs: Sequence[GridRun]) -> dict[Cell, list[GridRun]]:
    """Return the runs of each cell, but only of seeds that all its variants have."""
    found = {}
    for cell in dict.fromkeys(run.cell for run in runs):
        here = [run for run in runs if run.cell == cell]
        arms = {run.arm for run in here}
        seeds = [{run.seed for run in here if run.arm == arm} for arm in arms]
        shared = set.intersection(*seeds)
        found[cell] = [run for run in here if run.seed in shared]
    return found


def router_share(runs: Sequence[GridRun]) -> float | None:
    """Return the share of the time to first token that is spent in the router, but for its queue.

    None: no turn says how long it was there.
    """
    turns = [
        turn for run in runs for turn in run.turns
        if turn.router_ms is not None and turn.ttft_s
    ]  # fmt: skip
    waited_ms = sum(1e3 * (turn.ttft_s or 0.0) for turn in turns)
    return sum(turn.router_ms or 0.0 for turn in turns) / waited_ms if waited_ms else None


def _where(found: Found) -> str:
    gpus = found.hardware.engines.gpus
    if found.setting.device == "cpu":
        return f"{found.hardware.num_cpus} CPUs (rehearsal)"
    names = dict.fromkeys(gpu.name for gpu in gpus)
    return ", ".join(f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in names)


def _lead(found: Found) -> str:
    for cell, runs in common(found.runs).items():
        ours = [run for run in runs if run.arm == "kv_aware"]
        base = [run for run in runs if run.arm == BASELINE]
        if ours and base:
            tokens = _tokens(ours) / max(1.0, _tokens(base)) - 1
            ttft = _mean_ttft(ours) / _mean_ttft(base) - 1
            return (
                f"kv_aware computes {_change(tokens, 'more', 'fewer')} tokens than {BASELINE}, and "
                f"its mean time to first token is {_change(ttft, 'longer', 'shorter')} "
                f"({cell.name}, {_rounds(len(ours))})."
            )
    return f"{len(found.runs)} runs are done: too few to compare kv_aware with {BASELINE}."


def _variants(found: Found) -> Iterator[Note | Table]:
    for note in found.notes:
        yield Note(text=note, kind="warning")
    done = {run.cell.working_set for run in found.runs}
    for asked in found.setting.cells():
        if asked.working_set not in done:
            yield Note(text=f"{asked.name}: no run is done.", kind="warning")
    for cell, runs in common(found.runs).items():
        if not runs:
            yield Note(text=f"{cell.name}: no round is complete.", kind="warning")
            continue
        base = [run for run in runs if run.arm == BASELINE]
        by_arm = {arm: [run for run in runs if run.arm == arm] for arm in found.setting.arms}
        rows = [_row(arm, of_arm, base) for arm, of_arm in by_arm.items() if of_arm]
        sizes = [run.working_set for run in runs]
        num_turns = sum(run.num_turns for run in runs if run.arm == rows[0][0])
        yield Table(
            head=(
                "variant", "TTFT mean, s", "P50", "P90", f"TTFT over {BASELINE}",
                "computed tokens", "computed again", f"computed over {BASELINE}",
                "predicted right", "router's share of TTFT", "moved", "failed",
            ),
            rows=tuple(rows),
            numeric=tuple(range(1, 12)),
            caption=f"{cell.name[0].upper()}{cell.name[1:]} ({fmean(sizes):.2f} as drawn), "
            f"{_rounds(len({run.seed for run in runs}))}, {num_turns} turns for each variant. "
            "Computed again: what one cache that never evicts would have saved. The router's "
            "share is without its queue.",
        )  # fmt: skip


def _row(arm: str, runs: Sequence[GridRun], base: Sequence[GridRun]) -> tuple[str, ...]:
    num_predicted = sum(run.num_predicted for run in runs)
    share = router_share(runs)
    again = fmean(max(0, run.num_recomputed_tokens - run.num_ideal_tokens) for run in runs)
    return (
        arm,
        f"{_mean_ttft(runs):.3f}",
        f"{fmean(run.ttft_p50_s for run in runs):.3f}",
        f"{fmean(run.ttft_p90_s for run in runs):.3f}",
        f"{_mean_ttft(runs) / _mean_ttft(base) - 1:+.0%}" if base else "-",
        f"{_tokens(runs):,.0f}",
        f"{again:,.0f}",
        f"{_tokens(runs) / max(1.0, _tokens(base)) - 1:+.0%}" if base else "-",
        f"{sum(run.num_exact for run in runs) / num_predicted:.1%}" if num_predicted else "-",
        "-" if share is None else f"{share:.2%}",
        f"{sum(run.num_moved for run in runs)}",
        f"{sum(run.num_errors for run in runs)}",
    )


def _prefills(found: Found) -> Iterator[Note | Table]:
    if not found.prefills:
        yield Note(text="Not measured: the first run of kv_aware is not done.", kind="warning")
        return
    yield Table(
        head=("prompt tokens", "measured, ms", "predicted, ms", "predicted over measured"),
        rows=tuple(
            (
                f"{one.num_tokens:,}",
                _times(one.measured_ms),
                _times(one.predicted_ms),
                f"{median(one.predicted_ms) / median(one.measured_ms):.2f}",
            )
            for one in found.prefills
        ),
        numeric=(1, 2, 3),
        caption="Median (lowest to highest) of new prompts on idle replicas, after a run of "
        "kv_aware. The router learned its model from that run, which was under load.",
    )


def _hand_overs(found: Found) -> Iterator[Note | Table]:
    if not found.hand_overs:
        yield Note(text="Not measured.", kind="warning")
        return
    direct = (
        " Directly: the replica takes no ids with a chat; both were sent without a router, the "
        "ids as a completion."
        if any(one.is_direct for one in found.hand_overs)
        else ""
    )
    yield Table(
        head=("prompt tokens", "as text, ms", "with token ids, ms", "saved, ms", "handed over"),
        rows=tuple(
            (
                f"{one.num_tokens:,}",
                _times(one.off_ms),
                _times(one.on_ms),
                f"{median(one.off_ms) - median(one.on_ms):.0f}",
                "directly" if one.is_direct else f"{one.num_handed} of {len(one.on_ms)}",
            )
            for one in found.hand_overs
        ),
        numeric=(1, 2, 3, 4),
        caption="Time to first token of the next turn of a cached conversation, on an idle "
        f"replica: median (lowest to highest).{direct}",
    )


def _offload(found: Found) -> Iterator[Section]:
    if not found.setting.offload_gib:
        return
    parts: list[Note | Table] = [Note(text="Not measured.", kind="warning")]
    if found.fetches:
        rows = tuple(
            (
                f"{one.num_tokens:,}",
                f"{median(one.num_fetched_tokens):,.0f}",
                _times(one.computed_ms),
                _times(one.fetched_ms),
                f"{median(one.fetched_ms) / median(one.computed_ms):.0%}",
            )
            for one in found.fetches
        )
        parts = [
            Table(
                head=("prompt tokens", "read", "computed, ms", "read, ms", "read over computed"),
                rows=rows,
                numeric=(1, 2, 3, 4),
                caption="Time to first token of a new prompt, and of the same prompt after the GPU "
                "cache was emptied: median (lowest to highest).",
            )
        ]
    yield Section(title="CPU offload: read or compute again", parts=tuple(parts))


def _setting(found: Found) -> Iterator[Note | Table]:
    setting, hardware = found.setting, found.hardware
    versions = {**hardware.engines.versions, "Python": found.machine.python}
    if hardware.engines.cuda:
        versions["CUDA of torch"] = hardware.engines.cuda
    weights = weight_bytes(setting.model) / GIB
    cache = cache_bytes(setting.model, setting.num_cache_tokens) / GIB
    rows = [
        ("GPU", "; ".join(hardware.nvidia_smi) or "none"),
        ("CPU", f"{hardware.processor}, {hardware.num_cpus} usable"),
        ("memory", f"{hardware.memory_gib} GiB"),
        ("versions", ", ".join(f"{name} {text}" for name, text in versions.items())),
        ("replicas", f"{setting.num_replicas}, {setting.model} with random weights"),
        ("weights", f"{weights:.1f} GiB" if weights else "small"),
        ("cache of each", f"{setting.num_cache_tokens:,} tokens, {cache:.1f} GiB"),
        ("contexts", f"{setting.num_context_tokens:,} tokens at a session's end, in the median"),
        ("think time", f"{setting.think_s:g} s in the median"),
        ("CPU tier of each", f"{setting.offload_gib:g} GiB" if setting.offload_gib else "none"),
        ("time", f"{found.took_s:.0f} s of {60 * setting.minutes:.0f} s"),
    ]
    yield Table(head=("what", "value"), rows=tuple(rows))
    yield Note(
        text="All variants of a round send the same sessions to cold caches, and every second "
        "round runs them in reverse order. Figures are means over complete rounds. Replies are "
        "scripted. The vocabulary has 8,192 entries, and decoding runs without CUDA graphs."
    )


def _tokens(runs: Sequence[GridRun]) -> float:
    return fmean(run.num_recomputed_tokens for run in runs)


def _mean_ttft(runs: Sequence[GridRun]) -> float:
    return fmean(run.ttft_mean_s for run in runs)


def _times(values: Sequence[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _change(ratio: float, more: str, less: str) -> str:
    return f"{abs(ratio):.0%} {more if ratio >= 0 else less}"


def _rounds(num: int) -> str:
    return f"{num} round" if num == 1 else f"{num} rounds"
