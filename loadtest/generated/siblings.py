"""Bursts of siblings: several requests at once that share a long prefix no replica has seen.

An agent does that if it starts sub-agents, or a user who asks for several answers. A policy that
knows only what caches hold already sends the siblings apart, and each replica computes the same.
"""

from __future__ import annotations

import random

from msgspec import Struct

from loadtest.agents import MARKUP_TOKENS, lognormal
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Script
from loadtest.timing import poisson, tool_waits
from loadtest.workload import Workload


class Siblings(Struct, frozen=True, kw_only=True):
    """Bursts of siblings, each a session of its own."""

    num_bursts: int = 100
    num_siblings: int = 8  # in a burst
    num_turns: int = 1  # of each sibling; further ones follow after tools, as agents do
    rate: float = 0.5  # bursts per second, a Poisson process
    num_context_tokens: int = 20_000  # that the siblings of one burst share
    num_shared_tokens: int = 2_000  # that all have in front of it
    num_task_tokens: int = 200  # of each sibling, median
    num_output_tokens: int = 300  # median
    block_size: int = 512
    seed: int = 0

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        dice = random.Random(f"{self.seed}/siblings")
        waits = tool_waits(random.Random(f"{self.seed}/waits"))
        starts = poisson(self.rate, random.Random(f"{self.seed}/starts"))
        script = Script(self.block_size)
        shared = Prefix(self.block_size).grow(self.num_shared_tokens)
        for burst in range(self.num_bursts):
            context = shared.fork().grow(self.num_context_tokens)
            start_s = next(starts)
            for k in range(self.num_siblings):
                session_id, prefix = f"b{burst}.{k}", context.fork()
                done = None
                for _ in range(self.num_turns):
                    num_task_tokens = round(lognormal(dice, self.num_task_tokens, 0.5))
                    prefix.grow(max(1, num_task_tokens) + MARKUP_TOKENS)
                    num_output_tokens = round(lognormal(dice, self.num_output_tokens, 0.8))
                    done = script.say(
                        session_id,
                        prefix,
                        max(1, num_output_tokens),
                        num_known_tokens=done.num_input_tokens if done else 0,
                        after=(done,) if done else (),
                        wait_s=next(waits) if done else 0.0,
                        arrival_s=None if done else start_s,
                    )
        return script.workload(
            f"siblings, {self.num_bursts} bursts of {self.num_siblings}, seed {self.seed}"
        )
