"""One system prompt for all, and otherwise unrelated chats.

A policy that follows the longest prefix alone sends everything to one replica.
"""

from __future__ import annotations

import random
from typing import Final

from msgspec import Struct

from loadtest.agents import MARKUP_TOKENS, lognormal
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Script
from loadtest.timing import poisson
from loadtest.workload import Workload

_THINKING_S: Final = 20.0  # of a person between two turns, median


class Shared(Struct, frozen=True, kw_only=True):
    """Chats that share a system prompt."""

    num_sessions: int = 500
    num_turns: int = 3  # median
    rate: float = 2.0  # sessions started per second, a Poisson process
    num_shared_tokens: int = 8_000
    num_task_tokens: int = 400  # of a question, median
    num_output_tokens: int = 300  # median
    block_size: int = 512
    seed: int = 0

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        dice = random.Random(f"{self.seed}/shared")
        starts = poisson(self.rate, random.Random(f"{self.seed}/starts"))
        script = Script(self.block_size)
        shared = Prefix(self.block_size).grow(self.num_shared_tokens)
        for session in range(self.num_sessions):
            prefix, done, start_s = shared.fork(), None, next(starts)
            for _ in range(max(1, round(lognormal(dice, self.num_turns, 0.6)))):
                prefix.grow(max(1, round(lognormal(dice, self.num_task_tokens, 1.0))))
                prefix.grow(MARKUP_TOKENS)
                num_output_tokens = round(lognormal(dice, self.num_output_tokens, 0.8))
                done = script.say(
                    f"s{session}",
                    prefix,
                    max(1, num_output_tokens),
                    num_known_tokens=done.num_input_tokens if done else shared.num_tokens,
                    after=(done,) if done else (),
                    wait_s=lognormal(dice, _THINKING_S, 1.0) if done else 0.0,
                    arrival_s=None if done else start_s,
                )
        return script.workload(f"shared, {self.num_sessions} sessions, seed {self.seed}")
