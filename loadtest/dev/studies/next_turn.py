"""Measure what computing the known beginning of the next turn early is worth, on real engines.

    python -m loadtest.dev.studies.next_turn --cells thinking --seeds 101 102 103

Agents with a person: each round is a message, some tool calls, and an answer that the person reads
before the next message. The history has reasoning, which the chat template leaves out once the next
message is there. Variants run in turn before cold caches, with the same sessions. Answers of rounds
are the engine's own text; tool calls and reasoning are scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Final

import httpx
import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from loadtest import agent_text
from loadtest.agents import Turn, lognormal
from loadtest.dev.studies import pair
from loadtest.dev.studies.cells import NUM_BLOCKS, Prefill
from loadtest.dev.studies.measured import interrupt_on_sigterm
from loadtest.results import TurnResult, percentile
from loadtest.runner.sending import make_client
from loadtest.runner.sessions import send_turn
from loadtest.runner.stack import start_replicas, start_router
from loadtest.tiny_model import MODEL_DIR

_VARIANTS: Final = {"off": ["--early", "off"], "auto": ["--early", "auto"]}
_COUNTER: Final = re.compile(
    r'^warmroute_early(?:_tokens)?_total\{(?:result|kind)="(\w+)"\} (\S+)$', re.M
)


class Cell(Struct, frozen=True, kw_only=True):
    """One setting; seconds are medians."""

    num_engines: int = 2
    prefill: Prefill = "slow"
    has_pool: bool = False
    tier: float = 0.0  # blocks of a CPU tier over a replica's cache
    num_sessions: int = 6
    num_rounds: int = 3
    num_calls: int = 5  # of a round
    num_result_tokens: int = 350
    num_reasoning_tokens: int = 80  # 0: none
    pause_s: float = 6.0
    tool_s: float = 0.3


CELLS: Final = {
    "thinking": Cell(),
    "fast": Cell(prefill="fast"),
    "fast plain": Cell(prefill="fast", num_reasoning_tokens=0),
    "pool": Cell(has_pool=True),
    "pool plain": Cell(has_pool=True, num_reasoning_tokens=0),
    "tier": Cell(tier=4.0),
    "tier plain": Cell(tier=4.0, num_reasoning_tokens=0),
    "one": Cell(num_engines=1, num_sessions=3),
    "plain": Cell(num_reasoning_tokens=0),
    "smoke": Cell(num_engines=1, prefill="fast", num_sessions=2, num_rounds=2, pause_s=2.0),
    "busy": Cell(num_sessions=14, pause_s=3.0, num_rounds=2),
}


class Step(Struct, frozen=True):
    """One measured turn: `kind` is start, call or return (behind a person's pause)."""

    kind: str
    result: TurnResult


class Run(Struct, frozen=True, kw_only=True):
    """All turns of one run, and what the router counted."""

    cell: str
    seed: int
    variant: str
    span_s: float
    steps: list[Step]
    counts: dict[str, float]


def _words() -> list[int]:
    """List tokens that are words, for answers that end with a stop string."""
    vocabulary = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab()
    return sorted(
        i for text, i in vocabulary.items() if re.fullmatch(r"Ġ[a-z]*[aeio][a-z]*", text)
    )[:400]


_STOPS: Final = [*"aeio"]


class _Person:
    """One conversation."""

    def __init__(self, cell: Cell, seed: int, index: int, words: list[int]) -> None:
        self.id = f"s{index}"
        self._cell, self._words = cell, words
        self._rng = random.Random(f"{seed}/{index}")
        system, self._tools = agent_text.preamble(1_000, variant=str(seed))
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self._number = 0

    async def run(self, client: Any, found: list[Step], origin_s: float) -> None:
        cell, rng = self._cell, self._rng
        await asyncio.sleep(rng.uniform(0.0, cell.pause_s))
        for number in range(cell.num_rounds):
            if number:
                await asyncio.sleep(min(3 * cell.pause_s, lognormal(rng, cell.pause_s, 0.4)))
            task = agent_text.task(rng, rng.randrange(60, 200))
            self._messages.append({"role": "user", "content": task})
            kind = "return" if number else "start"
            for call in range(max(1, rng.randrange(cell.num_calls - 2, cell.num_calls + 3))):
                await self._turn(client, found, origin_s, kind, is_last=False)
                kind = "call"
                self._call(call)
                await asyncio.sleep(lognormal(rng, cell.tool_s, 0.5))
            reply = await self._turn(client, found, origin_s, kind, is_last=True)
            self._messages.append({"role": "assistant", "content": reply, **self._thought()})

    def _thought(self) -> dict[str, str]:
        num_tokens = self._cell.num_reasoning_tokens
        if not num_tokens:
            return {}
        num_tokens = round(lognormal(self._rng, num_tokens, 0.6))
        return {"reasoning": agent_text.code(self._rng, num_tokens)}

    def _call(self, number: int) -> None:
        rng = self._rng
        name = rng.choice(self._tools)["function"]["name"]
        call = agent_text.tool_call(rng, name, number, f"call_{self.id}_{self._number}")
        self._messages.append(
            {"role": "assistant", "content": "", "tool_calls": [call], **self._thought()}
        )
        num_tokens = min(2_000, round(lognormal(rng, self._cell.num_result_tokens, 0.8)))
        result = agent_text.code(rng, num_tokens)
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def _turn(
        self, client: Any, found: list[Step], origin_s: float, kind: str, *, is_last: bool
    ) -> str:
        body: dict[str, Any] = {
            "model": "tiny", "messages": list(self._messages), "tools": self._tools,
            "temperature": 0,
        }  # fmt: skip
        if is_last:
            body |= {"max_tokens": 60, "min_tokens": 24, "stop": _STOPS}
            body |= {"allowed_token_ids": self._words}
        else:
            body |= {"max_tokens": 16, "ignore_eos": True}
        turn = Turn(session_id=self.id, number=self._number, wait_s=0.0, body=body)
        self._number += 1
        result, reply = await send_turn(
            client, turn, session_header=pair.SESSION_HEADER, origin_s=origin_s
        )
        if result.error is not None:
            raise RuntimeError(f"{result.error}: {result.error_message}")
        found.append(Step(kind, result))
        return reply


async def on_engines(engines: pair.Pair, name: str, seed: int, variant: str, log_dir: Path) -> Run:
    """Run one variant before cold caches of real engines."""
    engines.clear()
    urls = [each.url for each in engines.engines[: CELLS[name].num_engines]]
    return await run(urls, name, seed, variant, log_dir, engines.options)


async def on_emulators(preset: str, name: str, seed: int, variant: str, log_dir: Path) -> Run:
    """Run one variant before fresh emulated engines."""
    flags = ["--preset", preset, "--block-size", "32", "--num-gpu-blocks", str(NUM_BLOCKS)]
    flags += ["--reply-tokens", "32", "--max-num-batched-tokens", "2048"]
    async with start_replicas(flags, CELLS[name].num_engines, log_dir) as replicas:
        urls = [child.announced[1] for child in replicas]
        return await run(urls, name, seed, variant, log_dir)


async def run(
    urls: Sequence[str],
    name: str,
    seed: int,
    variant: str,
    log_dir: Path,
    options: Sequence[str] = (),
) -> Run:
    """Run one variant's sessions."""
    cell, words = CELLS[name], _words()
    steps: list[Step] = []
    async with start_router(urls, [*_VARIANTS[variant], *options], log_dir) as router:
        origin_s = monotonic()
        async with make_client(timeout_s=300.0, base_url=router.url) as client:
            async with asyncio.TaskGroup() as tg:
                for index in range(cell.num_sessions):
                    person = _Person(cell, seed, index, words)
                    tg.create_task(person.run(client, steps, origin_s))
        span_s = monotonic() - origin_s
        async with httpx.AsyncClient(trust_env=False) as scraper:
            text = (await scraper.get(f"{router.url}/metrics")).text
    counts = {name: float(number) for name, number in _COUNTER.findall(text)}
    return Run(cell=name, seed=seed, variant=variant, span_s=span_s, steps=steps, counts=counts)


def table(runs: Sequence[Run]) -> str:
    """Write a table, one line a run."""
    lines = [
        "| cell | seed | early | span | turns | mean TTFT, returns | P90 | mean TTFT, all | P90 "
        "| computed while waiting, returns | all | early tokens | results |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in runs:
        back = [step.result for step in each.steps if step.kind == "return"]
        every = [step.result for step in each.steps]
        cols: list[str] = [
            each.cell,
            str(each.seed),
            each.variant,
            f"{each.span_s:.0f}",
            str(len(every)),
        ]
        for some in (back, every):
            ttfts = sorted(result.ttft_s or 0.0 for result in some)
            cols += [f"{fmean(ttfts):.3f}", f"{percentile(ttfts, 0.9):.3f}"]
        cols += [str(sum(r.num_computed_tokens for r in some)) for some in (back, every)]
        cols += [f"{each.counts.get('sent', 0):.0f}"]
        cols += [" ".join(f"{k}={v:.0f}" for k, v in each.counts.items())]
        lines.append(f"| {' | '.join(cols)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.dev.studies.next_turn", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="settings")
    asked.add_argument("--seeds", nargs="+", type=int, default=[1], help="of the sessions")
    asked.add_argument(
        "--variants", nargs="+", choices=_VARIANTS, default=list(_VARIANTS), help="early.mode"
    )
    asked.add_argument("--emulate", metavar="PRESET", help="emulated engines with this time model")
    asked.add_argument("--most-s", type=float, default=3600.0, help="start no run after that")
    asked.add_argument("--json", type=Path, help="write every run there")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells and print a table."""
    args = parser().parse_args(argv)
    interrupt_on_sigterm()
    end_s = monotonic() + args.most_s
    runs: list[Run] = []

    def found(one: Run) -> None:
        runs.append(one)
        print(table([one]).split("\n")[-1], flush=True)
        if args.json is not None:
            args.json.write_bytes(msgspec.json.encode(runs))

    with tempfile.TemporaryDirectory(prefix="next-turn-") as folder:
        log_dir = Path(folder)
        if args.emulate is not None:
            for name, seed, variant in order_of(args.cells, args.seeds, args.variants):
                if monotonic() < end_s:
                    found(asyncio.run(on_emulators(args.emulate, name, seed, variant, log_dir)))
        else:
            for prefill, has_pool, tier in sorted({_engines_of(name) for name in args.cells}):
                names = [
                    each for each in args.cells if _engines_of(each) == (prefill, has_pool, tier)
                ]
                with pair.running(
                    log_dir, has_pool=has_pool, prefill=prefill, tier=tier
                ) as engines:
                    for name, seed, variant in order_of(names, args.seeds, args.variants):
                        if monotonic() < end_s:
                            found(asyncio.run(on_engines(engines, name, seed, variant, log_dir)))
    print(table(runs))
    return 0


def _engines_of(name: str) -> tuple[Prefill, bool, float]:
    """Return what decides which engines a cell needs."""
    cell = CELLS[name]
    return cell.prefill, cell.has_pool, cell.tier


def order_of(
    names: Sequence[str], seeds: Sequence[int], variants: Sequence[str]
) -> Iterator[tuple[str, int, str]]:
    """Yield the runs in their order: every cell with a seed, the variants in turn."""
    for number, seed in enumerate(seeds):
        for name in names:
            for variant in variants if number % 2 == 0 else variants[::-1]:
                yield name, seed, variant


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
