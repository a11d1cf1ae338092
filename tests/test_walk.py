"""What a plain streamed chat enters may only shrink: `python -m tests.walk` prints the numbers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Final

import msgspec

from tests.walk import ROOT, Walk

MOST: Final = Walk(num_files=72, num_calls=820, num_calls_after=175)
"""Lower these whenever the walk is shorter.

They rose twice, both on 2026-11-29: next prompts are computed early by default (4 files, 15 calls).
Conversations are admitted, a failing policy is replaced, and the last minute is counted.
"""

_MOST_RUNS: Final = 6
"""A run's calls differ by 20, because late events add some: one run within the limits is enough."""


async def test_a_chat_enters_no_more_than_it_did() -> None:
    """In a process of its own: a profile of this one would see other tests."""
    seen = []
    for _ in range(_MOST_RUNS):
        walk = await asyncio.to_thread(_walk)
        seen.append(walk)
        if (
            0 < walk.num_files <= MOST.num_files
            and 0 < walk.num_calls <= MOST.num_calls
            and 0 < walk.num_calls_after <= MOST.num_calls_after
        ):
            return
    raise AssertionError(f"{seen} exceed {MOST}")


def _walk() -> Walk:
    done = subprocess.run(
        [sys.executable, "-m", "tests.walk"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Walk)
