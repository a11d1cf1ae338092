"""The comparison as a page for people, and as JSON that it can be made from again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from loadtest.machine import Machine
from loadtest.markdown import table
from loadtest.peers.contestants import CONTESTANTS
from loadtest.peers.cost import CONTEXT_TOKENS, IN_FLIGHT, Added, Cost
from loadtest.peers.forwarding import CHAT, MESSAGES, RESPONSES, Forwarded
from loadtest.peers.kill import NUM_REPLICAS, Killed
from loadtest.peers.picture import draw_comparison, slow_prefill
from loadtest.studies.cells import Prefill
from loadtest.studies.grid_run import DEFAULT, WITHOUT_QUEUE, GridRun, read_study
from loadtest.studies.grid_table import BASELINE, best_table, sum_table

SCHEMA: Final = "warmroute.peers/1"


class Comparison(Struct, frozen=True, kw_only=True):
    """All that was measured; a part that was not is empty. `loads` is the load average before."""

    schema: str = SCHEMA
    machine: Machine
    date: str  # of the newest part
    costs: tuple[Cost, ...] = ()
    forwarded: tuple[Forwarded, ...] = ()
    kills: tuple[Killed, ...] = ()
    grid: tuple[GridRun, ...] = ()
    loads: dict[str, float] = {}


Row = Cost | Forwarded | Killed

_ROUTERS: Final = tuple(one.name.replace("`", "") for one in CONTESTANTS)
_PICTURE: Final = "../images/comparison.svg"  # from the page
_FIELDS: Final = {"cost": "costs", "forwarding": "forwarded", "kill": "kills"}


def with_rows(found: Comparison, part: str, rows: Sequence[Row]) -> Comparison:
    """Put a part's rows in place of the same contestants' older ones."""
    field = _FIELDS[part]
    names = {row.name for row in rows}
    kept = [row for row in getattr(found, field) if row.name not in names]
    order = [one.name for one in CONTESTANTS]
    ordered = sorted([*kept, *rows], key=lambda row: order.index(row.name))
    return replace(found, **{field: tuple(ordered)})


def read(path: Path) -> Comparison:
    """Read an earlier comparison.

    Raises:
        OSError, ValueError: the file cannot be read, or is none.
    """
    return read_study(path, Comparison, SCHEMA)


def write(found: Comparison, path: Path) -> None:
    """Write the page to `path`, the JSON beside it, and the picture of its grid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found), encoding="utf-8")
    raw = msgspec.json.format(msgspec.json.encode(found), indent=1)
    path.with_suffix(".json").write_bytes(raw + b"\n")
    if slow_prefill(found.grid):
        picture = path.parent / _PICTURE
        picture.parent.mkdir(exist_ok=True)
        picture.write_bytes(draw_comparison(found.grid, _ROUTERS))


def page(found: Comparison) -> str:
    """Lay everything out as Markdown."""
    machine = found.machine
    parts = [
        "# Other routers",
        "**Question.** How do other routers do in front of the same replicas on the same machine? "
        "The tables show what they know, what they cost, what reaches the engine, and what a dying "
        "replica does to clients. Rows where warmroute is not the best are included.",
        "<!-- not run: two hours, and other routers -->\n"
        "```sh\npython -m loadtest.peers --folder build/peers\n```\n\n"
        f"installs them ({', '.join(sorted({c.package for c in CONTESTANTS if c.package}))}), runs "
        "all of it in about two hours (the real engines take most) and writes this page; "
        "`--only PART` renews one part, `--help` says more. "
        f"{found.date}, {machine.num_cpus} cores, Python {machine.python}, {machine.system}. "
        "Clients, routers and replicas share the cores: compare rows of one table, "
        "no figures of two.",
        f"## Who they are\n\n{_who()}",
    ]
    if found.grid:
        parts.append(f"## What is computed again\n\n{_placing(found.grid)}")
    if found.costs:
        parts += [f"## What a request costs\n\n{_costs(found.costs)}{_load(found, 'cost')}"]
    if found.forwarded:
        parts += [f"## What reaches the engine\n\n{_forwarding(found.forwarded)}"]
    if found.kills:
        parts += [f"## When a replica is killed\n\n{_kills(found.kills)}{_load(found, 'kill')}"]
    return "\n\n".join(parts) + "\n"


def _who() -> str:
    return table(
        ("router and policy", "package", "what it knows of the caches"),
        [(c.name, f"`{c.package}`" if c.package else "this one", c.knows) for c in CONTESTANTS],
    )


def _placing(runs: Sequence[GridRun]) -> str:
    """Sum the grid up by what prefill costs, without a pool and with one; then cell by cell."""
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    parts = [
        "Agents on two real vLLM replicas (CPU build) with small caches, closed loop, short "
        "pauses, from cold caches. A cell's number is what the sessions hold at their ends over "
        "what both caches hold. Prefill is *fast* on the tiny model, below 0.2 s a prompt, and "
        "*slow* where a model takes five times as long, as with long contexts on GPUs. In sum over "
        f"the cells below that all have run (seed {seeds}); ratios are over `{BASELINE}`, "
        "warmroute's own hash of the session id. Recomputed tokens are counted by the engines.",
    ]
    if slow_prefill(runs):
        parts.append(f"![Recomputed tokens and mean TTFT, slow prefill without a pool]({_PICTURE})")
    for title, prefill, has_pool in _GROUPS:
        of_group = [
            run for run in runs if run.cell.prefill == prefill and run.cell.has_pool is has_pool
        ]
        if of_group:
            pace = fmean(run.pace for run in of_group)
            parts += [
                f"### {title}",
                f"A prompt took these engines {pace:.1f} times as long as those that the "
                "simulator's were fitted to.",
                sum_table(of_group, BASELINE),
            ]
    others = [arm for arm in dict.fromkeys(run.arm for run in runs) if arm not in _NO_RIVALS]
    if others and any(run.arm == DEFAULT for run in runs):
        parts += [
            "### Cell by cell",
            f"The default, `{DEFAULT}`, over the best of all others in each figure of each cell, "
            "whichever that is:",
            best_table(runs, DEFAULT, others),
        ]
    parts.append(
        f"`{DEFAULT}` has [its queue](../concepts/queue.md), as by default; "
        f"`{WITHOUT_QUEUE}` has not. "
        "One run each: single runs of one variant in one cell differ by up to a quarter."
    )
    return "\n\n".join(parts)


