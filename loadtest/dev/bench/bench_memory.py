"""Memory of an indexed block, and of a session in the ledger.

Blocks: one holder with 1,000,000 that came as events. Sessions: 80,000 tokens and 30 turns each.
Both are measured in processes of their own, as growth of their resident memory.
"""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Sequence
from typing import Final, cast

import click
import psutil

from loadtest.dev.bench.bench_ingest import messages, new_stream
from loadtest.dev.bench.conversations import CONTRACT
from loadtest.dev.bench.fake_engine import BLOCK_SIZE
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.setting import Setting
from policies.view import CandidateId
from router.api.part_digests import PartDigests
from router.base.contracts import BlockKey
from router.index.block_index import BlockIndex
from router.observers.sessions.session_ledger import SessionLedger
from router.observers.sessions.threads import Thread
from router.observers.sessions.turns import Turn
from router.records.computed import Computed

_BATCH = 1_000
_TOKENS: Final = 80_000
_TURNS: Final = 30
_REPLICA: Final = CandidateId("r1")


def run(setting: Setting) -> list[Line]:
    """Measure."""
    num = setting.size(1_000_000, 20_000)
    num_sessions = setting.size(1_000, 20)
    block_bytes, num_blocks = _measured("blocks", num)
    session_bytes, _ = _measured("sessions", num_sessions)
    return [
        Line(
            what=f"index memory per block, one holder of {num_blocks:,.0f}",
            unit="bytes",
            num_samples=1,
            value=block_bytes,
            budgets=(Budget("value", 80.0),),
            note="growth of resident memory",
        ),
        Line(
            what=f"a session of {_TOKENS:,} tokens and {_TURNS} turns, of {num_sessions:,}",
            unit="bytes",
            num_samples=1,
            value=session_bytes,
            note="growth of resident memory",
        ),
    ]


def _measured(what: str, num: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "loadtest.dev.bench.bench_memory", what, str(num)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    num_bytes, num_found = map(float, done.stdout.split())
    return num_bytes, num_found


@click.command()
@click.argument("what", type=click.Choice(["blocks", "sessions"]))
@click.argument("num", type=int)
def main(what: str, num: int) -> None:
    """Print the bytes of one of NUM, and how many there were."""
    if what == "blocks":
        _blocks(num)
    else:
        _sessions(num)


def _sessions(num: int) -> None:
    ledger = SessionLedger(max_sessions=num, max_bytes=1 << 40)
    before_bytes = _rss_bytes()
    for key in range(1, num + 1):
        last: Thread | None = None
        for number in range(1, _TURNS + 1):
            thread = _thread(key, number)
            ledger.remember(key, None, thread, num_computed=0, routing=key, replaces=last)
            ledger.add(key, _turn(key, number, thread.num_tokens))
            last = thread
    click.echo(f"{(_rss_bytes() - before_bytes) / num} {len(ledger)}")


def _thread(key: int, number: int) -> Thread:
    num_blocks = _TOKENS // BLOCK_SIZE * number // _TURNS
    return Thread(
        space=1,
        contract=CONTRACT,
        keys=cast("Sequence[BlockKey]", array("Q", range(key, key + num_blocks))),
        num_tokens=num_blocks * BLOCK_SIZE,
        parts=PartDigests(1, 2, 3, array("Q", range(2 * number)), 1, True),
        candidate=_REPLICA,
        num_emptied=0,
        at_s=0.0,
    )


def _turn(key: int, number: int, num_tokens: int) -> Turn:
    return Turn(
        request_id=f"{key:016x}{number:016x}",
        at=1e9,
        candidate=_REPLICA,
        model="model",
        outcome="ok",
        num_tokens=num_tokens,
        num_cached=num_tokens,
        num_output=300,
        computed=Computed(tokens={"new": 2_000, "last_block": 8}),
        total_ms=9_000.5,
        engine_ms=800.5,
    )


def _blocks(num: int) -> None:
    index = BlockIndex()
    stream = new_stream(index)
    source = messages("map", _BATCH, 1, seed=1, removes=False)
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
