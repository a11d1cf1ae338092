"""Faults on command: which of the next requests goes wrong, and how.

What must live here: the switches and whose turn it is. What must not: doing it (app, emulator).
A fault is armed for `count` requests, or for each request with `probability`, or until cleared.
Same seed and same order of requests, same faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from loadtest.emulator.wire import ApiError

FaultKind = Literal[
    "die_before",
    "die_after",
    "hang",
    "refuse",
    "status",
    "first_event_error",
    "slow",
    "drop_events",
    "silence_events",
    "hang_probes",
    "truncate_replay",
    "garbage_events",
    "restart",
    "kill",
    "kill_before",
]

REQUEST_FAULTS: Final = frozenset(
    {"die_before", "die_after", "hang", "refuse", "status", "first_event_error", "kill_before"}
)


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One switch.

    Per generation request (`text`: only those whose body has it; `pooled`: only those that would
    read from the pool), `count` times or by chance or until cleared:
        die_before        close the connection instead of answering
        die_after         close it after `after_tokens` tokens
        hang              never answer (until the client goes)
        refuse            503
        status            HTTP status `status`, with vLLM's error body
        kill_before       end the whole replica instead of answering, as `kill` does
        first_event_error a stream: 200, then an error event of `status`; else as `status`
    At once:
        slow              multiply step times by `factor` (1.0: as before)
        drop_events       number the next `count` event batches but do not send them: a gap
        silence_events    send no events until `clear`
        hang_probes       never answer `/health` and `/metrics`, until `clear`
        truncate_replay   forget all but the last `num_kept` batches of the replay buffer
        garbage_events    publish `count` batches that no engine sends: nested 5,000 deep, no
                          msgpack, no events, empty; in turn
        restart           empty cache, events from 0 again, requests lost; gone for `down_s`,
                          then back on the same address, or on `port`
        kill              end without saying goodbye
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
    """The armed request faults, asked once per generation request."""

    __slots__ = ("_armed", "_dice", "num_fired", "on_kill")

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._armed: list[tuple[Fault, int | None]] = []  # with how often it still fires
        self.num_fired = 0
        self.on_kill: Callable[[], None] = lambda: None
        """Called when a request ends the replica."""

    def arm(self, fault: Fault) -> None:
        """Add a request fault; those armed first go first."""
        if fault.kind not in REQUEST_FAULTS:
            raise ValueError(f"{fault.kind} is not a fault of requests")
        self._armed.append((fault, fault.count))

    def clear(self) -> None:
        self._armed.clear()

    def armed(self) -> list[Fault]:
        """List what is armed; `count` is what is left of it."""
        return [replace(fault, count=left) for fault, left in self._armed]

    def next(self, body: bytes = b"", *, is_pooled: bool = False) -> Fault | None:
        """Return what befalls the next request; None: nothing.

        Asked twice per request: with its body, and again if it reads from the pool.
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
    """Do what a fault does before anything is computed; `die_after` comes later."""
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
    kind = extension.get("poison")
    if kind not in REQUEST_FAULTS:
        return None
    fault = Fault(kind=kind)
    await suffer(request, fault)
    return fault


async def hang_up(request: web.BaseRequest) -> None:
    """Cut the connection; what follows is the cancellation that a lost connection brings."""
    if request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()


def generation_error(fault: Fault) -> ApiError:
    """Return the error of a `first_event_error`."""
    kind = "InternalServerError" if fault.status >= 500 else "BadRequestError"
    return ApiError(fault.status, "emulated: generation failed", type=kind)