_NO_RIVALS: Final = (DEFAULT, WITHOUT_QUEUE)
_GROUPS: Final[tuple[tuple[str, Prefill, bool], ...]] = (
    ("Slow prefill", "slow", False),
    ("Fast prefill", "fast", False),
    ("Slow prefill, with a Mooncake pool over TCP", "slow", True),
    ("Fast prefill, with a Mooncake pool over TCP", "fast", True),
)


def _costs(costs: Sequence[Cost]) -> str:
    sizes = [f"{_kb(added)} KB" for added in costs[0].added]
    turn = f"a turn, {_kb(costs[0].turn)} KB"
    header = ("router", *sizes, turn, "CPU of that turn", f"requests/s, {IN_FLIGHT} in flight",
              "CPU each", "memory")  # fmt: skip
    rows = [
        (
            cost.name,
            *[_added(added) for added in (*cost.added, cost.turn)],
            f"{cost.turn.cpu_ms:.2f} ms",
            f"{cost.requests_per_s:,.0f}",
            f"{cost.loaded_cpu_ms:.2f} ms",
            f"{cost.rss_mib:,.0f} MiB",
        )
        for cost in costs
    ]
    direct = ", ".join(
        f"{min(cost.added[i].direct_p50_ms for cost in costs):.2f}" for i in range(len(sizes))
    )
    return (
        "Milliseconds added over direct, p50 / p99, by size of the body, with one request in "
        "flight. First the same request is repeated. Then an agent's turns follow, each with 2,000 "
        f"new tokens behind {CONTEXT_TOKENS:,}. Four fake replicas answer at once (direct p50: "
        f"{direct} ms). Rendering costs them nothing, so the row of a router that asks replicas "
        "for tokens lacks that cost.\n\n"
        f"{table(header, rows)}"
    )


def _kb(added: Added) -> str:
    return f"{added.num_bytes / 1000:,.0f}"


def _added(added: Added) -> str:
    return f"{added.p50_ms:.2f} / {added.p99_ms:.2f}"


def _forwarding(found: Sequence[Forwarded]) -> str:
    header = ("router", "`/v1/chat/completions`", "`/v1/messages`", "`/v1/responses`", "query",
              "session id", "dropped from a chat body")  # fmt: skip
    rows = [
        (
            one.name,
            *[one.apis[path] for path in (CHAT, MESSAGES, RESPONSES)],
            "yes" if one.has_query else "no",
            one.session,
            ", ".join(one.lost_fields) or "nothing",
        )
        for one in found
    ]
    return (
        "A body that agents may send to vLLM, and what of it a replica is sent. A `cache_salt` "
        "that is dropped changes the block hashes and shares what was to be kept apart; a null "
        "content that is dropped can change the template.\n\n"
        f"{table(header, rows)}"
    )


def _kills(kills: Sequence[Killed]) -> str:
    header = ("router", "turns done", "turns that failed", "recomputed tokens a turn",
              "TTFT mean, s", "p99, s")  # fmt: skip
    rows = []
    for name in dict.fromkeys(one.name for one in kills):
        ours = [one for one in kills if one.name == name]
        num_done = sum(one.num_done for one in ours)
        errors: dict[str, int] = {}
        for one in ours:
            for kind, num in one.errors.items():
                errors[kind] = errors.get(kind, 0) + num
        failed = ", ".join(f"{num} {_ERRORS.get(kind, kind)}" for kind, num in errors.items())
        rows.append(
            (
                name,
                f"{num_done:,} of {sum(one.num_planned for one in ours):,}",
                failed or "none",
                f"{sum(one.num_recomputed_tokens for one in ours) / max(1, num_done):,.0f}",
                f"{sum(one.ttft_mean_s * one.num_done for one in ours) / max(1, num_done):.2f}",
                f"{max(one.ttft_p99_s for one in ours):.2f}",
            )
        )
    seeds = ", ".join(map(str, sorted({one.seed for one in kills})))
    return (
        f"{kills[0].num_sessions} agents at once on {NUM_REPLICAS} emulated replicas, all with "
        "tools; one replica is killed when a third of the turns is done. A failed turn ends its "
        f"agent, so more turns are missing than failed (seeds {seeds}).\n\n"
        f"{table(header, rows)}\n\n"
        "A stream that has begun cannot move to another replica; its client gets an error event. "
        "A router that had sent little to the killed replica loses little."
    )


_ERRORS: Final = {
    "stream": "error events in a stream",
    "broken": "streams cut off",
    "connect": "not connected",
    "timeout": "silent",
    "garbage": "no event stream",
}


def _load(found: Comparison, part: str) -> str:
    load = found.loads.get(part)
    return "" if load is None else f"\n\nLoad average before: {load:.2f}."
