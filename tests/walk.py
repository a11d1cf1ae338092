"""What a plain streamed chat enters: files, calls, and calls after its last byte.

    python -m tests.walk        print the numbers

tests/test_walk.py holds them against limits that may only fall. The chat is the fourth turn of a
conversation, with default settings and two emulated engines.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import uvloop
from msgspec import Struct

from tests.faults.stage import Engines, Json, chat, on_stage, streamed

ROOT: Final = Path(__file__).resolve().parent.parent
_INSIDE: Final = (f"{ROOT}/router/", f"{ROOT}/policies/")
_BESIDE: Final = (
    "kv_events", "discovery", "observers/live", "supervisor.py", "backoff.py", "garbage.py",
    "logs.py",
)  # fmt: skip
"""Side paths that run meanwhile: frames whose outermost caller is there do not count."""


class Walk(Struct, frozen=True, kw_only=True):
    """Of one chat."""

    num_files: int
    num_calls: int
    num_calls_after: int  # after its last byte


class _Walker:
    """Counts calls while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[tuple[str, bool]] = []  # file, and whether it is below `_finish`

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on or event != "call":
            return
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE):
            return
        outermost, is_after, back = name, False, frame.f_back
        while back is not None:
            if back.f_code.co_filename.startswith(_INSIDE):
                outermost = back.f_code.co_filename
                is_after = is_after or back.f_code.co_name == "_finish"
            back = back.f_back
        if not any(f"/{beside}" in outermost for beside in _BESIDE):
            self.calls.append((name, is_after))


def _turn(number: int) -> Json:
    return streamed(chat("hello there " * 60, *(["ok", "go on"] * number)))


async def walk() -> Walk:
    """Follow one chat."""
    walker = _Walker()
    async with Engines(2) as engines, on_stage(*engines) as stage:
        for number in range(3):
            await stage.ask(_turn(number))
        await stage.settled(*engines)
        sys.setprofile(walker.profile)
        walker.is_on = True
        try:
            await stage.ask(_turn(3))
            await asyncio.sleep(0.05)
        finally:
            walker.is_on = False
            sys.setprofile(None)
    return Walk(
        num_files=len({name for name, _ in walker.calls}),
        num_calls=len(walker.calls),
        num_calls_after=sum(is_after for _, is_after in walker.calls),
    )


if __name__ == "__main__":
    print(msgspec.json.encode(uvloop.run(walk())).decode())
