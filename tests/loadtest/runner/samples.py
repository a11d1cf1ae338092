"""Small workloads, prompts for them, and streamed answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from aiohttp import web

from loadtest.workload import Turn, TurnKey, Workload

BLOCK_SIZE = 16
DONE = b"data: [DONE]\n\n"


class IdPrompts:
    """Spells hash ids as token ids: block `h` is the ids from 16 h on."""

    def body(self, turn: Turn) -> dict[str, Any]:
        ids = itertools.chain.from_iterable(
            range(100 + h * BLOCK_SIZE, 100 + (h + 1) * BLOCK_SIZE) for h in turn.hash_ids
        )
        return {"prompt": list(itertools.islice(ids, turn.num_input_tokens))}


def turn(
    session: str,
    number: int,
    arrival_s: float = 0.0,
    *after: TurnKey,
    wait_s: float = 0.0,
    hash_ids: tuple[int, ...] = (1,),
    num_input_tokens: int | None = None,
    num_output_tokens: int = 3,
) -> Turn:
    if num_input_tokens is None:
        num_input_tokens = BLOCK_SIZE * len(hash_ids)
    return Turn(
        session_id=session,
        number=number,
        arrival_s=arrival_s,
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        hash_ids=hash_ids,
        after=after,
        wait_s=wait_s,
    )


def workload(*turns: Turn) -> Workload:
    return Workload(name="made up", block_size=BLOCK_SIZE, turns=turns)


def burst(count: int, every_s: float = 0.0) -> Workload:
    """`count` sessions of one turn."""
    return workload(*(turn(f"s{i}", 0, i * every_s) for i in range(count)))


def chain(count: int, wait_s: float = 0.0) -> Workload:
    """One session whose turns grow by a block each."""
    turns = [turn("s", 0, hash_ids=(1,))]
    for number in range(1, count):
        blocks = tuple(range(1, number + 2))
        turns.append(turn("s", number, 0.0, ("s", number - 1), wait_s=wait_s, hash_ids=blocks))
    return workload(*turns)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def word(text: str = " w") -> bytes:
    return event({"choices": [{"text": text, "finish_reason": None}]})


def usage(prompt: int = 16, cached: int | None = 0) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 3}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


async def answer(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    """Stream an answer, each piece in a write of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    return response


async def good(request: web.Request) -> web.StreamResponse:
    """Answer as an engine would: three tokens, usage."""
    return await answer(request, word(), word(), word(), usage(), DONE)
