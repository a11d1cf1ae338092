"""Memory of what the router remembers: an indexed block, and a prompt's token.

Each in a process of its own, as growth of its resident memory: one holder with 1,000,000 blocks
that came as events; agents' conversations of 80,000 tokens, their tokens and their chain, until
2,000,000 tokens are remembered.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import click
import psutil

from loadtest.bench.bench_ingest import messages, new_stream
from loadtest.bench.conversations import growing
from loadtest.bench.fake_engine import BLOCK_SIZE
from loadtest.bench.measures import Budget, Line
from loadtest.bench.setting import TINY_MODEL, Setting
from router.index.block_index import BlockIndex
from router.tokens import load_prompter

_BATCH: Final = 1_000
_CONTEXT_TOKENS: Final = 80_000


def run(setting: Setting) -> list[Line]:
    """Measure."""
    num_blocks = setting.size(1_000_000, 20_000)
    num_tokens = setting.size(2_000_000, 80_000)
    results = {}
    for what, num in setting.track((("blocks", num_blocks), ("tokens", num_tokens)), "memory"):
        command = [sys.executable, "-m", "loadtest.bench.bench_memory", what, str(num)]
        done = subprocess.run(
            [*command, "--model", str(setting.model_dir)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        results[what] = [float(number) for number in done.stdout.split()]
    block_bytes, num_blocks_held = results["blocks"]
    token_bytes, num_tokens_held, estimate_bytes = results["tokens"]
    return [
        Line(
            what=f"index memory per block, one holder of {num_blocks_held:,.0f}",
            unit="bytes",
            num_samples=1,
            value=block_bytes,
            budgets=(Budget("value", 80.0),),
            note="growth of resident memory",
        ),
        Line(
            what=f"memory per remembered prompt token, {num_tokens_held:,.0f} tokens",
            unit="bytes",
            num_samples=1,
            value=token_bytes,
            note=f"the router's own estimate: {estimate_bytes:.1f}; blocks of {BLOCK_SIZE}",
        ),
    ]


@click.command()
@click.argument("what", type=click.Choice(["blocks", "tokens"]))
@click.argument("num", type=int)
@click.option("--model", type=click.Path(path_type=Path), default=TINY_MODEL)
def main(what: str, num: int, model: Path) -> None:
    """Print what one of NUM things takes, in bytes, and how many there were."""
    figures = _blocks(num) if what == "blocks" else _tokens(num, model)
    click.echo(" ".join(str(figure) for figure in figures))


def _blocks(num: int) -> tuple[float, int]:
    index = BlockIndex()
    stream = new_stream(index)
    source = messages("map", _BATCH, 1, seed=1, removes=False)
    for sequence in range(5):  # what the first batches need is not the blocks'
        stream.receive(1 + sequence, next(source))
    before_bytes, num_before = _rss_bytes(), index.num_blocks(stream.candidate)
    for sequence in range(5, num // _BATCH):
        stream.receive(1 + sequence, next(source))
    num_blocks = index.num_blocks(stream.candidate)
    return (_rss_bytes() - before_bytes) / (num_blocks - num_before), num_blocks


def _tokens(num: int, model: Path) -> tuple[float, int, float]:
    prompter = load_prompter(str(model), local_files_only=True, cache_tokens=1 << 31)
    next(growing(prompter, "first", _CONTEXT_TOKENS, 0))
    before_bytes, before_estimate = _rss_bytes(), prompter.size_bytes
    num_tokens = number = 0
    while num_tokens < num:
        prepared = next(growing(prompter, f"memory-{number}", _CONTEXT_TOKENS, 0))
        num_tokens += prepared.num_tokens - 11_500  # the shared part is remembered once
        number += 1
    grown_bytes = _rss_bytes() - before_bytes
    estimate_bytes = (prompter.size_bytes - before_estimate) / num_tokens
    return grown_bytes / num_tokens, num_tokens, estimate_bytes


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
