"""What is asked for: the command line as numbers, and the sessions of a cell."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from loadtest.agents import Profile
from loadtest.engines.vllm import BLOCK_SIZE
from loadtest.studies.cells import NUM_ENGINES, Cell
from loadtest.studies.draw import Draw, draw

Device = Literal["gpu", "cpu"]

FIRST_SEED: Final = 101  # nothing is tuned on these
_LONGEST: Final = 1.6  # a session's context at most, over the median
_SLACK: Final = 1.2  # texts are cut by an estimate of their tokens
_NUM_TURNS: Final = 12


class Setting(Struct, frozen=True, kw_only=True):
    """One study. Tokens of caches are of one replica."""

    device: Device = "gpu"
    model: str = "qwen3-4b"
    num_replicas: int = 2
    num_context_tokens: int = 50_000  # at a session's end, in the median
    num_cache_tokens: int = 160_000
    working_sets: tuple[float, ...] = (1.7, 0.6, 3.0)
    arms: tuple[str, ...] = (
        "round_robin", "session_hash", "kv_aware:queue.mode=off", "kv_aware",
    )  # fmt: skip
    think_s: float = 2.0
    minutes: float = 12.0
    num_rounds: int | None = None  # None: as many as the minutes allow
    prefill_lengths: tuple[int, ...] = (2_000, 10_000, 25_000, 60_000)
    hand_over_lengths: tuple[int, ...] = (25_000, 80_000)
    num_repeats: int = 5  # of what is measured by single requests
    offload_gib: float = 0.0  # of each replica; 0: no CPU tier

    @property
    def num_blocks(self) -> int:
        """Blocks of one replica's cache."""
        return self.num_cache_tokens // BLOCK_SIZE

    @property
    def max_model_len(self) -> int:
        """Longest prompt that replicas take, in tokens."""
        longest = max(
            _LONGEST * self.num_context_tokens, *self.prefill_lengths, *self.hand_over_lengths, 0
        )
        return -(-round(_SLACK * longest + 1_000) // BLOCK_SIZE) * BLOCK_SIZE

    def check(self) -> None:
        """Check what the numbers have to do with each other.

        Raises:
            ValueError: the cache cannot hold one prompt, or a number is not positive.
        """
        if min(self.minutes, self.num_context_tokens, self.num_repeats, *self.working_sets) <= 0:
            raise ValueError("minutes, tokens, repeats and working sets must be above 0")
        if self.num_replicas < 2:
            raise ValueError(f"--replicas {self.num_replicas}: routing needs at least 2")
        if self.num_cache_tokens < self.max_model_len:
            raise ValueError(
                f"--cache-tokens {self.num_cache_tokens}: one prompt may have "
                f"{self.max_model_len:,} tokens and has to fit"
            )

    def cells(self) -> list[LongCell]:
        """List the cells, in the order in which they run."""
        return [
            LongCell(
                working_set=working_set,
                num_context_tokens=self.num_context_tokens,
                think_s=self.think_s,
            )
            for working_set in self.working_sets
        ]

    def draw(self, cell: LongCell, seed: int) -> Draw:
        """Draw a cell's sessions; a draw counts in caches of two engines."""
        num_usable = self.num_blocks - 1  # vLLM keeps one, the null block
        return draw(cell, seed, num_usable * self.num_replicas // NUM_ENGINES)


class LongCell(Cell, frozen=True, kw_only=True):
    """A cell whose sessions grow to long contexts."""

    num_context_tokens: int
    think_s: float

    @property
    def name(self) -> str:
        """Name the cell as tables do."""
        return f"working set {self.working_set:g} times the caches"

    @property
    def longest_wait_s(self) -> float:
        """Bound a wait: runs are to end."""
        return 6 * self.think_s

    def profile(self, seed: int) -> Profile:
        """Describe sessions that end at about the cell's context.

        15 % is shared by all sessions, two large results have 12 % each, and the other turns 5 % in
        the median.
        """
        context = self.num_context_tokens
        return Profile(
            num_turns=_NUM_TURNS,
            turns_sigma=0.35,
            seed=seed,
            num_shared_tokens=round(0.15 * context),
            num_task_tokens=max(100, round(0.01 * context)),
            num_large_result_tokens=round(0.12 * context),
            num_result_tokens=round(0.05 * context),
            result_sigma=0.8,
            max_result_tokens=round(0.2 * context),
            num_output_tokens=48,
            output_sigma=0.5,
            max_output_tokens=128,
            max_context_tokens=round(_LONGEST * context),
            tool_wait_s=self.think_s,
            tool_wait_sigma=1.0,
            ramp_s=0.0,
            sub_agent_share=0.0,
            extra_body={"ignore_eos": True},
        )
