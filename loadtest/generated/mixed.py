"""Agents and persons at the same replicas: a constant number of agents, and chats as they come."""

from __future__ import annotations

from msgspec import Struct

from loadtest.generated.agents import Agents, Pauses, live_sessions
from loadtest.generated.chats import Chats, chats
from loadtest.generated.script import Script
from loadtest.workload import Workload


class Mixed(Struct, frozen=True, kw_only=True):
    """`num_live` agents for `span_s` seconds, and chats of `rate` conversations a second."""

    num_live: int = 20
    span_s: float = 600.0
    rate: float = 0.5
    num_turns: int = 30  # of agents, median
    num_shared_tokens: int = 11_500
    num_output_tokens: int = 300
    pauses: Pauses = "short"
    sub_agent_share: float = 0.0
    scale_tokens: float = 1.0
    block_size: int = 512
    seed: int = 0

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        agents = Agents(
            num_turns=self.num_turns,
            num_shared_tokens=self.num_shared_tokens,
            num_output_tokens=self.num_output_tokens,
            pauses=self.pauses,
            sub_agent_share=self.sub_agent_share,
            scale_tokens=self.scale_tokens,
            seed=self.seed,
        )
        persons = Chats(
            num_sessions=max(1, round(self.rate * self.span_s)),
            rate=self.rate,
            scale_tokens=self.scale_tokens,
            seed=self.seed,
        )
        script = Script(self.block_size)
        live_sessions(script, agents.profile, self.num_live, self.span_s)
        chats(script, persons)
        return script.workload(
            f"mixed, {self.num_live} live agents, {self.rate:g} chats/s, seed {self.seed}"
        )
