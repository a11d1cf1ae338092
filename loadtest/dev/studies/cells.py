"""The settings of the grid on two small engines.

    working set     tokens of all sessions at their ends, shared prompt once, over both caches
    think           seconds between an answer and the session's next turn; mixed: short ones after
                    reads, longer ones after shells and web searches, long ones of persons
    pool            whether the engines share a Mooncake pool
    shared          tokens of system prompt and tools that all sessions begin with
    prefill         slow: a computed token costs about five times as much as fast (tiny model)
    turns           of a session, in the median; the more turns, the fewer tokens each
    tier            blocks of a CPU tier of vLLM's, over an engine's cache; 0: none

A cell is one combination of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final, Literal

from msgspec import Struct

from loadtest.agents import Pause, Profile

Think = Literal["short", "long", "mixed"]
Shared = Literal["small", "large"]
Prefill = Literal["fast", "slow"]

BLOCK_SIZE: Final = 32  # the CPU attention wants a multiple of 32
NUM_BLOCKS: Final = 1_200  # of one engine
UNLIMITED_BLOCKS: Final = 6_000  # as many as all sessions of a cell write
NUM_ENGINES: Final = 2
NUM_USABLE_BLOCKS: Final = NUM_BLOCKS - 1  # vLLM keeps one, the null block

WORKING_SETS: Final = (0.6, 1.0, 1.7, 3.0)
THINKS: Final[tuple[Think, ...]] = ("short", "long")
ALL_THINKS: Final[tuple[Think, ...]] = (*THINKS, "mixed")
POOLS: Final = (False, True)
SHARED: Final[tuple[Shared, ...]] = ("small", "large")
PREFILLS: Final[tuple[Prefill, ...]] = ("fast", "slow")
NUM_TURNS: Final = 30  # recorded agents have medians of 29 to 43
_RECORDED_TURNS: Final = 10  # of runs whose file does not say it

_THINK_S: Final[dict[Think, tuple[float, float, float]]] = {  # median, sigma, longest
    "short": (0.5, 0.5, 2.0),
    "long": (0.8, 1.2, 12.0),
    "mixed": (0.0, 0.0, 30.0),  # `_MIXED` instead
}
"""An over-committed cache of these engines turns over in 2 to 4 s; long waits outlast it."""
_MIXED: Final = (
    Pause(share=0.5, median_s=0.15, sigma=0.5),  # read
    Pause(share=0.3, median_s=1.0, sigma=0.8),  # shell
    Pause(share=0.1, median_s=3.0, sigma=0.6),  # web
    Pause(share=0.1, median_s=12.0, sigma=0.7),  # person
)
_SHARED_TOKENS: Final[dict[Shared, int]] = {"small": 1_000, "large": 6_000}


class Cell(Struct, frozen=True, kw_only=True):
    """One setting."""

    working_set: float
    think: Think = "short"
    has_pool: bool = False
    shared: Shared = "small"
    prefill: Prefill = "fast"
    num_turns: int = _RECORDED_TURNS
    tier: float = 0.0

    @property
    def name(self) -> str:
        """Name the setting as tables and files do."""
        pool = "pool" if self.has_pool else "no pool"
        slow = ", slow prefill" if self.prefill == "slow" else ""
        turns = f", {self.num_turns} turns" if self.num_turns != _RECORDED_TURNS else ""
        tier = f", CPU tier of {self.tier:g} caches" if self.tier else ""
        return (
            f"{self.working_set:g}, {self.think} think, {pool}, {self.shared} shared prompt"
            f"{slow}{turns}{tier}"
        )

    @property
    def is_bare(self) -> bool:
        """Whether nothing is behind the caches: no pool, no CPU tier."""
        return not self.has_pool and not self.tier

    @property
    def longest_wait_s(self) -> float:
        """Bound a wait: with fast prefill, runs of one cell end within a minute."""
        return _THINK_S[self.think][2]

    def profile(self, seed: int) -> Profile:
        """Describe the sessions: 7,000 tokens of their own at the end, however many turns.

        Replies are as long as drawn (`ignore_eos`), so all engines and policies do the same work.
        """
        median_s, sigma, _ = _THINK_S[self.think]
        fewer = _RECORDED_TURNS / self.num_turns
        return Profile(
            num_turns=self.num_turns,
            turns_sigma=0.3,
            seed=seed,
            num_shared_tokens=_SHARED_TOKENS[self.shared],
            num_task_tokens=400,
            num_large_result_tokens=900,
            num_result_tokens=round(350 * fewer),
            result_sigma=0.8,
            max_result_tokens=2_000,
            num_output_tokens=24,
            output_sigma=0.5,
            max_output_tokens=64,
            tool_wait_s=median_s,
            tool_wait_sigma=sigma,
            pauses=_MIXED if self.think == "mixed" else (),
            ramp_s=0.0,
            sub_agent_share=0.0,
            extra_body={"ignore_eos": True},
        )


def cells(
    conversations: Sequence[float] = WORKING_SETS,
    thinks: Sequence[Think] = THINKS,
    pools: Sequence[bool] = POOLS,
    shared: Sequence[Shared] = SHARED,
    prefills: Sequence[Prefill] = PREFILLS[:1],
    num_turns: int = NUM_TURNS,
    tiers: Sequence[float] = (0.0,),
) -> list[Cell]:
    """List the settings that the values make."""
    return [
        Cell(
            working_set=working_set,
            think=think,
            has_pool=has_pool,
            shared=size,
            prefill=prefill,
            num_turns=num_turns,
            tier=tier,
        )
        for prefill, has_pool, tier, size, think, working_set in product(
            prefills, pools, tiers, shared, thinks, conversations
        )
    ]
