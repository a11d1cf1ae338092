"""Coding agents as block ids: the sessions of `loadtest.agents` without their text.

Every turn's prompt is the one before, its reply, and what a tool said (or the user, at first).
Sub-agents start from their parent's context; their reports are its next tool results.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.agents import MARKUP_TOKENS, Profile, TurnPlan, plan_fork, plan_session
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Done, Script
from loadtest.timing import poisson
from loadtest.workload import Workload

_SUB_TASK_TOKENS: Final = 40  # of `agent_text.sub_task`, with tiny_model


class Agents(Struct, frozen=True, kw_only=True):
    """Agent sessions; the defaults and their sources are those of `loadtest.agents.Profile`."""

    num_sessions: int = 50
    num_turns: int = 30  # median
    rate: float = 1.0  # sessions started per second, a Poisson process; infinite: all at once
    num_shared_tokens: int = 11_500  # system prompt and tools
    sub_agent_share: float = 0.44  # of the sessions
    scale_tokens: float = 1.0
    block_size: int = 512
    seed: int = 0

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        profile = Profile(
            num_sessions=self.num_sessions,
            num_turns=self.num_turns,
            num_shared_tokens=self.num_shared_tokens,
            sub_agent_share=self.sub_agent_share,
            scale_tokens=self.scale_tokens,
            seed=self.seed,
        )
        starts = poisson(self.rate, random.Random(f"{self.seed}/starts"))
        name = f"agents, {self.num_sessions} sessions, seed {self.seed}"
        return agent_sessions(profile, self.block_size, starts).workload(name)


def agent_sessions(profile: Profile, block_size: int, starts: Iterator[float]) -> Script:
    """Write down the sessions that `profile` draws, each starting at one of `starts`."""
    script = Script(block_size)
    shared = Prefix(block_size).grow(profile.tokens(profile.num_shared_tokens))
    for index in range(profile.num_sessions):
        _Session(script, profile, f"s{index}", shared.fork()).play(
            plan_session(profile, index), next(starts), shared.num_tokens if index else 0
        )
    return script


class _Session:
    """One agent at work."""

    __slots__ = ("_id", "_prefix", "_profile", "_script")

    def __init__(self, script: Script, profile: Profile, session_id: str, prefix: Prefix) -> None:
        self._script = script
        self._profile = profile
        self._id = session_id
        self._prefix = prefix

    def play(self, plans: tuple[TurnPlan, ...], start_s: float, num_known_tokens: int) -> None:
        """Play a session that starts by itself."""
        done = self._say(plans[0], (), num_known_tokens, start_s)
        self._go_on(plans, done)

    def play_fork(self, plans: tuple[TurnPlan, ...], parent: Done) -> Done:
        """Play a sub-agent, which has its parent's context and a task; return its last turn."""
        task = replace(plans[0], num_input_tokens=_SUB_TASK_TOKENS)
        done = self._say(task, (parent,), parent.num_input_tokens)
        return self._go_on(plans, done)

    def _go_on(self, plans: tuple[TurnPlan, ...], done: Done) -> Done:
        for number, plan in enumerate(plans[1:], 1):
            reports = self._fork(plans[number - 1].num_sub_agents, number, done)
            if reports:  # they are the tool results, and their work was the wait
                num_tokens = sum(report.num_output_tokens for report in reports)
                plan = replace(plan, num_input_tokens=num_tokens, wait_s=0.0)
            done = self._say(plan, reports or (done,), done.num_input_tokens)
        return done

    def _say(
        self,
        plan: TurnPlan,
        after: tuple[Done, ...],
        num_known_tokens: int,
        arrival_s: float | None = None,
    ) -> Done:
        self._prefix.grow(plan.num_input_tokens + MARKUP_TOKENS)
        return self._script.say(
            self._id,
            self._prefix,
            plan.num_output_tokens,
            num_known_tokens=num_known_tokens,
            after=after,
            wait_s=plan.wait_s if after else 0.0,
            arrival_s=arrival_s,
        )

    def _fork(self, num_sub_agents: int, number: int, parent: Done) -> tuple[Done, ...]:
        """Run sub-agents from the context as it is; return their last turns."""
        reports = []
        for k in range(num_sub_agents):
            session_id = f"{self._id}.{number}.{k}"
            rng = random.Random(f"{self._profile.seed}/{session_id}/plan")
            plans = plan_fork(self._profile, rng, self._prefix.num_tokens)
            child = _Session(self._script, self._profile, session_id, self._prefix.fork())
            reports.append(child.play_fork(plans, parent))
        return tuple(reports)
