"""The sessions of one cell and seed: as conversations to send, and as blocks to simulate.

Both are the same to the token. Prompts are rendered and tokenized as an engine with the tiny model
does, with scripted replies. Blocks of equal tokens behind equal blocks have equal ids.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.agent_text import preamble
from loadtest.agents import Profile, Session, TurnPlan, plan_session
from loadtest.dev.studies.cells import BLOCK_SIZE, NUM_ENGINES, NUM_USABLE_BLOCKS, Cell
from loadtest.emulator.tokens import ChatTokenizer
from loadtest.tiny_model import MODEL_DIR
from loadtest.workload import Turn, Workload

RAMP_S: Final = 4.0  # sessions start spread over it
_MAX_SESSIONS: Final = 500


class Draw(Struct, frozen=True, kw_only=True):
    """The sessions of one run.

    `num_ideal_tokens` have to be computed with one cache that never evicts.
    """

    cell: Cell
    seed: int
    num_blocks: int  # that one engine can use
    profile: Profile
    plans: tuple[tuple[TurnPlan, ...], ...]  # by session; the first wait is until it starts
    workload: Workload
    num_footprint_tokens: int
    num_ideal_tokens: int

    @property
    def working_set(self) -> float:
        """Footprint over both caches, as drawn."""
        return self.num_footprint_tokens / (NUM_ENGINES * self.num_blocks * BLOCK_SIZE)

    def sessions(self) -> list[Session]:
        """Make the sessions again, each before its first turn."""
        return [session_of(self.profile, index, plans) for index, plans in enumerate(self.plans)]


def draw(cell: Cell, seed: int, num_blocks: int = NUM_USABLE_BLOCKS) -> Draw:
    """Draw as many sessions as make the cell's working set; same arguments, same draw.

    This holds for one Python release, because sessions read its standard library (`agent_text`).
    The last session is cut, turn by turn, to come close to the working set.
    """
    profile = cell.profile(seed)
    blocks = _Blocks()
    wanted = round(cell.working_set * NUM_ENGINES * num_blocks)
    plans: list[tuple[TurnPlan, ...]] = []
    said: list[list[_Said]] = []
    num_ideal_tokens = 0
    while blocks.num < wanted and len(plans) < _MAX_SESSIONS:
        plan = _plan(cell, profile, len(plans))
        taken: list[_Said] = []
        for turn in _play(session_of(profile, len(plans), plan)):
            before = blocks.num
            if taken and before >= wanted:
                break
            ids, num_new_tokens = blocks.add(turn)
            if taken and blocks.num - wanted > wanted - before:
                blocks.forget(before)
                break
            num_ideal_tokens += num_new_tokens
            taken.append(_Said(ids, len(turn)))
        plans.append(plan[: len(taken)])
        said.append(taken)
    dice = random.Random(f"{seed}/starts")
    starts_s = (0.0, *sorted(dice.uniform(0.0, RAMP_S) for _ in plans[1:]))
    plans = [
        (replace(first, wait_s=start_s), *others)
        for (first, *others), start_s in zip(plans, starts_s, strict=True)
    ]
    return Draw(
        cell=cell,
        seed=seed,
        num_blocks=num_blocks,
        profile=profile,
        plans=tuple(plans),
        workload=_workload(cell, seed, plans, said),
        num_footprint_tokens=blocks.num * BLOCK_SIZE,
        num_ideal_tokens=num_ideal_tokens,
    )


class _Said(Struct, frozen=True):
    """One prompt: its full blocks' ids, and its tokens."""

    ids: list[int]
    num_tokens: int


class _Blocks:
    """Ids of blocks: equal tokens behind an equal block have an equal id."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def num(self) -> int:
        return len(self._ids)

    def add(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return the ids of a prompt's full blocks, and how many of its tokens are new."""
        ids: list[int] = []
        num_known_blocks = 0
        parent = -1
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = parent, tuple(tokens[start : start + BLOCK_SIZE])
            known = self._ids.get(block)
            if known is not None:
                num_known_blocks += 1
            parent = self._ids.setdefault(block, len(self._ids))
            ids.append(parent)
        # An engine computes at least a prompt's last token.
        num_known_blocks = min(num_known_blocks, (len(tokens) - 1) // BLOCK_SIZE)
        return ids, len(tokens) - num_known_blocks * BLOCK_SIZE

    def forget(self, num: int) -> None:
        """Drop the latest blocks, so that `num` are left."""
        for block in [block for block, id_ in self._ids.items() if id_ >= num]:
            del self._ids[block]


def _plan(cell: Cell, profile: Profile, index: int) -> tuple[TurnPlan, ...]:
    plans = plan_session(profile, index)
    longest_s = cell.longest_wait_s
    return tuple([replace(plan, wait_s=min(plan.wait_s, longest_s)) for plan in plans])


def session_of(profile: Profile, index: int, plans: tuple[TurnPlan, ...]) -> Session:
    """Make a session that says what is planned, before its first turn."""
    system, tools = preamble(profile.num_shared_tokens, variant=str(profile.seed))
    return Session(
        profile, f"s{index}", plans, [{"role": "system", "content": system}], tools, None
    )


def _play(session: Session) -> list[list[int]]:
    """Return the tokens of each of a session's prompts."""
    prompts = []
    while (turn := session.next_turn()) is not None:
        prompts.append(_tokens(turn.body))
        session.advance(None)
    return prompts


def _tokens(body: dict[str, Any]) -> list[int]:
    tokenizer = _tokenizer()
    return tokenizer.encode(tokenizer.render(body["messages"], tools=body["tools"])).ids


@lru_cache(maxsize=1)
def _tokenizer() -> ChatTokenizer:
    return ChatTokenizer(MODEL_DIR)


def _workload(
    cell: Cell,
    seed: int,
    plans: Sequence[tuple[TurnPlan, ...]],
    said: Sequence[Sequence[_Said]],
) -> Workload:
    turns = []
    num_partial = 0
    for index, (plan, prompts) in enumerate(zip(plans, said, strict=True)):
        arrival_s = 0.0
        for number, (turn, prompt) in enumerate(zip(plan, prompts, strict=True)):
            ids = tuple(prompt.ids)
            if prompt.num_tokens % BLOCK_SIZE:
                num_partial += 1
                ids = (*ids, -num_partial)  # the last block, partial: like no other
            arrival_s += turn.wait_s
            turns.append(
                Turn(
                    session_id=f"s{index}",
                    number=number,
                    arrival_s=arrival_s,
                    num_input_tokens=prompt.num_tokens,
                    num_output_tokens=turn.num_output_tokens,
                    hash_ids=ids,
                    after=((f"s{index}", number - 1),) if number else (),
                    wait_s=turn.wait_s if number else 0.0,
                )
            )
    turns.sort(key=lambda turn: turn.arrival_s)
    return Workload(name=f"{cell.name}, seed {seed}", block_size=BLOCK_SIZE, turns=tuple(turns))
