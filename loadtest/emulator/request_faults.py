"""What a fault does to a request; whose turn it is: loadtest.emulator.faults."""

from __future__ import annotations

import asyncio

from aiohttp import web

from loadtest.emulator.faults import REQUEST_FAULTS, Fault
from loadtest.emulator.wire import ApiError, GenerationParams


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


async def poisoned(request: web.BaseRequest, params: GenerationParams) -> Fault | None:
    """Fail a request wherever it goes: `"emulator": {"poison": KIND}`, a fault of requests."""
    kind = params.extension.get("poison")
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
