"""Faults on command: which of the next requests fails, and how.

What must not live here: faults of the whole replica (app, emulator). A fault is armed for `count`
requests, or for each request with `probability`, or until it is cleared. The same seed and the same
order of requests give the same faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from loadtest.emulator.wire import ApiError

RequestFault = Literal[
    "die_before", "die_after", "abort", "hang", "refuse", "status", "first_event_error",
    "kill_before",
]  # fmt: skip
FaultKind = Literal[
    RequestFault, "slow", "drop_events", "silence_events", "hang_probes", "truncate_replay",
    "garbage_events", "restart", "kill",
]  # fmt: skip
REQUEST_FAULTS: Final[frozenset[str]] = frozenset(get_args(RequestFault))


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One switch.

    Each generation request, `count` times or by chance or until cleared. With `text`: only requests
    whose body has it. With `pooled`: only requests that would read from the pool.

        die_before        Close the connection instead of answering.
        die_after         Close it after `after_tokens` tokens.
        hang              Never answer, until the client leaves.
        refuse            Answer 503.
        status            Answer HTTP status `status`, with vLLM's error body.
        kill_before       End the whole replica instead of answering, as `kill` does.
        first_event_error A stream: 200, then an error event of `status`; else as `status`.
        abort             Give the request up after `after_tokens` tokens (0: before any), and end
                          the answer as vLLM does: with status 200 and a finish_reason "abort".

    At once:

        slow              Multiply step times by `factor` (1.0: as before).
        drop_events       Number the next `count` event batches but do not send them: a gap.
        silence_events    Send no events until `clear`.
        hang_probes       Never answer `/health` and `/metrics`, until `clear`.
        truncate_replay   Drop all but the last `num_kept` batches of the replay buffer.
        garbage_events    Publish `count` batches that no engine sends: nested 5,000 deep, no
                          msgpack, no events, empty; in turn.
        restart           Lose cache and requests, and number events from 0. The replica is down
                          for `down_s`, then back on the same address, or on `port`.
        kill              End without closing connections.
    """

    kind: FaultKind
    count: int | None = None
    probability: float | None = None
    after_tokens: int = 1
    status: int = 500
    factor: float = 10.0
    num_kept: int = 0
    down_s: float = 0.0
    text: str = ""
    pooled: bool = False
    port: int | None = None


class Faults:
    """The armed request faults."""

    __slots__ = ("_armed", "_dice", "num_fired", "on_kill")

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._armed: list[tuple[Fault, int | None]] = []  # with how often it still fires
        self.num_fired = 0
        self.on_kill: Callable[[], None] = lambda: None
        """Called when a request ends the replica."""

    def arm(self, fault: Fault) -> None:
        """Add a request fault; the one armed first fires first."""
        if fault.kind not in REQUEST_FAULTS:
            raise ValueError(f"{fault.kind} is not a fault of requests")
        self._armed.append((fault, fault.count))

    def clear(self) -> None:
        self._armed.clear()

    def armed(self) -> list[Fault]:
        """List the armed faults; `count` is how often each still fires."""
        return [replace(fault, count=left) for fault, left in self._armed]

    def next(self, body: bytes = b"", *, is_pooled: bool = False) -> Fault | None:
        """Return the fault of the next request; None: none.

        Called twice per request: with its body, and again if it reads from the pool.
        """
        for index, (fault, left) in enumerate(self._armed):
            if fault.pooled is not is_pooled or fault.text.encode() not in body:
                continue
            if fault.probability is not None and self._dice.random() >= fault.probability:
                continue
            if left is not None:
                if left <= 1:
                    del self._armed[index]
                else:
                    self._armed[index] = fault, left - 1
            self.num_fired += 1
            if fault.kind == "kill_before":
                self.on_kill()
            return fault
        return None


async def suffer(request: web.BaseRequest, fault: Fault) -> None:
    """Apply a fault before anything is computed; `die_after` and `abort` come later."""
    match fault.kind:
        case "refuse":
            raise ApiError(503, "emulated: refused", type="ServiceUnavailableError")
        case "status":
            raise ApiError(fault.status, f"emulated: status {fault.status}", type="EmulatedError")
        case "die_before":
            await hang_up(request)
        case "hang" | "kill_before":  # until its connection is cut
            await asyncio.Event().wait()
        case _:
            pass


async def poisoned(request: web.BaseRequest, extension: Mapping[str, Any]) -> Fault | None:
    """Fail a request on every replica: `"emulator": {"poison": KIND}`, a fault of requests."""
    kind: Any = extension.get("poison")
    if kind not in REQUEST_FAULTS:
        return None
    fault = Fault(kind=kind)
    await suffer(request, fault)
    return fault


async def hang_up(request: web.BaseRequest) -> None:
    """Cut the connection, and wait until aiohttp cancels the request for it."""
    if request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()


def generation_error(fault: Fault) -> ApiError:
    """Return the error of a `first_event_error`."""
    kind = "InternalServerError" if fault.status >= 500 else "BadRequestError"
    return ApiError(fault.status, "emulated: generation failed", type=kind)
