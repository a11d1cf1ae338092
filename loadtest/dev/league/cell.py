"""One setting: replicas, the traffic before them, and how long it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from loadtest.generated import Agents, Chats, Mixed
from loadtest.generated.agents import mean_context_tokens
from loadtest.timing import Timing
from loadtest.traces.reading import read_workload
from loadtest.workload import Turn, Workload

Engines = Literal["real", "emulated", "simulated"]
Prefill = Literal["fast", "slow"]
Kind = Literal["agents", "agents-5s", "chats", "mixed"]

_SPREAD_S: Final = 3.0  # Mooncake's traces are rounded to it


class Cell(Struct, frozen=True, kw_only=True):
    """What all routers of a table have in common.

    `working_set` is the mean contexts of all live agents over the caches of all replicas. Lengths
    and `num_output_tokens` are unscaled; `scale` applies to all of them.
    """

    engines: Engines = "real"
    num_replicas: int = 2
    num_blocks: int = 1_200  # of one replica
    block_size: int = 32
    prefill: Prefill = "slow"  # of real replicas
    preset: str = "cpu-slow"  # of the others
    tier: float = 0.0  # CPU tier over the cache; 0: none
    has_pool: bool = False
    kind: Kind = "agents"
    trace: str | None = None  # a file that chats are read from; None: they are generated
    working_set: float = 1.7
    num_live: int | None = None  # agents; None: as `working_set` says
    num_turns: int = 30  # of an agent, in the median
    num_output_tokens: int = 300  # of an agent's answer, in the median
    scale: float = 1.0  # of lengths
    scale_time: float = 1.0  # of chats' arrivals and pauses
    rate: float = 1.0  # chats that begin in a second
    warm_up_s: float = 60.0
    seconds: float = 150.0

    @property
    def loop(self) -> Literal["open", "closed"]:
        """Say how turns come: chats at their times, agents after their answers."""
        return "open" if self.kind == "chats" else "closed"

    @property
    def span_s(self) -> float:
        """How long turns are sent."""
        return self.warm_up_s + self.seconds

    @property
    def live(self) -> int:
        """Count the agents that are at work at any time."""
        if self.num_live is not None:
            return self.num_live
        room = self.num_replicas * (self.num_blocks - 1) * self.block_size
        mean = mean_context_tokens(self._agents(0).profile)
        return max(1, round(self.working_set * room / mean))

    def workload(self, seed: int) -> Workload:
        """Make the traffic of a seed."""
        if self.kind == "chats":
            return self._chats(seed)
        agents = self._agents(seed)
        if self.kind != "mixed":
            return replace(agents, num_live=self.live, span_s=self.span_s).workload()
        return Mixed(
            num_live=self.live,
            span_s=self.span_s,
            rate=self.rate,
            num_turns=self.num_turns,
            num_output_tokens=self.num_output_tokens,
            scale_tokens=self.scale,
            block_size=self.block_size,
            seed=seed,
        ).workload()

    def _agents(self, seed: int) -> Agents:
        return Agents(
            num_turns=self.num_turns,
            num_output_tokens=self.num_output_tokens,
            pauses="tools" if self.kind == "agents-5s" else "short",
            sub_agent_share=0.0,
            scale_tokens=self.scale,
            block_size=self.block_size,
            seed=seed,
        )

    def _chats(self, seed: int) -> Workload:
        """Read or generate chats, at their rate and with their pauses, both by `scale_time`."""
        if self.trace is not None:
            timing = Timing(spread_s=_SPREAD_S, scale_time=self.scale_time, seed=seed)
            read = scaled_tokens(read_workload(Path(self.trace), timing=timing), self.scale)
        else:
            read = Chats(
                num_sessions=max(1, round(self.rate * self.span_s)),
                rate=self.rate * self.scale_time,  # the scale below gives `rate` again
                scale_tokens=self.scale,
                block_size=self.block_size,
                seed=seed,
            ).workload()
            read = replace(read, turns=tuple(_sooner(turn, self.scale_time) for turn in read.turns))
        return replace(
            read, turns=tuple(turn for turn in read.turns if turn.arrival_s < self.span_s)
        )


def _sooner(turn: Turn, factor: float) -> Turn:
    return replace(turn, arrival_s=turn.arrival_s * factor, wait_s=turn.wait_s * factor)


def scaled_tokens(workload: Workload, factor: float) -> Workload:
    """Scale all lengths, and the blocks with them, so that ids stay what they are."""
    size = max(1, round(workload.block_size * factor))
    exact = size / workload.block_size
    turns = [
        replace(
            turn,
            num_input_tokens=max(
                (len(turn.hash_ids) - 1) * size + 1, round(turn.num_input_tokens * exact)
            ),
            num_output_tokens=max(1, round(turn.num_output_tokens * factor)),
        )
        for turn in workload.turns
    ]
    return replace(workload, block_size=size, turns=tuple(turns))
