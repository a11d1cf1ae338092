"""Rounds of a simulation: each variant simulates the same workload, again with other bytes."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.simulator.arms import Arm
from loadtest.simulator.outcome import Simulated
from loadtest.simulator.setup import Setup
from loadtest.simulator.simulation import simulate
from loadtest.workload import TurnKey, Workload

_CACHE_RATIO: Final = 0.5  # of what the sessions write
_ROOM: Final = 1.5  # the longest turn fits even alone
_JITTER_S: Final = 1e-3
_IDS: Final = 1 << 63  # hash ids stay below
_STEP: Final = 0x9E3779B97F4A7C15 >> 1  # rounds' ids lie far apart


def simulate_rounds(
    workload: Workload, arms: Sequence[Arm], setup: Setup, num_rounds: int = 1
) -> tuple[list[Simulated], bool]:
    """Simulate each variant in each round, with a bar on stderr.

    Returns:
        What is done, and whether that is all of it: Ctrl-C ends the rest.
    """
    done: list[Simulated] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        total = len(workload.turns) * len(arms) * num_rounds
        task = progress.add_task("simulating", total=total)
        try:
            for number in range(1, num_rounds + 1):
                for arm in arms:
                    progress.update(task, description=arm.label)
                    own = replace(setup, seed=setup.seed + number - 1, queue=arm.queue_rules())
                    if arm.is_unlimited:
                        own = replace(own, num_blocks=written_blocks(workload))
                    one = simulate(
                        varied(workload, number, seed=setup.seed),
                        arm.make_policy(),
                        own,
                        label=arm.label,
                        advance=lambda num: progress.advance(task, num),
                    )
                    info = replace(one.run.info, round=number)
                    done.append(replace(one, run=replace(one.run, info=info)))
        except KeyboardInterrupt:
            return done, False
    return done, True


def varied(workload: Workload, number: int, *, seed: int) -> Workload:
    """Change the block ids, and times by up to a millisecond, from the second round on.

    A repeated simulation would give the same result. These changes leave the workload the same, so
    they show how much of a result is chance, as repeated live runs do.
    """
    if number <= 1:
        return workload
    dice = random.Random(f"{seed}.{number}")
    offset = number * _STEP % _IDS
    arrivals: dict[TurnKey, float] = {}
    for turn in workload.turns:  # none before the turns that it waits for
        at_s = turn.arrival_s + dice.random() * _JITTER_S
        arrivals[turn.key] = max([at_s, *(arrivals[key] for key in turn.after)])
    turns = [
        replace(
            turn,
            arrival_s=arrivals[turn.key],
            wait_s=turn.wait_s + dice.random() * _JITTER_S if turn.after else turn.wait_s,
            hash_ids=tuple((block + offset) % _IDS for block in turn.hash_ids),
        )
        for turn in workload.turns
    ]
    return replace(workload, turns=tuple(sorted(turns, key=lambda turn: turn.arrival_s)))


def written_blocks(workload: Workload) -> int:
    """Count the blocks that the sessions write: a cache of this size never evicts."""
    replies = sum(turn.num_output_tokens // workload.block_size + 1 for turn in workload.turns)
    return _num_prompt_blocks(workload) + replies + 1


def half_of_the_blocks(workload: Workload, num_replicas: int) -> int:
    """Size a replica's cache so that all caches together hold half of what the sessions write."""
    replies = sum(turn.num_output_tokens for turn in workload.turns)
    written = _num_prompt_blocks(workload) * workload.block_size + replies
    longest = max(turn.num_input_tokens + turn.num_output_tokens for turn in workload.turns)
    num_tokens = max(_CACHE_RATIO * written / num_replicas, _ROOM * longest)
    return round(num_tokens / workload.block_size)


def _num_prompt_blocks(workload: Workload) -> int:
    return len({block for turn in workload.turns for block in turn.hash_ids})


def write_runs(out: Path, results: Sequence[Simulated]) -> None:
    """Write a run file for each result into a directory.

    Raises:
        OSError: It cannot be written.
    """
    from loadtest.runner.run_file import write_run  # late: it brings an HTTP client

    out.mkdir(parents=True, exist_ok=True)
    for simulated in results:
        info = simulated.run.info
        name = re.sub(r"[^\w.=-]+", "-", info.label)
        if info.round > 1:
            name += f"-{info.round}"
        write_run(out / f"{name}.jsonl", simulated.run)
