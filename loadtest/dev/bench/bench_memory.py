"""Memory of an indexed block: one holder with 1,000,000 that came as events.

Measured in a process of its own, as growth of its resident memory.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import click
import psutil

from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.setting import Setting
from loadtest.dev.bench.streams import messages, new_stream
from router.index.block_index import BlockIndex

_BATCH: Final = 1_000


def run(setting: Setting) -> list[Line]:
    """Measure."""
    num = setting.size(1_000_000, 20_000)
    command = [sys.executable, "-m", "loadtest.dev.bench.bench_memory", str(num)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    block_bytes, num_blocks = map(float, done.stdout.split())
    return [
        Line(
            what=f"index memory per block, one holder of {num_blocks:,.0f}",
            unit="bytes",
            num_samples=1,
            value=block_bytes,
            budgets=(Budget("value", 80.0),),
            note="growth of resident memory",
        )
    ]


@click.command()
@click.argument("num", type=int)
def main(num: int) -> None:
    """Print the bytes of one of NUM blocks, and how many there were."""
    index = BlockIndex()
    stream = new_stream(index)
    source = messages(_BATCH)
    for sequence in range(5):  # memory of the first batches is not the blocks' own
        stream.receive(1 + sequence, next(source))
    before_bytes, num_before = _rss_bytes(), index.num_blocks(stream.candidate)
    for sequence in range(5, num // _BATCH):
        stream.receive(1 + sequence, next(source))
    num_blocks = index.num_blocks(stream.candidate)
    click.echo(f"{(_rss_bytes() - before_bytes) / (num_blocks - num_before)} {num_blocks}")


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
