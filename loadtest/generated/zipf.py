"""Long contexts of unequal popularity, for a map of cache pressure.

Every request asks something new about one of the contexts, which Zipf's law chooses. The k-th most
popular context is asked `k ** -skew` times as often as the first. With skew 0 all are equal. The
pressure is the blocks of all contexts over the blocks of all caches.
"""

from __future__ import annotations

import random
from itertools import accumulate

from msgspec import Struct

from loadtest.agents import MARKUP_TOKENS, lognormal
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Done, Script
from loadtest.timing import poisson
from loadtest.workload import Workload


class Zipf(Struct, frozen=True, kw_only=True):
    """Requests to sessions whose contexts do not grow."""

    num_requests: int | None = None  # None: four for each session, but at least 2,000
    working_set_blocks: int = 40_000  # of all contexts together
    skew: float = 1.0
    rate: float = 4.0  # requests per second, a Poisson process
    num_context_tokens: int = 8_192  # of one session; rounded up to blocks
    num_task_tokens: int = 300  # of a request's own, median
    num_output_tokens: int = 200  # median
    block_size: int = 512
    seed: int = 0

    @property
    def num_sessions(self) -> int:
        """Count the contexts that make up the working set."""
        return max(1, round(self.working_set_blocks / self._num_context_blocks))

    @property
    def _num_context_blocks(self) -> int:
        return -(-self.num_context_tokens // self.block_size)

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        dice = random.Random(f"{self.seed}/zipf")
        arrivals = poisson(self.rate, random.Random(f"{self.seed}/arrivals"))
        script = Script(self.block_size)
        root = Prefix(self.block_size)
        num_tokens = self._num_context_blocks * self.block_size
        contexts = [root.fork().grow(num_tokens) for _ in range(self.num_sessions)]
        weights = list(accumulate(k**-self.skew for k in range(1, self.num_sessions + 1)))
        last: dict[int, Done] = {}
        for _ in range(self.num_requests or max(2_000, 4 * self.num_sessions)):
            (rank,) = dice.choices(range(self.num_sessions), cum_weights=weights)
            arrival_s, done = next(arrivals), last.get(rank)
            prefix = contexts[rank].fork().grow(MARKUP_TOKENS)
            prefix.grow(max(1, round(lognormal(dice, self.num_task_tokens, 0.5))))
            num_output_tokens = round(lognormal(dice, self.num_output_tokens, 0.8))
            last[rank] = script.say(
                f"z{rank}",
                prefix,
                max(1, num_output_tokens),
                num_known_tokens=num_tokens if done else 0,
                after=(done,) if done else (),
                wait_s=max(0.0, arrival_s - done.at_s) if done else 0.0,
                arrival_s=arrival_s,
            )
        return script.workload(
            f"zipf, skew {self.skew:g}, {self.working_set_blocks:,} blocks, seed {self.seed}"
        )
