"""Small workloads for the simulator's tests."""

from __future__ import annotations

import random

from loadtest.workload import Turn, Workload

SIZE = 512


def conversations(num_sessions: int = 40, num_turns: int = 5, *, seed: int = 0) -> Workload:
    """Sessions behind one shared block, each growing by a few blocks a turn, tools in between."""
    dice = random.Random(seed)
    turns: list[Turn] = []
    next_id = 1
    for session in range(num_sessions):
        ids: tuple[int, ...] = (0,)
        arrival_s = dice.uniform(0.0, 60.0)
        for number in range(num_turns):
            num_new = dice.randint(2, 14)
            ids += tuple(range(next_id, next_id + num_new))
            next_id += num_new
            turns.append(
                Turn(
                    session_id=f"s{session}",
                    number=number,
                    arrival_s=arrival_s,
                    num_input_tokens=SIZE * len(ids) - dice.randint(0, SIZE - 1),
                    num_output_tokens=dice.randint(1, 200),
                    hash_ids=ids,
                    after=((f"s{session}", number - 1),) if number else (),
                    wait_s=3.0 if number else 0.0,
                )
            )
            arrival_s += dice.uniform(3.0, 20.0)
    turns.sort(key=lambda turn: turn.arrival_s)
    return Workload(name="conversations", block_size=SIZE, turns=tuple(turns))


def turn(number: int, arrival_s: float, ids: tuple[int, ...], **fields: object) -> Turn:
    """One turn of a session of its own, of full blocks and ten tokens more."""
    given: dict[str, object] = {
        "session_id": f"s{number}",
        "number": 0,
        "arrival_s": arrival_s,
        "num_input_tokens": SIZE * len(ids) + 10,
        "num_output_tokens": 20,
        "hash_ids": (*ids, 10**9 + number),
    }
    return Turn(**(given | fields))  # type: ignore[arg-type]


def workload(*turns: Turn) -> Workload:
    return Workload(name="few", block_size=SIZE, turns=turns)
