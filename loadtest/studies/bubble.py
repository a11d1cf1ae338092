"""What a shallow window costs: how much longer engines take for prompts that are all there.

    python -m loadtest.studies.bubble

An engine computes several short prompts in one step, and is idle from a prompt's end until the
router knows of it and has sent another. So with little ready it does less. Prompts of one length,
none of them cached, come at once to simulated replicas with room for all; how long these take is
held against the same without the queue.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from loadtest.markdown import table
from loadtest.simulator import Setup, simulate
from loadtest.studies.measured import interrupt_on_sigterm, measured
from loadtest.workload import Turn, Workload
from policies import create
from router.scheduling.waiting import QueueRules

BLOCK_SIZE: Final = 512
NUM_REPLICAS: Final = 2
NUM_BLOCKS: Final = 40_000
ENGINES: Final = ("h100x4-70b", "cpu-tiny")
PROMPTS: Final = ((200, 1, 4_800), (300, 400, 900), (600, 400, 450), (1_000, 1, 2_400),
                  (1_000, 100, 1_600), (4_000, 1, 800), (16_000, 1, 320))  # fmt: skip
"""Tokens of a prompt and of its answer, and how many of them."""

RULES: Final = (
    *[QueueRules(window=window, ready_ms=0.0) for window in (0, 1, 4)],
    *[QueueRules(window=1, ready_ms=ready_ms) for ready_ms in (100.0, 200.0, 300.0, 400.0)],
)


class BubbleRun(Struct, frozen=True, kw_only=True):
    """How long it took under one rule."""

    engine: str
    num_tokens: int  # of each prompt
    num_out: int
    rules: QueueRules | None  # None: the queue is off
    span_s: float


def draw(num: int, num_tokens: int, num_out: int) -> Workload:
    """Make prompts that have nothing in common, all of which come at once."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    turns = [
        Turn(
            session_id=f"s{number}",
            number=0,
            arrival_s=0.0,
            num_input_tokens=num_tokens,
            num_output_tokens=num_out,
            hash_ids=tuple(range(number * num_blocks, (number + 1) * num_blocks)),
        )
        for number in range(num)
    ]
    return Workload(name=f"{num} x {num_tokens}", block_size=BLOCK_SIZE, turns=tuple(turns))


def run(
    engine: str, num_tokens: int, num_out: int, num: int, rules: QueueRules | None
) -> BubbleRun:
    """Simulate one; seconds."""
    setup = Setup(
        num_replicas=NUM_REPLICAS,
        num_blocks=NUM_BLOCKS,
        engine=engine,
        load=None,
        to_engine_s=0.005,
        event_lag_s=0.02,
        queue=rules,
    )
    found = simulate(draw(num, num_tokens, num_out), create("kv_aware"), setup)
    return BubbleRun(
        engine=engine, num_tokens=num_tokens, num_out=num_out, rules=rules, span_s=found.span_s
    )


def report(runs: Sequence[BubbleRun]) -> str:
    """Lay the runs out: in each cell by how much longer it took than without the queue."""
    rows = []
    for engine, num_tokens, num_out in dict.fromkeys(
        (one.engine, one.num_tokens, one.num_out) for one in runs
    ):
        took_s = {
            one.rules: one.span_s
            for one in runs
            if (one.engine, one.num_tokens, one.num_out) == (engine, num_tokens, num_out)
        }
        off_s = took_s.get(None)
        cells = [
            f"{took_s[rules] / off_s - 1.0:+.1%}" if off_s and rules in took_s else ""
            for rules in RULES
        ]
        rows.append((f"`{engine}`", f"{num_tokens:,}, {num_out}", *cells))
    header = ("engine", "prompt, answer", *[_label(rules) for rules in RULES])
    return table(header, rows)


def _label(rules: QueueRules) -> str:
    ready = f", `ready_ms` {rules.ready_ms:g}" if rules.ready_ms else ""
    return f"`window` {rules.window}{ready}"


def run_all(found: Callable[[BubbleRun], None]) -> None:
    """Simulate all, one after the other."""
    for engine, (num_tokens, num_out, num) in product(ENGINES, PROMPTS):
        for rules in (None, *RULES):
            found(run(engine, num_tokens, num_out, num, rules))


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the table; after Ctrl-C that of what is done."""
    argparse.ArgumentParser(
        prog="python -m loadtest.studies.bubble", description=(__doc__ or "").split("\n")[0]
    ).parse_args(argv)
    runs: list[BubbleRun] = []

    def measure(progress: Progress) -> None:
        interrupt_on_sigterm()
        task = progress.add_task("", total=len(ENGINES) * len(PROMPTS) * (1 + len(RULES)))

        def found(one: BubbleRun) -> None:
            runs.append(one)
            progress.advance(task)

        run_all(found)

    code = measured(measure, Console(stderr=True))
    if runs:
        print(report(runs))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
