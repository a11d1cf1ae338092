"""What a plain streamed chat enters may only shrink: `python -m tests.walk` prints the numbers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Final

import msgspec

from tests.walk import ROOT, Walk

MOST: Final = Walk(num_files=114, num_calls=840, num_calls_after=180)
"""Lower these whenever the walk is shorter. A run's calls differ by 20: events may be late.

They rose twice, both on 2026-11-29: next prompts are computed early by default (4 files, 15 calls).
Conversations are admitted, a failing policy is replaced, and the last minute is counted.
"""


async def test_a_chat_enters_no_more_than_it_did() -> None:
    """In a process of its own: a profile of this one would see other tests."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.walk"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    walk = msgspec.json.decode(done.stdout.splitlines()[-1], type=Walk)

    assert 0 < walk.num_files <= MOST.num_files
    assert 0 < walk.num_calls <= MOST.num_calls
    assert 0 < walk.num_calls_after <= MOST.num_calls_after
