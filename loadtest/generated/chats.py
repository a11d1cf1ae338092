"""Chats of persons: most conversations have one turn, and pauses take minutes.

The distributions are fitted to Mooncake's conversation trace (FAST'25, 12,031 requests in an hour):

                       trace: P25, P50, P75, P90, P99        here
    turns              69 % one, 18 % two, 6 % three         the chance of a further turn, by number
    first prompt       1.3k, 5.3k, 13k, 26k, 90k tokens      lognormal(5.3k, 1.25), 850 to 126k
    further words      0, 24, 431, 4.3k, 17k                 7 in 10 are short: lognormal(15, 0.8);
                                                             else lognormal(2.2k, 1.7), at most 20k
    answer             156, 350, 472, 597, 1,120             3 in 10 short: lognormal(60, 0.9);
                                                             else lognormal(420, 0.35), at most 2k
    pause              54, 112, 254, 473, 1,475 s            lognormal(112, 1.12)
    conversations      2.1 a second                          a Poisson process
"""

from __future__ import annotations

import random
from typing import Final

from msgspec import Struct

from loadtest.agents import lognormal
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Done, Script
from loadtest.timing import poisson
from loadtest.workload import Workload

_RETURNS: Final = (0.31, 0.42, 0.51, 0.59)  # after the first turn, the second, …; then the last
_SHARED_TOKENS: Final = 512  # the trace's first block is the same in all of them
_MIN_TOKENS: Final = 850
_MAX_TOKENS: Final = 126_000
_MAX_WORDS: Final = 20_000
_MAX_ANSWER: Final = 2_000


class Chats(Struct, frozen=True, kw_only=True):
    """Conversations of persons, as they come."""

    num_sessions: int = 1_000
    rate: float = 2.1  # conversations started per second, a Poisson process
    scale_tokens: float = 1.0
    block_size: int = 512
    seed: int = 0

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        script = Script(self.block_size)
        chats(script, self)
        return script.workload(f"chats, {self.num_sessions} sessions, seed {self.seed}")


def chats(script: Script, asked: Chats, name: str = "c") -> None:
    """Write the conversations down; their names begin with `name`."""
    dice = random.Random(f"{asked.seed}/chats")
    starts = poisson(asked.rate, random.Random(f"{asked.seed}/starts"))

    def scaled(num_tokens: float) -> int:
        return max(1, round(num_tokens * asked.scale_tokens))

    shared = Prefix(script.block_size).grow(scaled(_SHARED_TOKENS))
    for number in range(asked.num_sessions):
        start_s = next(starts)
        prefix = shared.fork().grow(scaled(_first_prompt(dice) - _SHARED_TOKENS))
        done: Done | None = None
        num_turns = 0
        while done is None or dice.random() < _RETURNS[min(num_turns, len(_RETURNS)) - 1]:
            wait_s = 0.0
            if done is not None:
                wait_s = lognormal(dice, 112.0, 1.12)
                prefix.grow(scaled(_further_words(dice)))
            if prefix.num_tokens > scaled(_MAX_TOKENS):
                break
            done = script.say(
                f"{name}{number}",
                prefix,
                scaled(_answer(dice)),
                num_known_tokens=done.num_input_tokens if done else shared.num_tokens,
                after=(done,) if done else (),
                wait_s=wait_s,
                arrival_s=None if done else start_s,
            )
            num_turns += 1


def _first_prompt(dice: random.Random) -> float:
    return min(_MAX_TOKENS, max(_MIN_TOKENS, lognormal(dice, 5_300.0, 1.25)))


def _further_words(dice: random.Random) -> float:
    if dice.random() < 0.7:
        return lognormal(dice, 15.0, 0.8)
    return min(_MAX_WORDS, lognormal(dice, 2_200.0, 1.7))


def _answer(dice: random.Random) -> float:
    drawn = lognormal(dice, 60.0, 0.9) if dice.random() < 0.3 else lognormal(dice, 420.0, 0.35)
    return min(_MAX_ANSWER, drawn)
