"""How soon bursts of siblings have their first tokens, on two real engines with slow prefill.

    python -m loadtest.studies.siblings --seeds 5 6 7 8

In a burst so many requests come at once, as when an agent starts its sub-agents: they share a long
prefix that no cache has, and each has a part of its own. The next burst comes when all are
answered. Every variant gets the same prompts from cold caches; who goes first alternates. The first
bursts do not count: from them a router learns how quick its engines are and, in a pause, that such
conversations do not go on. Real engines need tests/engines/install.sh.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Final

import aiohttp
import orjson
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from loadtest.compare.arms import arm_of
from loadtest.markdown import table
from loadtest.results import TurnResult, summarize
from loadtest.runner import sending
from loadtest.runner.exchange import Exchange
from loadtest.runner.requests import COMPLETIONS
from loadtest.studies.grid_run import DEFAULT, WITHOUT_QUEUE
from loadtest.studies.measured import add_arms, interrupt_on_sigterm, measured
from loadtest.studies.pair import SESSION_HEADER, Arm, Pair, running

_NUM_WARM_UPS: Final = 3  # bursts
_PAUSE_S: Final = 17.0  # after them: a silent conversation is over after 15 s
_TOKENS: Final = range(300, 8_000)  # no special ones
_NUM_OUTPUT_TOKENS: Final = 20
_SILENCE_S: Final = 120.0
_HEADER: Final = ("arm", "TTFT mean, s", "longest, s", "tokens computed")


class Bursts(Struct, frozen=True, kw_only=True):
    """What is sent: sizes in tokens."""

    num_bursts: int = 6
    num_siblings: int = 16
    num_shared_tokens: int = 6_000
    own_tokens: tuple[int, int] = (600, 1_200)  # least, most

    def draw(self, seed: int) -> list[list[list[int]]]:
        """Draw the prompts, by burst and sibling; same arguments, same prompts."""
        dice = random.Random(f"{seed}/siblings")

        def tokens(num: int) -> list[int]:
            return [dice.choice(_TOKENS) for _ in range(num)]

        bursts = []
        for _ in range(_NUM_WARM_UPS + self.num_bursts):
            shared = tokens(self.num_shared_tokens)
            own = [tokens(dice.randint(*self.own_tokens)) for _ in range(self.num_siblings)]
            bursts.append([shared + each for each in own])
        return bursts


class Run(Struct, frozen=True):
    """One arm's answers to the bursts of one seed, without the first ones."""

    arm: str
    seed: int
    siblings: list[TurnResult]


async def send(
    pair: Pair, arm: Arm, seed: int, bursts: Sequence[Sequence[Sequence[int]]], progress: Progress
) -> Run:
    """Send bursts through a fresh router to cold caches.

    Raises:
        ChildDied, RuntimeError, TimeoutError: something did not start, or does not answer.
    """
    task = progress.add_task(f"{seed}: {arm.label}", total=len(bursts))
    found: list[TurnResult] = []
    async with (
        pair.in_front(arm) as url,
        sending.make_client(timeout_s=_SILENCE_S, base_url=url) as client,
    ):
        for number, prompts in enumerate(bursts):
            if number == _NUM_WARM_UPS:
                await asyncio.sleep(_PAUSE_S)
                found.clear()
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(_ask(client, prompt, f"{number}-{index}"))
                    for index, prompt in enumerate(prompts)
                ]
            for each in [one.result() for one in asked]:
                if each.error is not None:
                    raise RuntimeError(f"{arm.label}: {each.error}: {each.error_message}")
                found.append(each)
            progress.advance(task)
    progress.remove_task(task)
    return Run(arm.label, seed, found)


async def _ask(client: aiohttp.ClientSession, prompt: Sequence[int], session: str) -> TurnResult:
    """Ask for some tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": _NUM_OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    exchange = Exchange(session, 0, start_s=monotonic())
    headers = {SESSION_HEADER: session}
    await sending.send(
        client, COMPLETIONS, orjson.dumps(body), exchange, monotonic, headers=headers
    )
    return exchange.result(monotonic())


def report(runs: Sequence[Run]) -> str:
    """Lay runs out by arm; means have the least and the greatest of the seeds'."""
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        ours = [run for run in runs if run.arm == arm]
        sums = [summarize(run.siblings) for run in ours]
        means = [each.ttft_mean_s for each in sums]
        spread = f" ({min(means):.2f} to {max(means):.2f})" if len(means) > 1 else ""
        longest_s = max(each.ttft_s or 0.0 for run in ours for each in run.siblings)
        num_tokens = sum(each.num_recomputed_tokens for each in sums)
        rows.append(
            [f"`{arm}`", f"{fmean(means):.2f}{spread}", f"{longest_s:.1f}", f"{num_tokens:,}"]
        )
    seeds = ", ".join(map(str, dict.fromkeys(run.seed for run in runs)))
    return f"{table(_HEADER, rows)}\n\nSeeds {seeds}."


def run_all(
    arms: Sequence[str],
    seeds: Sequence[int],
    shape: Bursts,
    found: Callable[[Run], None],
    progress: Progress,
) -> None:
    """Run every arm with every seed.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start, or does
            not answer.
    """
    with tempfile.TemporaryDirectory(prefix="siblings-") as folder:
        with running(Path(folder), has_pool=False, prefill="slow") as pair:
            for round_, seed in enumerate(seeds):
                bursts = shape.draw(seed)
                for label in arms if round_ % 2 == 0 else arms[::-1]:
                    found(asyncio.run(send(pair, Arm(label=label), seed, bursts, progress)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, and print the table; also of what was done before Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.studies.siblings", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arms(parser, (WITHOUT_QUEUE, DEFAULT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--bursts", type=int, default=Bursts().num_bursts, help="that count")
    parser.add_argument("--siblings", type=int, default=Bursts().num_siblings, help="in a burst")
    args = parser.parse_args(argv)
    if min(args.bursts, args.siblings) < 1:
        parser.error("--bursts, --siblings: at least 1")
    try:
        for label in args.arms:
            arm_of(label)
    except ValueError as exc:
        parser.error(f"--arms: {exc}")
    shape = Bursts(num_bursts=args.bursts, num_siblings=args.siblings)
    runs: list[Run] = []
    interrupt_on_sigterm()
    run = partial(run_all, args.arms, args.seeds, shape, runs.append)
    code = measured(run, Console(stderr=True))
    if runs:
        print(report(runs))
    return code


if __name__ == "__main__":
    sys.exit(main())
