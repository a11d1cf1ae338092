"""A large fleet in one router: 64 replicas of 1,000,000 blocks each, in a process of its own.

What a block takes there, what a match over all 64 takes in an index that no cache holds, and what
it takes to bring a replica's million blocks in (a snapshot of another router's) and out (for a
journal that begins anew): in slices, since requests are served in between, so the longest slice is
how long they wait. CPU time; needs 6 GB.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import click
import msgspec
import numpy as np
import psutil
from msgspec import Struct

from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.setting import Setting
from policies.view import CandidateId
from router.contracts import KEY_BITS, BlockKey
from router.index.block_index import BlockIndex
from router.index.staged_blocks import StagedBlocks

_SLICE: Final = 10_000
_CHAIN_BLOCKS: Final = 6_250  # 100,000 tokens
_NUM_CHAINS: Final = 20
_ENDS: Final = (8, 64)
_NUM_TAKEN: Final = 8  # replicas whose blocks are brought in and out again


class _Figures(Struct):
    block_bytes: float
    match_us: dict[int, list[float]]  # by the number of different ends
    load_ms: list[float]  # a whole snapshot
    load_slice_ms: list[float]
    swap_us: list[float]
    sweep_slice_ms: list[float]
    contents_ms: list[float]  # all of one replica's
    contents_slice_ms: list[float]


def run(setting: Setting) -> list[Line]:
    """Measure."""
    num_replicas, num_blocks = setting.size(64, 8), setting.size(1_000_000, 20_000)
    figures = None
    for size in setting.track([(num_replicas, num_blocks)], "a large fleet"):
        command = [sys.executable, "-m", "loadtest.bench.bench_scale", *map(str, size)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        figures = msgspec.json.decode(done.stdout, type=_Figures)
    assert figures is not None
    where = f"{num_replicas} replicas x {num_blocks:,} blocks"
    return [
        Line(
            what=f"index memory per block, {where}",
            unit="bytes",
            num_samples=1,
            value=figures.block_bytes,
            budgets=(Budget("value", 80.0),),
            note="growth of resident memory",
        ),
        *(
            distribution(
                f"match alone, {where}, a chain of {_CHAIN_BLOCKS:,}, {num_ends} different ends",
                "µs",
                samples,
                note="every sample another chain",
            )
            for num_ends, samples in figures.match_us.items()
        ),
        distribution(f"load a snapshot of {num_blocks:,} blocks", "ms", figures.load_ms),
        _slices("load a snapshot, one slice", figures.load_slice_ms),
        distribution("swap in a snapshot", "µs", figures.swap_us),
        _slices("free what was swapped out, one slice", figures.sweep_slice_ms),
        distribution(f"pack contents of {num_blocks:,} blocks", "ms", figures.contents_ms),
        _slices("pack contents, one slice", figures.contents_slice_ms),
    ]


def _slices(what: str, samples_ms: list[float]) -> Line:
    return distribution(
        what, "ms", samples_ms, Budget("max", 20.0), note=f"the loop stalls; {_SLICE:,} blocks"
    )


@click.command()
@click.argument("num_replicas", type=int)
@click.argument("num_blocks", type=int)
def main(num_replicas: int, num_blocks: int) -> None:
    """Build a fleet's index and print the figures as JSON."""
    ids = [CandidateId(f"r{number + 1}") for number in range(num_replicas)]
    index = BlockIndex()
    before_bytes = _rss_bytes()
    for number, id_ in enumerate(ids):
        index.replace(id_, _loaded(number, num_blocks)[0])
    grown_bytes = _rss_bytes() - before_bytes
    figures = _Figures(
        block_bytes=grown_bytes / sum(index.num_blocks(id_) for id_ in ids),
        match_us={num_ends: _match_us(index, ids, num_ends) for num_ends in _ENDS},
        load_ms=[],
        load_slice_ms=[],
        swap_us=[],
        sweep_slice_ms=[],
        contents_ms=[],
        contents_slice_ms=[],
    )
    for number, id_ in enumerate(ids[:_NUM_TAKEN]):
        _bring_in_and_out(index, id_, num_replicas + number, num_blocks, figures)
    click.echo(msgspec.json.encode(figures))


def _bring_in_and_out(
    index: BlockIndex, id_: CandidateId, seed: int, num_blocks: int, figures: _Figures
) -> None:
    staged, slices_ms = _loaded(seed, num_blocks)
    figures.load_ms.append(sum(slices_ms))
    figures.load_slice_ms += slices_ms
    figures.swap_us.append(_taken_ms(lambda: index.replace(id_, staged)) * 1e3)
    is_more = True
    while is_more:
        start_s = time.thread_time()
        is_more = index.sweep(_SLICE)
        figures.sweep_slice_ms.append((time.thread_time() - start_s) * 1e3)
    slices = index.contents(id_, _SLICE)
    slices_ms = []
    while True:
        start_s = time.thread_time()
        if next(slices, None) is None:
            break
        slices_ms.append((time.thread_time() - start_s) * 1e3)
    figures.contents_ms.append(sum(slices_ms))
    figures.contents_slice_ms += slices_ms


def _loaded(seed: int, num_blocks: int) -> tuple[StagedBlocks, list[float]]:
    """Load random blocks slice by slice; also return how long each took."""
    keys = np.random.default_rng(seed).integers(0, 1 << KEY_BITS, num_blocks, dtype=np.uint64)
    staged = StagedBlocks()
    slices_ms = []
    for start in range(0, num_blocks, _SLICE):
        part = keys[start : start + _SLICE]
        slices_ms.append(_taken_ms(lambda part=part: staged.add("gpu", part)))  # type: ignore[misc]
    return staged, slices_ms


def _match_us(index: BlockIndex, ids: list[CandidateId], num_ends: int) -> list[float]:
    """Match chains whose prefixes end at so many places, each for the first time."""
    rng = random.Random(num_ends)
    ends = [rng.randrange(1, _CHAIN_BLOCKS) for _ in range(num_ends)]
    chains = []
    for _ in range(_NUM_CHAINS):
        chain = [BlockKey(rng.getrandbits(KEY_BITS)) for _ in range(_CHAIN_BLOCKS)]
        for number, id_ in enumerate(ids):
            index.store(id_, chain[: ends[number % num_ends]])
        chains.append(chain)
    return [_taken_ms(lambda chain=chain: index.match(chain, ids)) * 1e3 for chain in chains]  # type: ignore[misc]


def _taken_ms(work: Callable[[], object]) -> float:
    start_s = time.thread_time()
    work()
    return (time.thread_time() - start_s) * 1e3


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
